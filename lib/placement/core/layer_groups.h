// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "placement/core/types.h"
#include "support/base/result.h"

namespace shardwright::placement {

/// Plans layers that have the same number of experts, from their current placement or nullptr.
/// The result has notes for every layer.
using GroupPlan =
    std::function<Result<StrategyResult>(const TokenCounts& loads, const Placement* current)>;

/// Plans layers that may have different numbers of experts. Calls `plan` once for the layers of
/// each number, fewest experts first, and merges the plans in the order of the layers. A merged
/// plan has no curve of moves. If all layers have the same number, returns the plan as it is.
/// \param current  placement of all layers on the devices now, or nullptr
/// \error as `plan`; with several numbers of experts, the message starts with that of the group
/// Collective if `plan` is; otherwise pure.
Result<StrategyResult> PlanEachSize(const TokenCounts& loads, const Placement* current,
                                    const GroupPlan& plan);

}  // namespace shardwright::placement
