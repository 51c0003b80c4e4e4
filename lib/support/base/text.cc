// SPDX-License-Identifier: Apache-2.0
#include "support/base/text.h"

#include <cstdio>

namespace shardwright {

std::string Fixed(double value, int digits) {
  char text[400];  // the longest double has 309 digits before the point
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string Percent(double share, int digits) { return Fixed(100 * share, digits) + " %"; }

std::string Plural(std::uint64_t count, std::string_view noun) {
  std::string text = std::to_string(count) + " ";
  text += noun;
  if (count != 1) text += "s";
  return text;
}

std::string Joined(std::span<const std::string> words, std::string_view between) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i != 0) text += between;
    text += words[i];
  }
  return text;
}

std::string FirstFew(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 8;
  if (names.size() <= kShown) return Joined(names, ", ");
  return Joined(std::span(names).first(kShown), ", ") + ", ... (" + std::to_string(names.size()) +
         " in all)";
}

std::string_view Trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n\v\f";
  const std::size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  quoted += text;
  return quoted + '"';
}

std::string ShellWord(std::string_view text) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=:,./@%";
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string_view::npos) {
    return std::string(text);
  }
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

std::string Hex(std::span<const std::byte> bytes) {
  constexpr std::string_view kHexDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const std::byte byte : bytes) {
    text += kHexDigits[std::to_integer<std::size_t>(byte) >> 4];
    text += kHexDigits[std::to_integer<std::size_t>(byte) & 15];
  }
  return text;
}

}  // namespace shardwright
