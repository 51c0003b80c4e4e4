// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "partial/select/lost_tokens.h"
#include "partial/store/manifest.h"
#include "partial/store/store.h"
#include "support/base/result.h"
#include "token_counts/trace.h"

namespace shardwright::partial {

/// Updates the counters of both levels to `iteration` from a trace: adds tokens of iterations
/// after state->counted_to. If tokens were not counted before, counts the whole trace.
/// \pre the trace has all iterations above state->counted_to, or above 0 if that is absent
/// \param ends  iterations at which the record splits its sums: versions
///        that a restore may return to, in addition to those of checkpoints
/// \returns the record to store with the checkpoint; its parent is not set
/// \error kMismatch  layers or experts of trace and model differ, both
///        named; kBadInput the trace lacks iterations, which are named
/// Pure.
Result<TokenRecord> CountUpTo(const token_counts::TokenTrace& trace, const std::string& where,
                              std::uint64_t iteration, const LayerExperts& experts,
                              SelectionState* state, const std::set<std::uint64_t>& ends = {});

/// Reads the tokens of a chain of checkpoints, from the one with `sequence` backward
/// as far as records exist. Returns nullopt if that checkpoint has no record.
/// \error as Store::ReadTokens
/// Local.
Result<std::optional<TokenHistory>> ReadHistory(const Store& store, std::uint64_t sequence);

}  // namespace shardwright::partial
