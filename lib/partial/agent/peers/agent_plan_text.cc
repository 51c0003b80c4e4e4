// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <initializer_list>
#include <map>
#include <set>
#include <utility>

#include "engine/exec/manifest.h"
#include "partial/agent/peers/agent_hello.h"
#include "partial/agent/peers/agent_plan.h"
#include "support/base/limits.h"
#include "support/json/json.h"
#include "support/os/dir.h"
#include "support/os/socket.h"

namespace shardwright::partial {
namespace {

using Json = nlohmann::json;

constexpr const char* kSchema = "shardwright-agent-plan";
constexpr std::uint64_t kSchemaVersion = 1;
constexpr std::uint64_t kMostVersions = std::uint64_t{1} << 53;
constexpr std::size_t kHexDigits = 32;
constexpr std::uint64_t kMostPlanRanks = std::uint64_t{1} << 40;

bool IsHexId(const std::string& text) {
  return text.size() == kHexDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

/// Returns a required member of an object. \error kBadInput
Result<const Json*> MemberOf(const Json& object, const char* name, const std::string& where) {
  const Json* const member = json::Find(object, name);
  if (member != nullptr) return member;
  return Fail(Errc::kBadInput, where, ": \"", name, "\" is missing");
}

Result<std::string> MemberText(const Json& object, const char* name, const std::string& where) {
  SW_TRY_ASSIGN(const Json* const member, MemberOf(object, name, where));
  if (member->is_string()) return member->get<std::string>();
  return Fail(Errc::kBadInput, where, ": \"", name, "\": a text expected, found ",
              json::KindOf(*member));
}

Result<std::uint64_t> MemberNumber(const Json& object, const char* name, std::uint64_t first,
                                   std::uint64_t last, const std::string& where) {
  SW_TRY_ASSIGN(const Json* const member, MemberOf(object, name, where));
  return json::WholeOf(*member, first, last, where + ": \"" + name + '"');
}

Status CheckMembers(const Json& object, std::initializer_list<const char*> names,
                    const std::string& where) {
  for (const auto& item : object.items()) {
    const bool known = std::ranges::find(names, item.key()) != names.end();
    if (!known) return Fail(Errc::kBadInput, where, ": unknown member \"", item.key(), '"');
  }
  return {};
}

Status ReadPlanHead(const Json& root, const std::string& where, AgentPlan* plan) {
  const Json* const schema = root.is_object() ? json::Find(root, "schema") : nullptr;
  if (schema == nullptr || *schema != kSchema) {
    return Fail(Errc::kBadInput, where,
                ": not an agent plan, which pec-save plan --agents "
                "writes: \"schema\": \"",
                kSchema, "\" is missing");
  }
  SW_TRY_ASSIGN(const std::uint64_t format,
                MemberNumber(root, "schema_version", 1, kMostVersions, where));
  if (format != kSchemaVersion) {
    return Fail(Errc::kUnsupported, where, ": format version ", kSchemaVersion, " expected, found ",
                format);
  }
  SW_TRY(CheckMembers(root,
                      {"schema", "schema_version", exec::kTextSum, "job", "version", "store",
                       "copies", "group", "agents"},
                      where));
  SW_TRY_ASSIGN(plan->job, MemberText(root, "job", where));
  if (!IsHexId(plan->job)) {
    return Fail(Errc::kBadInput, where, ": \"job\": 32 hexadecimal digits expected");
  }
  SW_TRY_ASSIGN(plan->version, MemberNumber(root, "version", 1, kMostVersions, where));
  SW_TRY_ASSIGN(const Json* const store, MemberOf(root, "store", where));
  if (!store->is_null()) {
    SW_TRY_ASSIGN(plan->store, MemberText(root, "store", where));
    if (plan->store.empty()) {
      return Fail(Errc::kBadInput, where, ": \"store\": is empty; null means any store");
    }
  }
  SW_TRY_ASSIGN(const std::uint64_t copies,
                MemberNumber(root, "copies", 1, limits::kMoeNodes, where));
  plan->copies = static_cast<std::uint32_t>(copies);
  return {};
}

Status CheckPlannedAddress(const PlannedAgent& agent, const std::string& where) {
  const auto address = os::ParseAddress(agent.address);
  if (!address) return Fail(Errc::kBadInput, where, ": ", address.error().message);
  if (!address->is_local() && address->port == 0) {
    return Fail(Errc::kBadInput, where, ": ", agent.address, ": port 0");
  }
  return {};
}

/// Reads an agent, except for its peers.
/// \param first_rank  end of the ranks of the agent before
Result<PlannedAgent> ReadAgent(const Json& entry, std::uint64_t first_rank, std::uint64_t version,
                               const std::string& where) {
  if (!entry.is_object()) {
    return Fail(Errc::kBadInput, where, ": an object expected, found ", json::KindOf(entry));
  }
  SW_TRY(CheckMembers(entry, {"name", "address", "ranks", "since", "lost", "peers"}, where));
  PlannedAgent agent;
  SW_TRY_ASSIGN(agent.name, MemberText(entry, "name", where));
  if (!IsAgentName(agent.name)) return Fail(Errc::kBadInput, where, ": invalid name");
  SW_TRY_ASSIGN(agent.address, MemberText(entry, "address", where));
  SW_TRY(CheckPlannedAddress(agent, where));
  SW_TRY_ASSIGN(const Json* const ranks, MemberOf(entry, "ranks", where));
  if (!ranks->is_array() || ranks->size() != 2) {
    return Fail(Errc::kBadInput, where, ": \"ranks\": [FIRST, END] expected");
  }
  SW_TRY_ASSIGN(agent.first_rank,
                json::WholeOf((*ranks)[0], first_rank, first_rank, where + ": first of \"ranks\""));
  SW_TRY_ASSIGN(agent.end_rank, json::WholeOf((*ranks)[1], first_rank + 1, kMostPlanRanks,
                                              where + ": end of \"ranks\""));
  SW_TRY_ASSIGN(agent.since, MemberNumber(entry, "since", 1, version, where));
  if (const Json* const lost = json::Find(entry, "lost"); lost != nullptr) {
    if (!lost->is_boolean()) {
      return Fail(Errc::kBadInput, where, ": \"lost\": true or false expected, found ",
                  json::KindOf(*lost));
    }
    agent.lost = lost->get<bool>();
  }
  return agent;
}

/// Reads the peers of an agent. \param index  of the agents that are not lost, by name
Status ReadPeers(const Json& entry, const std::map<std::string, std::uint32_t>& index,
                 std::size_t most, const std::string& where, PlannedAgent* agent) {
  SW_TRY_ASSIGN(const Json* const peers, MemberOf(entry, "peers", where));
  if (!peers->is_array() || peers->size() > (agent->lost ? 0 : most)) {
    return Fail(Errc::kBadInput, where, ": \"peers\": at most ", agent->lost ? 0 : most,
                " names expected");
  }
  for (const Json& peer : *peers) {
    if (!peer.is_string()) {
      return Fail(Errc::kBadInput, where, ": \"peers\": a text expected, found ",
                  json::KindOf(peer));
    }
    const auto name = peer.get<std::string>();
    const auto found = index.find(name);
    if (found == index.end() || name == agent->name) {
      return Fail(Errc::kBadInput, where, ": \"peers\": \"", name,
                  "\" is not another agent of the plan, or it is lost");
    }
    if (std::ranges::find(agent->peers, found->second) != agent->peers.end()) {
      return Fail(Errc::kBadInput, where, ": \"peers\": \"", name, "\" occurs twice");
    }
    agent->peers.push_back(found->second);
  }
  return {};
}

Status ReadAgents(const Json& root, const std::string& where, AgentPlan* plan) {
  SW_TRY_ASSIGN(const Json* const list, MemberOf(root, "agents", where));
  if (!list->is_array() || list->empty()) {
    return Fail(Errc::kBadInput, where, ": \"agents\": a list of agents expected");
  }
  if (list->size() > limits::kMoeNodes) {
    return Fail(Errc::kLimit, where, ": ", list->size(), " agents: at most ", limits::kMoeNodes);
  }
  SW_TRY_ASSIGN(const std::uint64_t group, MemberNumber(root, "group", 1, list->size(), where));
  if (group == 0 || list->size() % group != 0) {
    return Fail(Errc::kBadInput, where, ": ", list->size(), " agents in groups of ", group);
  }
  plan->group = static_cast<std::uint32_t>(group);
  std::map<std::string, std::uint32_t> index;
  std::set<std::string> addresses;
  const auto at = [&](std::size_t i) { return StrCat(where, ": agent ", i); };
  for (const Json& entry : *list) {
    const std::size_t i = plan->agents.size();
    const std::uint64_t first_rank = i == 0 ? 0 : plan->agents.back().end_rank;
    SW_TRY_ASSIGN(PlannedAgent agent, ReadAgent(entry, first_rank, plan->version, at(i)));
    if (!agent.lost && !index.try_emplace(agent.name, static_cast<std::uint32_t>(i)).second) {
      return Fail(Errc::kBadInput, at(i), ": another agent has the name \"", agent.name, '"');
    }
    if (!agent.lost && !addresses.insert(agent.address).second) {
      return Fail(Errc::kBadInput, at(i), ": another agent has the address ", agent.address);
    }
    plan->agents.push_back(std::move(agent));
  }
  if (index.empty()) return Fail(Errc::kBadInput, where, ": all agents are lost");
  for (std::size_t i = 0; i < plan->agents.size(); ++i) {
    SW_TRY(ReadPeers((*list)[i], index, plan->copies, at(i), &plan->agents[i]));
  }
  return {};
}

void AppendAgent(const AgentPlan& plan, const PlannedAgent& agent, std::string* out) {
  *out += "{\"name\":";
  json::AppendString(out, agent.name);
  *out += ",\"address\":";
  json::AppendString(out, agent.address);
  *out +=
      StrCat(",\"ranks\":[", agent.first_rank, ',', agent.end_rank, "],\"since\":", agent.since);
  if (agent.lost) *out += ",\"lost\":true";
  *out += ",\"peers\":[";
  for (const std::uint32_t peer : agent.peers) {
    if (out->back() != '[') *out += ',';
    json::AppendString(out, plan.agents[peer].name);
  }
  *out += "]}";
}

}  // namespace

std::string ToText(const AgentPlan& plan) {
  std::string out = StrCat("{\"schema\":\"", kSchema, "\",\"schema_version\":", kSchemaVersion,
                           ",\"", exec::kTextSum, "\":\"", exec::NoTextSum(), "\",\n\"job\":\"",
                           plan.job, "\",\"version\":", plan.version, ",\"store\":");
  if (plan.store.empty()) {
    out += "null";
  } else {
    json::AppendString(&out, plan.store);
  }
  out += StrCat(",\"copies\":", plan.copies, ",\"group\":", plan.group, ",\n\"agents\":[\n");
  for (std::size_t i = 0; i < plan.agents.size(); ++i) {
    AppendAgent(plan, plan.agents[i], &out);
    out += i + 1 < plan.agents.size() ? ",\n" : "\n";
  }
  return exec::WithTextSum(out + "]}\n");
}

Result<AgentPlan> ParseAgentPlan(std::string_view text, const std::string& where) {
  SW_TRY_ASSIGN(const Json root, json::Parse(text, where));
  AgentPlan plan;
  SW_TRY(ReadPlanHead(root, where, &plan));
  SW_TRY(exec::CheckTextSum(text, where));
  SW_TRY(ReadAgents(root, where, &plan));
  return plan;
}

Result<AgentPlan> ReadAgentPlan(const std::string& path) {
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, limits::kJsonBytes));
  return ParseAgentPlan(text, path);
}

}  // namespace shardwright::partial
