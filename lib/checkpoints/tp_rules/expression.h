// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <re2/re2.h>

#include <memory>
#include <span>
#include <string_view>

namespace shardwright::checkpoints {

// RE2 does not bear want of memory: an exception that passes through it leaves a heap that ends the
// process much later, anywhere, and what it allocates without exceptions it uses unseen. All calls
// of it are here, and want of memory in them ends the process there and then.

/// Compiles a regular expression. Whether it is one, `ok()` says.
/// Pure.
std::unique_ptr<re2::RE2> CompileExpression(std::string_view text) noexcept;

/// Whether an expression matches the whole of `name`, or with ANCHOR_START how it begins.
/// \param groups  the match itself, then what its groups have matched, pointing into `name`
/// Pure.
bool MatchExpression(const re2::RE2& expression, std::string_view name,
                     re2::RE2::Anchor anchor = re2::RE2::ANCHOR_BOTH,
                     std::span<re2::StringPiece> groups = {}) noexcept;

}  // namespace shardwright::checkpoints
