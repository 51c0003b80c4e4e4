// SPDX-License-Identifier: Apache-2.0
#include "support/base/text.h"
#include "support/html/page.h"
#include "support/html/svg_internal.h"

namespace shardwright::html {

std::string At(double value) { return Fixed(value, 1); }

std::string Element(const char* name, const std::vector<Attribute>& attributes,
                    const std::string& content) {
  std::string text = "<" + std::string(name);
  for (const auto& [key, value] : attributes) {
    text += " " + std::string(key) + "=\"" + Escape(value) + "\"";
  }
  return content.empty() ? text + "/>" : text + ">" + content + "</" + name + ">";
}

std::string Text(double x, double y, const char* anchor, const std::string& text,
                 const char* style) {
  return Element("text", {{"x", At(x)}, {"y", At(y)}, {"text-anchor", anchor}, {"class", style}},
                 Escape(text));
}

std::string Line(double x1, double y1, double x2, double y2, const std::string& style) {
  return Element(
      "line", {{"x1", At(x1)}, {"y1", At(y1)}, {"x2", At(x2)}, {"y2", At(y2)}, {"class", style}});
}

}  // namespace shardwright::html
