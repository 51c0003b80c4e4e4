// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "partial/agent/peers/agent_plan.h"
#include "partial/planner/plan.h"
#include "support/base/result.h"
#include "support/cli/app.h"

namespace shardwright::apps {

/// Parses the values of --agents and --joined: NAME=ADDRESS or HOST:PORT, separated by commas.
/// \error kUsage
Result<std::vector<partial::AgentPlace>> ParsePlaces(const std::vector<std::string>& values);

/// Makes a plan for the agents of a planned job and writes it. Rank 0 writes it and shows it.
/// \param places  one agent for each node
/// \param output  file for the plan
/// \param result  gets the member `agent_plan`, on rank 0
/// \error as partial::MakeAgentPlan, WriteText, Store::Open
/// Collective.
Status WriteAgentPlan(cli::Context& context, const partial::PlanAnswer& answer,
                      const std::vector<partial::AgentPlace>& places, const std::string& output,
                      nlohmann::json* result);

}  // namespace shardwright::apps
