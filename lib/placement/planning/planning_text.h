// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "placement/planning/planning.h"
#include "placement/planning/simulate_events.h"

// Text reports for people: lines and tables of at most 100 columns, except for long names.

namespace shardwright::placement {

/// Returns the input and the measures of one plan.
/// \pre row.plan
/// Pure.
std::string SummaryText(const PlanRequest& request, const PlanInput& input, const PlannedRow& row);

/// Returns a table with one line per layer of a plan.
/// \pre row.plan
/// Pure.
std::string LayersText(const PlanInput& input, const PlannedRow& row);

/// Returns one table of all strategies, a legend, and the reasons for missing plans.
/// Pure.
std::string ComparisonText(const PlanRequest& request, const PlanInput& input,
                           const std::vector<PlannedRow>& rows);

/// Returns the simulations: one line per strategy and one per step with a loss or without a plan.
/// \param events  file of the simulated events
/// Pure.
std::string FailureSimulationsText(const std::string& events,
                                   const FailureSimulations& simulations);

}  // namespace shardwright::placement
