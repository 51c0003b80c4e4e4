// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/tp_rules/name_list.h"

#include <algorithm>
#include <optional>

#include "checkpoints/tp_rules/expression.h"

namespace shardwright::checkpoints {
namespace {

constexpr std::string_view kSpecial = "\\.^$*+?{}[]|()-&~# \t\n\r\v\f";

bool IsWord(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

// Returns the name in `^...$` if it contains no special characters.
std::optional<std::string> LiteralOf(std::string_view expression) {
  if (expression.size() < 2 || expression.front() != '^' || expression.back() != '$') {
    return std::nullopt;
  }
  expression = expression.substr(1, expression.size() - 2);
  std::string name;
  for (std::size_t i = 0; i < expression.size(); ++i) {
    char c = expression[i];
    if (c == '\\') {
      if (++i == expression.size() || IsWord(expression[i])) return std::nullopt;
      c = expression[i];
    } else if (kSpecial.find(c) != std::string_view::npos && c != '-' && c != '&' && c != '~' &&
               c != '#' && c != ' ') {
      return std::nullopt;
    }
    name += c;
  }
  return name;
}

}  // namespace

NameList::NameList() = default;
NameList::~NameList() = default;
NameList::NameList(NameList&&) noexcept = default;
NameList& NameList::operator=(NameList&&) noexcept = default;

Status NameList::Add(std::string_view expression, std::string_view key) {
  const auto index = static_cast<std::uint32_t>(texts_.size());
  if (std::optional<std::string> name = LiteralOf(expression)) {
    literals_.emplace(*std::move(name), index);
  } else {
    auto compiled = CompileExpression(expression);
    if (!compiled->ok()) {
      return Fail(Errc::kUnsupported, key, ": expression \"", expression,
                  "\" cannot be used: ", compiled->error());
    }
    expressions_.emplace_back(index, std::move(compiled));
  }
  texts_.emplace_back(expression);
  return {};
}

std::vector<std::uint32_t> NameList::Match(const std::string& name) const {
  std::vector<std::uint32_t> found;
  const auto [first, last] = literals_.equal_range(name);
  for (auto it = first; it != last; ++it) found.push_back(it->second);
  for (const auto& [index, expression] : expressions_) {
    if (MatchExpression(*expression, name, re2::RE2::ANCHOR_START)) found.push_back(index);
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::string AnchoredLiteral(std::string_view name) {
  std::string text = "^";
  for (char c : name) {
    if (kSpecial.find(c) != std::string_view::npos) text += '\\';
    text += c;
  }
  return text + "$";
}

}  // namespace shardwright::checkpoints
