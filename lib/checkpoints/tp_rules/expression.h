// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <re2/re2.h>

#include <memory>
#include <span>
#include <string_view>

namespace shardwright::checkpoints {

// RE2 is not safe when memory runs out: an exception that passes through it corrupts the heap,
// and it uses the results of non-throwing allocations without a check. Therefore all calls to
// RE2 are in this file and noexcept, so that running out of memory ends the process immediately.

/// Compiles a regular expression. If it is invalid, `ok()` of the result is false.
/// Pure.
std::unique_ptr<re2::RE2> CompileExpression(std::string_view text) noexcept;

/// Returns true if an expression matches all of `name`, or its beginning with ANCHOR_START.
/// \param groups  receives the match and then the matches of its groups, as views into `name`
/// Pure.
bool MatchExpression(const re2::RE2& expression, std::string_view name,
                     re2::RE2::Anchor anchor = re2::RE2::ANCHOR_BOTH,
                     std::span<re2::StringPiece> groups = {}) noexcept;

}  // namespace shardwright::checkpoints
