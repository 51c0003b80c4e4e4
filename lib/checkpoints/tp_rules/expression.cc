// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/tp_rules/expression.h"

#include "support/base/memory.h"

namespace shardwright::checkpoints {

std::unique_ptr<re2::RE2> CompileExpression(std::string_view text) noexcept {
  const EndsWithoutMemory ends;
  re2::RE2::Options options;
  options.set_log_errors(false);
  return std::make_unique<re2::RE2>(re2::StringPiece(text.data(), text.size()), options);
}

bool MatchExpression(const re2::RE2& expression, std::string_view name, re2::RE2::Anchor anchor,
                     std::span<re2::StringPiece> groups) noexcept {
  const EndsWithoutMemory ends;
  return expression.Match({name.data(), name.size()}, 0, name.size(), anchor, groups.data(),
                          static_cast<int>(groups.size()));
}

}  // namespace shardwright::checkpoints
