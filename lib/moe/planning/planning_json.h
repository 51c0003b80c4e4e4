#pragma once

#include <nlohmann/json_fwd.hpp>

#include "moe/planning/planning.h"

// The answers for programs: docs/report.md, "moe-replace".

namespace shardwright::moe {

/// What was read.
/// Pure.
nlohmann::json InputJson(const PlanInput& input);

/// A plan with everything that is known of it, or why there is none.
/// \param node_failure  probability that a node fails; 0: the plan's survival is not told
/// Pure.
nlohmann::json RowJson(const PlanInput& input, const PlannedRow& row, double node_failure);

/// A replay, moment by moment.
/// Pure.
nlohmann::json ReplayJson(const ReplayResult& result);

}  // namespace shardwright::moe
