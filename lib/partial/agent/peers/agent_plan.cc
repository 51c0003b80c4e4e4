// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/peers/agent_plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include "partial/agent/peers/agent_hello.h"
#include "partial/select/sharding/replica_placement.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/system.h"
#include "support/os/socket.h"

namespace shardwright::partial {
namespace {

constexpr std::size_t kJobBytes = 16;

/// Returns the number of agents in a row that have the same pipeline stages: the nodes of a stage,
/// or one if a node has whole stages. If nodes and stages are not aligned, all agents are a group.
std::uint64_t GroupOf(const AgentPlanRequest& request, std::uint64_t nodes) {
  if (request.dp % request.ranks_per_node == 0) return request.dp / request.ranks_per_node;
  return request.ranks_per_node % request.dp == 0 ? 1 : nodes;
}

/// Makes the grid of PlaceReplicas in which every agent is a worker and a node.
Result<WorkerGrid> GridOf(const AgentPlan& plan) {
  const auto agents = static_cast<std::uint32_t>(plan.agents.size());
  SW_CHECK(plan.group > 0 && agents % plan.group == 0);
  return StageMajorGrid(plan.group, agents / plan.group, 1);
}

Status CheckPlaces(const std::vector<PlannedAgent>& agents) {
  std::set<std::string_view> names;
  std::set<std::string_view> addresses;
  for (const PlannedAgent& agent : agents) {
    if (agent.lost) continue;
    if (!names.insert(agent.name).second) {
      return Fail(Errc::kUsage, "two agents have the name \"", agent.name,
                  "\"; give them different names as NAME=ADDRESS");
    }
    if (!addresses.insert(agent.address).second) {
      return Fail(Errc::kUsage, "two agents have the address ", agent.address);
    }
  }
  return {};
}

}  // namespace

const PlannedAgent* AgentPlan::Find(std::string_view name) const {
  const auto found = std::ranges::find_if(
      agents, [&](const PlannedAgent& one) { return !one.lost && one.name == name; });
  return found == agents.end() ? nullptr : &*found;
}

std::size_t AgentPlan::alive() const {
  return static_cast<std::size_t>(
      std::ranges::count_if(agents, [](const PlannedAgent& one) { return !one.lost; }));
}

std::vector<std::string> AgentPlan::Incomplete() const {
  std::vector<std::string> names;
  for (const PlannedAgent& agent : agents) {
    if (!agent.lost && agent.peers.size() < copies) names.push_back(agent.name);
  }
  return names;
}

Result<AgentPlace> ParseAgentPlace(const std::string& text) {
  const std::size_t at = text.find('=');
  const bool named = at != std::string::npos && !text.starts_with("unix:");
  AgentPlace place;
  place.address = named ? text.substr(at + 1) : text;
  SW_TRY_ASSIGN(const os::Address address, os::ParseAddress(place.address));
  if (!address.is_local() && address.port == 0) {
    return Fail(Errc::kUsage, text, ": port 0; agents find each other at a fixed port");
  }
  if (!named && address.is_local()) {
    return Fail(Errc::kUsage, text, ": a socket file requires a name: NAME=unix:PATH");
  }
  place.name = named ? text.substr(0, at) : address.host;
  if (IsAgentName(place.name)) return place;
  return Fail(Errc::kUsage, text,
              ": a name of 1 to 128 printable characters without spaces is "
              "expected before \"=\"");
}

Result<AgentPlan> MakeAgentPlan(const AgentPlanRequest& request, const StopCheck& stop) {
  SW_TRY_ASSIGN(const std::uint64_t ranks, CheckedMul(request.dp, request.pp));
  if (ranks == 0 || request.ranks_per_node == 0) {
    return Fail(Errc::kUsage, ranks, " ranks, ", request.ranks_per_node,
                " ranks per node: expected at least one of each");
  }
  const std::uint64_t nodes = CeilDiv(ranks, request.ranks_per_node);
  if (nodes < 2 || nodes > limits::kMoeNodes) {
    return Fail(Errc::kUsage, "copies on other nodes require 2 to ", limits::kMoeNodes, " nodes; ",
                ranks, " ranks with ", request.ranks_per_node, " per node use ", nodes);
  }
  if (request.agents.size() != nodes) {
    return Fail(Errc::kUsage, "one agent for each node is expected: ", nodes, " (", ranks,
                " ranks, ", request.ranks_per_node, " per node), found ", request.agents.size());
  }
  AgentPlan plan;
  SW_TRY_ASSIGN(plan.job, RandomHex(kJobBytes));
  plan.store = request.store;
  plan.copies =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(request.copies, limits::kMoeNodes));
  plan.group = static_cast<std::uint32_t>(GroupOf(request, nodes));
  for (std::uint64_t node = 0; node < nodes; ++node) {
    PlannedAgent& agent = plan.agents.emplace_back();
    agent.name = request.agents[node].name;
    agent.address = request.agents[node].address;
    agent.first_rank = node * request.ranks_per_node;
    agent.end_rank = std::min(ranks, agent.first_rank + request.ranks_per_node);
  }
  SW_TRY(CheckPlaces(plan.agents));
  SW_TRY_ASSIGN(const WorkerGrid grid, GridOf(plan));
  SW_TRY_ASSIGN(ReplicaPlan placed, PlaceReplicas(grid, plan.copies, stop));
  for (std::uint64_t node = 0; node < nodes; ++node) {
    plan.agents[node].peers = std::move(placed.holders[node]);
  }
  return plan;
}

Result<AgentPlan> NextAgentPlan(const AgentPlan& plan, const std::vector<std::string>& lost,
                                const std::vector<AgentPlace>& joined, const StopCheck& stop) {
  if (lost.empty() && joined.empty()) {
    return Fail(Errc::kUsage, "a new plan requires agents that are lost or have joined");
  }
  AgentPlan next = plan;
  ++next.version;
  for (const std::string& name : lost) {
    const auto found = std::ranges::find_if(
        next.agents, [&](const PlannedAgent& one) { return !one.lost && one.name == name; });
    if (found == next.agents.end()) {
      return Fail(Errc::kUsage, "no agent \"", name, "\" in version ", plan.version,
                  " of the plan, or it is lost already");
    }
    found->lost = true;
  }
  auto place = next.agents.begin();
  for (const AgentPlace& agent : joined) {
    place =
        std::find_if(place, next.agents.end(), [](const PlannedAgent& one) { return one.lost; });
    if (place == next.agents.end()) {
      return Fail(Errc::kUsage, "agent \"", agent.name,
                  "\" has no place: it requires a lost agent. Make another plan with pec-save plan "
                  "if the job has more nodes now");
    }
    place->name = agent.name;
    place->address = agent.address;
    place->since = next.version;
    place->lost = false;
    place->peers.clear();
  }
  SW_TRY(CheckPlaces(next.agents));
  if (next.alive() == 0) return Fail(Errc::kUsage, "all agents of the plan are lost");
  std::vector<bool> gone;
  std::vector<std::vector<std::uint32_t>> before;
  for (PlannedAgent& agent : next.agents) {
    gone.push_back(agent.lost);
    before.push_back(std::move(agent.peers));
  }
  SW_TRY_ASSIGN(const WorkerGrid grid, GridOf(next));
  SW_TRY_ASSIGN(ReplicaPlan placed, PlaceLostReplicas(grid, next.copies, gone, before, stop));
  for (std::size_t i = 0; i < next.agents.size(); ++i) {
    next.agents[i].peers = std::move(placed.holders[i]);
  }
  return next;
}

}  // namespace shardwright::partial
