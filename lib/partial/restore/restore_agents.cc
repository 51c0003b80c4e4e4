// SPDX-License-Identifier: Apache-2.0
// The memory of agents as a further level of a restore.

#include <chrono>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "checkpoints/registry.h"
#include "partial/restore/restore_internal.h"
#include "support/base/stop.h"
#include "support/json/json.h"
#include "support/os/socket.h"

namespace shardwright::partial::restore {
namespace {

using Json = nlohmann::json;

/// An agent that persists has locked the store, so a flush of another agent waits for it.
constexpr int kFlushTries = 60;
constexpr std::chrono::milliseconds kFlushWait(500);

/// Parses the address of a node's agent.
Result<os::Address> AddressOf(const Job& job, const std::string& text) {
  SW_TRY_ASSIGN(os::Address address, os::ParseAddress(text));
  address.trusted_user = job.options.trusted_user;
  return address;
}

Status Flush(AgentClient& client, const Sink& sink) {
  for (int i = 1;; ++i) {
    if (sink.stop_requested()) return Fail(Errc::kStopped, "stopped on request");
    const Result<std::string> done = client.Ask("flush");
    if (done) return {};
    if (done.error().code != Errc::kBusy || i == kFlushTries) {
      return tl::unexpected<Error>(done.error());
    }
    std::this_thread::sleep_for(kFlushWait);
  }
}

/// Agents at ports by position in the options. Checks that a position always leads
/// to the same agent, and two positions to two, so that no agent's memory is missed.
class Met {
 public:
  explicit Met(const RestoreOptions& options) : options_(options), ids_(options.agents.size()) {}

  AcceptsAgent At(std::size_t node) {
    return [this, node](const Hello& agent) { return Meet(node, agent); };
  }

 private:
  Status Meet(std::size_t node, const Hello& agent) {
    const std::string& address = options_.agents[node];
    if (!ids_[node].empty() && ids_[node] != agent.id) {
      return Fail(Errc::kMismatch, address, ": the agent was replaced by agent \"", agent.name,
                  "\" during the restore; run the command again");
    }
    ids_[node] = agent.id;
    for (std::size_t other = 0; other < ids_.size(); ++other) {
      if (other == node || ids_[other] != agent.id) continue;
      return Fail(Errc::kMismatch, address, ": leads to the same agent \"", agent.name, "\" as ",
                  options_.agents[other], "; list each node's agent once");
    }
    return {};
  }

  const RestoreOptions& options_;
  std::vector<std::string> ids_;  // empty: not connected yet
};

/// Finds the reachable agents, by position in the options.
/// Connects to all of them before any of them writes. Root.
Result<std::vector<bool>> FindAgents(const Job& job, Met* met) {
  const RestoreOptions& options = job.options;
  std::vector<bool> lives(options.agents.size(), false);
  for (std::size_t node = 0; node < lives.size(); ++node) {
    if (options.lost_nodes.contains(node)) continue;
    SW_TRY_ASSIGN(os::Address address, AddressOf(job, options.agents[node]));
    AgentClient client(std::move(address), job.options.key, StopOf(job.sink), kAgentPatience,
                       Hello::OfClient(), met->At(node));
    const Result<std::string> answer = client.AskText("status");
    lives[node] = answer.has_value();
    if (answer) continue;
    const bool gone = answer.error().code == Errc::kNotFound || answer.error().code == Errc::kIo;
    if (!gone) return tl::unexpected<Error>(answer.error());
    if (options.lost_unreachable) continue;
    return Fail(Errc::kNotFound, "agent of node ", node, ": ", answer.error().message,
                "; if the node is lost with its memory, pass --lost-nodes ", node);
  }
  return lives;
}

/// Makes checkpoints of agents durable and lists them in a text for all ranks. Root.
Result<std::string> FlushAndList(const Job& job) {
  Json answers = Json::array();
  Met met(job.options);
  SW_TRY_ASSIGN(const std::vector<bool> lives, FindAgents(job, &met));
  for (std::size_t node = 0; node < lives.size(); ++node) {
    Json answer = {{"address", job.options.agents[node]}, {"list", nullptr}};
    if (lives[node]) {
      SW_TRY_ASSIGN(os::Address address, AddressOf(job, job.options.agents[node]));
      AgentClient client(std::move(address), job.options.key, StopOf(job.sink), kAgentPatience,
                         Hello::OfClient(), met.At(node));
      if (job.notes()) SW_TRY(Flush(client, job.sink));
      SW_TRY_ASSIGN(answer["list"], client.AskText("list"));
    }
    answers.push_back(std::move(answer));
  }
  return answers.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Parses the text of FlushAndList.
Result<Agents> ReadLists(const Job& job, const std::string& text) {
  SW_TRY_ASSIGN(const Json answers, json::Parse(text, "agents"));
  SW_CHECK(answers.is_array());  // made by rank 0
  Agents agents;
  std::uint32_t remote = 0;
  for (std::size_t position = 0; position < answers.size(); ++position) {
    const Json& answer = answers[position];
    const auto name = answer["address"].get<std::string>();
    if (answer["list"].is_null()) {
      agents.lost_nodes.push_back(position);
      agents.lost_agents.push_back(name);
      continue;
    }
    SW_TRY_ASSIGN(os::Address address, AddressOf(job, name));
    const std::uint32_t node = address.is_local() ? 0 : ++remote;
    SW_TRY_ASSIGN(std::vector<AgentClient::Listed> list,
                  ParseAgentList(answer["list"].get<std::string>(), name));
    const auto agent =
        std::make_shared<AgentClient>(std::move(address), job.options.key, StopOf(job.sink));
    for (AgentClient::Listed& one : list) {
      agents.copies.push_back(
          {agent, node, one.recovery, std::move(one.replayed), std::move(one.manifest)});
    }
  }
  return agents;
}

}  // namespace

Status ExpectNoCopies(const Job& job) {
  Met met(job.options);
  SW_TRY_ASSIGN(const std::vector<bool> lives, FindAgents(job, &met));
  for (std::size_t node = 0; node < lives.size(); ++node) {
    if (!lives[node]) continue;
    SW_TRY_ASSIGN(os::Address address, AddressOf(job, job.options.agents[node]));
    AgentClient client(std::move(address), job.options.key, StopOf(job.sink));
    SW_TRY_ASSIGN(const std::vector<AgentClient::Listed> list, client.List());
    if (list.empty()) continue;
    return Fail(Errc::kNotFound, job.options.store, ": there is no store, but ",
                job.options.agents[node], " has iteration ", list.front().manifest.iteration,
                "; check the path of the store");
  }
  return {};
}

Result<Agents> AskAgents(const Job& job) {
  if (job.options.agents.empty()) return Agents();
  job.sink.Pass("agents");
  SW_TRY_ASSIGN(const std::string text, job.comm.OnRootText([&] { return FlushAndList(job); }));
  SW_TRY_ASSIGN(Agents agents, job.comm.Agree(ReadLists(job, text)));
  for (std::size_t i = 0; i < agents.lost_nodes.size(); ++i) {
    job.sink.Warn(StrCat("node ", agents.lost_nodes[i], " (", agents.lost_agents[i],
                         "): lost with its snapshots in memory"));
  }
  return agents;
}

Result<std::vector<AgentCopy>> NotGivenUp(const Job& job, const Store& store,
                                          std::vector<AgentCopy> copies) {
  std::vector<AgentCopy> kept;
  for (AgentCopy& copy : copies) {
    const std::string what =
        StrCat("the checkpoint in the memory of ", os::ToText(copy.agent->address()));
    Status past = store.CheckOwn(copy.manifest, what);
    if (past) past = store.CheckPast(copy.recovery, copy.manifest.iteration, what);
    if (!past && past.error().code != Errc::kMismatch) {
      return tl::unexpected<Error>(std::move(past).error());
    }
    if (past) {
      kept.push_back(std::move(copy));
    } else {
      job.sink.Warn(past.error().message + "; the restore does not use it");
    }
  }
  return kept;
}

Result<checkpoints::SourceSet> AskCatalogue(const std::vector<AgentCopy>& copies,
                                            const exec::Digest& catalogue) {
  for (const AgentCopy& copy : copies) {
    if (copy.manifest.catalogue != catalogue) continue;
    SW_TRY_ASSIGN(const std::string text, copy.agent->AskText("catalogue " + exec::Hex(catalogue)));
    if (exec::DigestOf(std::as_bytes(std::span(text))) != catalogue) {
      return Fail(Errc::kBadInput, os::ToText(copy.agent->address()),
                  ": catalogue: expected digest ", exec::Hex(catalogue),
                  ", found different content");
    }
    return checkpoints::DeserializeSource(text);
  }
  return Fail(Errc::kInternal, "internal error: a checkpoint in memory has no agent");
}

}  // namespace shardwright::partial::restore
