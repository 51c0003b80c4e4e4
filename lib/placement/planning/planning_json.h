// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "placement/planning/planning.h"
#include "placement/planning/simulate_events.h"

// JSON reports for programs: docs/report.md, "moe-replace".

namespace shardwright::placement {

/// Returns the input and a plan with all its measures.
/// Pure.
nlohmann::json PlanJson(const PlanRequest& request, const PlanInput& input, const PlannedRow& row);

/// Returns the input and the plan of every strategy, or the reason for a missing plan.
/// Pure.
nlohmann::json ComparisonJson(const PlanRequest& request, const PlanInput& input,
                              const std::vector<PlannedRow>& rows);

/// Returns the simulations, step by step.
/// Pure.
nlohmann::json FailureSimulationsJson(const FailureSimulations& simulations);

}  // namespace shardwright::placement
