// SPDX-License-Identifier: Apache-2.0
#include "support/html/page.h"

#include "support/html/parts_internal.h"
#include "support/text/text.h"

namespace shardwright::html {

std::string Escape(std::string_view text) {
  std::string safe;
  safe.reserve(text.size());
  for (const char c : text::VisibleText(text)) {
    switch (c) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      case '\'':
        safe += "&#39;";
        break;
      default:
        safe += c;
    }
  }
  return safe;
}

std::string Tile(std::string_view name, std::string_view value, std::string_view note) {
  return "<div class=\"tile\"><span>" + Escape(name) + "</span><b>" + Escape(value) +
         "</b><small>" + Escape(note) + "</small></div>\n";
}

std::string ScriptSafe(std::string_view json) {
  std::string safe;
  safe.reserve(json.size());
  for (const char c : json) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
  return safe;
}

std::string Render(const Document& document) {
  const bool runs = !document.script.empty();
  std::string text =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      // Makes the browser block all network access.
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
      "style-src 'unsafe-inline'";
  if (runs) text += "; script-src 'unsafe-inline'";
  text +=
      "\"/>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
      "<title>" +
      Escape(document.title) + "</title>\n<style>\n";
  text += kPageCss + document.css + "</style>\n</head>\n<body>\n" + document.body;
  if (runs) text += "<script>\n" + document.script + "</script>\n";
  return text + "</body>\n</html>\n";
}

}  // namespace shardwright::html
