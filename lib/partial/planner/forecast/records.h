// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "partial/select/budget.h"
#include "partial/select/selection.h"
#include "partial/select/sharding/sharding.h"
#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

// Writes plans that can be verified without this program. Each text is one JSON object and
// ends with a line feed. The output is deterministic. Layers are named by their ordinals.

/// Writes selections of consecutive checkpoints, kind "selection".
/// \param k_persist  if present, the persist sets are listed too
/// \error kUsage  layers with different numbers of experts, because the record has one N
/// Pure. Source: docs/pec-planning.md section 11.
Result<std::string> SelectionRecord(const ExpertMap& map, std::uint32_t k_snapshot,
                                    std::optional<std::uint32_t> k_persist,
                                    std::span<const TwoLevelSelection> checkpoints);

/// Writes a selection under a budget, kind "budget".
/// Pure. Source: docs/pec-planning.md section 11.
std::string BudgetRecord(const Counts& popularity, const BudgetSelection& budget);

/// Writes a division of modules over ranks, kind "sharding". A module
/// in several pieces is listed by its pieces, "name[first:last]".
/// \param names  by module, distinct
/// \param start  [rank]
/// \error kMismatch  a piece of a module without a name
/// Pure. Source: docs/pec-planning.md section 11.
Result<std::string> ShardingRecord(std::span<const std::string> names,
                                   std::span<const std::uint64_t> start, const ShardPlan& plan);

}  // namespace shardwright::partial
