// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "placement/planning/planning.h"

namespace shardwright::placement {

/// Computes the cost of plain expert parallelism as CostOf does; empty if it is infeasible.
/// \param input  `vanilla` is not used
/// \pre as CostOf
/// \error as CostOf
/// Local; layers in parallel on the caller's task arena.
Result<PlacementCost> VanillaCost(const PlanRequest& request, const PlanInput& input,
                                  const StopCheck& stop);

/// Computes the memory of a plan if the cluster specifies the size of an expert, and its times if
/// the request has their inputs. Takes the cost of plain expert parallelism from `input.vanilla`.
/// \pre CheckCost of the request and the cluster
/// \error kLimit  as MemoryOf; kStopped
/// Local; layers in parallel on the caller's task arena.
Result<PlannedCost> CostOf(const PlanRequest& request, const PlanInput& input,
                           const StrategyResult& result, const StopCheck& stop);

/// Returns lines for the summary of a plan; empty if nothing was computed.
/// Pure.
std::string CostText(const PlannedCost& cost);

/// Returns a table of the times of each layer with its legend; empty without times.
/// Pure.
std::string CostLayersText(const PlannedCost& cost, const TokenCounts& loads);

/// Returns a table of the times and the memory of several plans; empty without times.
/// Pure.
std::string CostComparisonText(const std::vector<PlannedRow>& rows);

/// Adds `times` and `memory` to the JSON report of a plan, as far as they were computed.
/// Pure.
void AddCostJson(const PlannedCost& cost, const TokenCounts& loads, nlohmann::json* plan);

}  // namespace shardwright::placement
