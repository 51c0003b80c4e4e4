// What agents hold, as a further level of a restore.

#include <chrono>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "os/socket.h"
#include "pec/restore/restore_internal.h"

namespace shardwright::pec::restore {
namespace {

using nlohmann::json;

/// An agent that persists holds the store's lock; a flush of another one waits for it.
constexpr int kFlushTries = 60;
constexpr std::chrono::milliseconds kFlushWait(500);

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

}  // namespace

/// Root: the agents that live. All are looked for before one is told to write anything.
Result<std::vector<bool>> Restoring::FindAgents() const {
  std::vector<bool> lives(options_.agents.size(), false);
  for (std::size_t node = 0; node < lives.size(); ++node) {
    if (options_.lost_nodes.contains(node)) continue;
    SW_TRY_ASSIGN(os::Address address, os::ParseAddress(options_.agents[node]));
    AgentClient client(std::move(address), Stop());
    const Result<std::string> answer = client.AskText("status");
    lives[node] = answer.has_value();
    if (answer) continue;
    const bool gone = answer.error().code == Errc::kNotFound || answer.error().code == Errc::kIo;
    if (!gone) return tl::unexpected<Error>(answer.error());
    if (options_.lost_unreachable) continue;
    return Fail(Errc::kNotFound, "agent of node " + std::to_string(node) + ": " +
                                     answer.error().message +
                                     "; if the node is lost with its memory, say --lost-nodes " +
                                     std::to_string(node));
  }
  return lives;
}

/// Root: an agent that holds something tells of a store that has been. It is told to write nothing.
Status Restoring::ExpectNoCopies() const {
  SW_TRY_ASSIGN(const std::vector<bool> lives, FindAgents());
  for (std::size_t node = 0; node < lives.size(); ++node) {
    if (!lives[node]) continue;
    SW_TRY_ASSIGN(os::Address address, os::ParseAddress(options_.agents[node]));
    AgentClient client(std::move(address), Stop());
    SW_TRY_ASSIGN(const std::vector<AgentClient::Listed> list, client.List());
    if (list.empty()) continue;
    return Fail(Errc::kNotFound, options_.store + ": there is no store, but " +
                                     options_.agents[node] + " has iteration " +
                                     std::to_string(list.front().manifest.iteration));
  }
  return {};
}

/// Root: makes durable what agents hold, and asks what that is.
Result<std::string> Restoring::FlushAndList() const {
  json answers = json::array();
  const bool flush = !options_.write.dry_run && !options_.read_only;
  SW_TRY_ASSIGN(const std::vector<bool> lives, FindAgents());
  for (std::size_t node = 0; node < lives.size(); ++node) {
    json answer = {{"address", options_.agents[node]}, {"list", nullptr}};
    if (lives[node]) {
      SW_TRY_ASSIGN(os::Address address, os::ParseAddress(options_.agents[node]));
      AgentClient client(std::move(address), Stop());
      if (flush) SW_TRY(Flush(client, sink_));
      SW_TRY_ASSIGN(answer["list"], client.AskText("list"));
    }
    answers.push_back(std::move(answer));
  }
  return answers.dump(-1, ' ', false, json::error_handler_t::replace);
}

Status Restoring::TakeLists(const std::string& text) {
  const json answers = json::parse(text, nullptr, false);
  SW_CHECK(answers.is_array());  // rank 0 has made it
  std::uint32_t remote = 0;
  for (std::size_t position = 0; position < answers.size(); ++position) {
    const json& answer = answers[position];
    const auto name = answer["address"].get<std::string>();
    if (answer["list"].is_null()) {
      report_.lost_nodes.push_back(position);
      report_.lost_agents.push_back(name);
      continue;
    }
    SW_TRY_ASSIGN(os::Address address, os::ParseAddress(name));
    const std::uint32_t node = address.is_local() ? 0 : ++remote;
    SW_TRY_ASSIGN(std::vector<AgentClient::Listed> list,
                  ParseAgentList(answer["list"].get<std::string>(), name));
    for (AgentClient::Listed& one : list) {
      copies_.push_back({agents_.size(), node, one.recovery, std::move(one.manifest)});
    }
    agents_.push_back(std::make_shared<AgentClient>(std::move(address), Stop()));
  }
  return {};
}

/// Leaves out what an agent has not forgotten although a restore has given it up.
Status Restoring::DropGivenUp() {
  std::vector<AgentCopy> kept;
  for (AgentCopy& copy : copies_) {
    const std::string what = "what " + os::ToText(agents_[copy.agent]->address()) + " holds";
    Status past = store_->CheckPast(copy.recovery, copy.manifest.iteration, what);
    if (!past && past.error().code != Errc::kMismatch) return past;
    if (past) {
      kept.push_back(std::move(copy));
    } else {
      sink_.Warn(past.error().message + "; it is not used");
    }
  }
  copies_ = std::move(kept);
  return {};
}

Status Restoring::AskAgents() {
  if (options_.agents.empty()) return {};
  sink_.Pass("agents");
  SW_TRY_ASSIGN(const std::string text, comm_.OnRootText([&] { return FlushAndList(); }));
  SW_TRY(comm_.Agree(TakeLists(text)));
  for (std::size_t i = 0; i < report_.lost_nodes.size(); ++i) {
    sink_.Warn("node " + std::to_string(report_.lost_nodes[i]) + " (" + report_.lost_agents[i] +
               "): lost with what it held in memory");
  }
  return {};
}

Result<dialect::SourceSet> Restoring::CatalogueOf(const Manifest& manifest) const {
  if (manifest.sequence != 0) return store_->ReadCatalogue(manifest);
  for (const AgentCopy& copy : copies_) {
    if (copy.manifest.catalogue != manifest.catalogue) continue;
    SW_TRY_ASSIGN(const std::string text,
                  agents_[copy.agent]->AskText("catalogue " + exec::Hex(manifest.catalogue)));
    if (exec::DigestOf(std::as_bytes(std::span(text))) != manifest.catalogue) {
      return Fail(Errc::kBadInput, os::ToText(agents_[copy.agent]->address()) +
                                       ": catalogue: digest " + exec::Hex(manifest.catalogue) +
                                       " expected");
    }
    return dialect::DeserializeSource(text);
  }
  return Fail(Errc::kInternal, "a checkpoint in memory without its agent");
}

ReadRemote Restoring::ReaderOf(std::size_t agent, const exec::Digest& digest) const {
  return [client = agents_[agent], digest](std::uint64_t offset, std::span<std::byte> out) {
    return client->Read(digest, offset, out);
  };
}

}  // namespace shardwright::pec::restore
