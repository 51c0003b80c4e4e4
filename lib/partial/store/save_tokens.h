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

/// Brings the counters of both levels up to `iteration` from a trace: adds what came after
/// state->counted_to; where tokens were not counted until now, counts anew from the trace alone.
/// \pre the trace has all iterations above state->counted_to, above 0 without one
/// \param ends  iterations, each of which ends a sum of what is kept: those of versions that a
///        restore may go back to besides those of checkpoints
/// \returns what to keep beside the checkpoint; its parent is not set
/// \error kMismatch  the trace has other layers or experts than the model, both named; kBadInput
///        iterations that are missing from the trace, named
/// Pure.
Result<TokenRecord> CountUpTo(const token_counts::TokenTrace& trace, const std::string& where,
                              std::uint64_t iteration, const LayerExperts& experts,
                              SelectionState* state, const std::set<std::uint64_t>& ends = {});

/// The tokens of a chain of checkpoints, from the one with `sequence` backward as far as records
/// reach. Nothing where that checkpoint has no record.
/// \error as Store::ReadTokens
/// Local.
Result<std::optional<TokenHistory>> ReadHistory(const Store& store, std::uint64_t sequence);

}  // namespace shardwright::partial
