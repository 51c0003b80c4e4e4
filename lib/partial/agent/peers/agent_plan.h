// SPDX-License-Identifier: Apache-2.0
// lib/partial/agent/peers: how agents find and identify each other. agent_plan.h is the file of
// `pec-save plan --agents`, which places copies. plan_file.h follows that file while an agent runs.
// agent_hello.h is the first message of a connection.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"
#include "support/base/stop.h"

namespace shardwright::partial {

/// An agent and where its copies go.
struct PlannedAgent {
  std::string name;              ///< its --name: IsAgentName
  std::string address;           ///< for the other agents (os::ParseAddress)
  std::uint64_t first_rank = 0;  ///< ranks of its node: first_rank to end_rank - 1
  std::uint64_t end_rank = 0;
  std::uint64_t since = 1;           ///< version of the plan in which this agent took this place
  bool lost = false;                 ///< sends and keeps no copies
  std::vector<std::uint32_t> peers;  ///< indices of the agents that keep its copies, best first
};

/// Placement of the copies of all agents of a job. Source: docs/formats/agent-plan.md.
struct AgentPlan {
  std::string job;            ///< random name of the job: 32 hexadecimal digits
  std::uint64_t version = 1;  ///< counts the plans of this job
  std::string store;          ///< StoreHead::id; empty: any store
  std::uint32_t copies = 1;   ///< requested copies of each agent's snapshots
  std::uint32_t group = 1;    ///< agents in a row with ranks of the same pipeline stages
  std::vector<PlannedAgent> agents;

  /// Returns the agent of a name that is not lost; null: there is none.
  const PlannedAgent* Find(std::string_view name) const;
  /// Returns the number of agents that are not lost.
  std::size_t alive() const;
  /// Returns the names of the agents that are not lost and have fewer than `copies` copies.
  std::vector<std::string> Incomplete() const;
};

/// Name and address of an agent.
struct AgentPlace {
  std::string name;
  std::string address;
};

/// Parses "NAME=ADDRESS", or "HOST:PORT", where the name is HOST.
/// \error kUsage  an invalid name or address, port 0, a socket file without a name
/// Pure.
Result<AgentPlace> ParseAgentPlace(const std::string& text);

/// A job that gets an agent plan.
struct AgentPlanRequest {
  std::string store;     ///< as AgentPlan
  std::uint64_t dp = 1;  ///< data-parallel ranks of each pipeline stage
  std::uint64_t pp = 1;  ///< pipeline stages
  std::uint64_t ranks_per_node = 1;
  std::uint64_t copies = 1;
  std::vector<AgentPlace> agents;  ///< one for each node, in the order of the ranks
};

/// Makes the first plan of a job. An agent is a worker of PlaceReplicas, because it sends the state
/// of all ranks of its node. Agents with ranks of the same pipeline stages form a group.
/// \error kUsage  fewer than two agents, not one for each node, a name or an address twice;
///        kInternal  no random bytes for the name of the job; as PlaceReplicas
/// Local. Source: docs/formats/agent-plan.md.
Result<AgentPlan> MakeAgentPlan(const AgentPlanRequest& request, const StopCheck& stop = {});

/// Makes the next version of a plan. Copies stay where they are if possible.
/// \param lost  names of agents that have left
/// \param joined  agents that take the places of lost ones, in order
/// \error kUsage  nothing changes, a name that is not in the plan, more agents have joined than
///        places are free, a name or an address twice, all agents are lost; as PlaceLostReplicas
/// Pure but for `stop`.
Result<AgentPlan> NextAgentPlan(const AgentPlan& plan, const std::vector<std::string>& lost,
                                const std::vector<AgentPlace>& joined, const StopCheck& stop = {});

/// Serializes a plan as JSON with a checksum, one line for each agent.
/// Pure.
std::string ToText(const AgentPlan& plan);

/// Inverse of ToText. Checks that every agent that keeps copies exists.
/// \error kBadInput  no such plan, a damaged or inconsistent one; kUnsupported  another version of
///        the format; kLimit  too many agents
/// Pure.
Result<AgentPlan> ParseAgentPlan(std::string_view text, const std::string& where);

/// Reads a plan from a file. \error kNotFound; as ParseAgentPlan
Result<AgentPlan> ReadAgentPlan(const std::string& path);

}  // namespace shardwright::partial
