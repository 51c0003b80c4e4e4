// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "placement/planning/planning.h"

// The answers for people: lines and tables of at most 100 columns, but for names.

namespace shardwright::placement {

/// What was read, and what one plan is good for.
/// \pre row.plan
/// Pure.
std::string SummaryText(const PlanRequest& request, const PlanInput& input, const PlannedRow& row);

/// A table with a line per layer of a plan.
/// \pre row.plan
/// Pure.
std::string LayersText(const PlanInput& input, const PlannedRow& row);

/// All strategies in one table, what its columns mean, and why some have no plan.
/// Pure.
std::string ComparisonText(const PlanRequest& request, const PlanInput& input,
                           const std::vector<PlannedRow>& rows);

/// Replays, one line per strategy and one per moment at which something was lost.
/// \param events  file that was played
/// Pure.
std::string ReplaysText(const std::string& events, const Replays& replays);

}  // namespace shardwright::placement
