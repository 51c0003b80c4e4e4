// What agents hold, as a further level of a restore.

#include <chrono>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "os/socket.h"
#include "pec/restore_internal.h"

namespace shardwright::pec::restore {
namespace {

using nlohmann::json;

/// An agent that persists holds the store's lock; a flush of another one waits for it.
constexpr int kFlushTries = 60;
constexpr std::chrono::milliseconds kFlushWait(500);

Status Flush(AgentClient& client) {
  for (int i = 1;; ++i) {
    const Result<std::string> done = client.Ask("flush");
    if (done) return {};
    if (done.error().code != Errc::kBusy || i == kFlushTries) {
      return tl::unexpected<Error>(done.error());
    }
    std::this_thread::sleep_for(kFlushWait);
  }
}

}  // namespace

/// Root: makes durable what agents hold, and asks what that is. An agent that cannot be reached is
/// lost with its memory.
Result<std::string> Restoring::FlushAndList() const {
  json answers = json::array();
  const bool flush = !options_.write.dry_run && !options_.read_only;
  for (const std::string& text : options_.agents) {
    SW_TRY_ASSIGN(os::Address address, os::ParseAddress(text));
    AgentClient client(std::move(address));
    const Status flushed = flush ? Flush(client) : Status();
    const Result<std::string> list =
        flushed ? client.AskText("list") : tl::unexpected<Error>(flushed.error());
    if (!list && list.error().code != Errc::kNotFound) return tl::unexpected<Error>(list.error());
    answers.push_back({{"address", text}, {"list", list ? json(*list) : json(nullptr)}});
  }
  return answers.dump(-1, ' ', false, json::error_handler_t::replace);
}

Status Restoring::TakeLists(const std::string& text) {
  const json answers = json::parse(text, nullptr, false);
  SW_CHECK(answers.is_array());  // rank 0 has made it
  std::uint32_t remote = 0;
  for (const json& answer : answers) {
    const auto name = answer["address"].get<std::string>();
    if (answer["list"].is_null()) {
      report_.lost_agents.push_back(name);
      continue;
    }
    SW_TRY_ASSIGN(os::Address address, os::ParseAddress(name));
    const std::uint32_t node = address.is_local() ? 0 : ++remote;
    SW_TRY_ASSIGN(std::vector<AgentClient::Listed> list,
                  ParseAgentList(answer["list"].get<std::string>(), name));
    for (AgentClient::Listed& one : list) {
      copies_.push_back({agents_.size(), node, std::move(one.manifest)});
    }
    agents_.push_back(std::make_shared<AgentClient>(std::move(address)));
  }
  return {};
}

Status Restoring::AskAgents() {
  if (options_.agents.empty()) return {};
  sink_.Pass("agents");
  SW_TRY_ASSIGN(const std::string text, comm_.OnRootText([&] { return FlushAndList(); }));
  SW_TRY(comm_.Agree(TakeLists(text)));
  for (const std::string& lost : report_.lost_agents) {
    sink_.Warn("agent " + lost + ": not reached; what it held is lost");
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
