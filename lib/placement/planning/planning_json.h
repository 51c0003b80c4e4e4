// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "placement/planning/planning.h"

// The answers for programs: docs/report.md, "moe-replace".

namespace shardwright::placement {

/// What was read, and a plan with everything that is known of it.
/// Pure.
nlohmann::json PlanJson(const PlanRequest& request, const PlanInput& input, const PlannedRow& row);

/// What was read, and every strategy's plan, or why there is none.
/// Pure.
nlohmann::json ComparisonJson(const PlanRequest& request, const PlanInput& input,
                              const std::vector<PlannedRow>& rows);

/// Replays, moment by moment.
/// Pure.
nlohmann::json ReplaysJson(const Replays& replays);

}  // namespace shardwright::placement
