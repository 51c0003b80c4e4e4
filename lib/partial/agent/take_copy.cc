// SPDX-License-Identifier: Apache-2.0
// Receives a copy of another agent's checkpoint: docs/formats/agent.md, "Gradients in copies".

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "partial/agent/agent_protocol.h"
#include "partial/agent/agent_server.h"
#include "partial/agent/gradient_copy.h"
#include "support/base/text.h"

namespace shardwright::partial {
namespace {

/// Memory of parsed records, in multiples of their text.
constexpr std::uint64_t kParsedRecords = 8;

/// Blobs of a copy that this agent lacks, by digest.
using MissingBlobs = std::map<exec::Digest, BlobRef>;

/// Adds the blobs that are in this agent's memory to a copy.
/// \param except  modules that are not missing
/// \returns the missing blobs
MissingBlobs FindBlobs(const Agent& agent, const std::set<std::uint32_t>& except,
                       MemoryCheckpoint* copy) {
  MissingBlobs missing;
  const auto want = [&](const BlobRef& ref, bool request) {
    if (copy->blobs.contains(ref.digest)) return;
    if (BlobPtr blob = agent.Find(ref.digest); blob && blob->ref() == ref) {
      copy->blobs[ref.digest] = std::move(blob);
    } else if (request) {
      missing.emplace(ref.digest, ref);
    }
  };
  for (std::size_t i = 0; i < copy->manifest.modules.size(); ++i) {
    const bool request = !except.contains(static_cast<std::uint32_t>(i));
    for (const auto& held : copy->manifest.modules[i]) {
      if (held) want(held->blob, request);
    }
  }
  if (copy->manifest.passed) want(*copy->manifest.passed, true);
  return missing;
}

/// Returns true if all blobs of a module are in a copy.
bool HasModule(const MemoryCheckpoint& copy, std::uint32_t module) {
  for (const auto& held : copy.manifest.modules[module]) {
    if (held && !copy.blobs.contains(held->blob.digest)) return false;
  }
  return true;
}

std::shared_ptr<const MemoryCheckpoint> CopyFrom(const Agent& agent, std::string_view origin) {
  for (const AgentEntry& entry : agent.Entries()) {
    if (entry.state == "copy" && entry.origin == origin) return entry.checkpoint;
  }
  return nullptr;
}

/// Requests and receives blobs and the gradients of modules.
/// \param replay  not null if there are modules
Status TakeRequested(os::Connection& connection, const std::shared_ptr<MemoryPool>& pool,
                     const std::string& what, const MissingBlobs& blobs,
                     const std::set<std::uint32_t>& modules, CopyReplay* replay,
                     const std::function<bool()>& stop, MemoryCheckpoint* copy) {
  std::string list;
  std::uint64_t bytes = 0;
  const auto need = [&](const BlobRef& ref) {
    if (__builtin_add_overflow(bytes, ref.bytes, &bytes)) bytes = ~std::uint64_t{0};
  };
  for (const auto& [digest, ref] : blobs) {
    need(ref);
    list += exec::Hex(digest) + "\n";
  }
  for (const std::uint32_t module : modules) {
    for (const auto& held : copy->manifest.modules[module]) {
      if (held) need(held->blob);
    }
    list += StrCat("gradients ", module, "\n");
  }
  SW_TRY(pool->CheckRoom(bytes, what));
  SW_TRY(SendText(connection, list));
  for (const auto& [digest, ref] : blobs) {
    SW_TRY_ASSIGN(copy->blobs[digest], ReceiveBlob(connection, ref, pool));
  }
  for (const std::uint32_t module : modules) {
    SW_TRY(replay->Take(connection, pool, module, stop, copy));
  }
  return {};
}

}  // namespace

Status AgentServer::Push(os::Connection& connection, const std::vector<std::string_view>& words,
                         const Hello* client) {
  const std::string_view origin = words[1];
  if (!IsAgentName(origin))
    return Fail(Errc::kBadInput,
                "push: invalid agent name: 1 to 128 printable characters without spaces expected");
  const bool bound =
      client == nullptr || (client->role == Hello::Role::kAgent && client->name == origin);
  if (!bound) {
    return Fail(Errc::kBadInput, "push: \"", client->name, "\" sends a copy of agent \"", origin,
                "\"; only that agent itself may send it");
  }
  if (origin == commands_.self.name) {
    return Fail(Errc::kMismatch, "push: both agents have the name \"", origin,
                "\"; give agents different names with --name");
  }
  if (commands_.plan != nullptr) SW_TRY(commands_.plan->CheckOrigin(origin));
  CopySizes sizes;
  SW_TRY_ASSIGN(sizes.manifest_bytes, ParseNumber(words[2], kAgentTextBytes, "manifest"));
  SW_TRY_ASSIGN(sizes.catalogue_bytes, ParseNumber(words[3], kAgentTextBytes, "catalogue"));
  if (words.size() > 4) {
    SW_TRY_ASSIGN(sizes.recovery, ParseNumber(words[4], ~std::uint64_t{0}, "recovery"));
  }
  if (words.size() > 5) {
    SW_TRY_ASSIGN(sizes.announced_bytes, ParseNumber(words[5], kAgentTextBytes, "gradients"));
  }
  SW_TRY(Take(connection, std::string(origin), sizes));
  return SendAnswer(connection, {}, kReplaysGradients);
}

/// Receives a copy of another agent's checkpoint: requests the blobs that are missing here.
Status AgentServer::Take(os::Connection& connection, const std::string& origin,
                         const CopySizes& sizes) {
  const std::string what = "copy of " + origin;
  MemoryCheckpoint checkpoint;
  checkpoint.recovery = sizes.recovery;
  const auto counted = std::make_shared<Counted>(agent_.pool());
  checkpoint.counted = counted;
  SW_TRY_ASSIGN(std::string text, ReceiveText(connection, sizes.manifest_bytes, counted.get()));
  SW_TRY_ASSIGN(checkpoint.catalogue,
                ReceiveText(connection, sizes.catalogue_bytes, counted.get()));
  SW_TRY_ASSIGN(checkpoint.manifest,
                agent_.ReadManifest(text, "manifest of " + origin, counted.get()));
  const std::shared_ptr<const MemoryCheckpoint> before = CopyFrom(agent_, origin);
  const auto stop = [this] { return stop_.load(); };
  Counted memory(agent_.pool());
  std::unique_ptr<CopyReplay> replay;
  if (sizes.announced_bytes) {
    SW_TRY_ASSIGN(const std::string announced,
                  ReceiveText(connection, *sizes.announced_bytes, &memory));
    SW_TRY(memory.Grow(kParsedRecords * announced.size()));
    const std::unique_lock<std::mutex> one = agent_.LockParser();
    SW_TRY_ASSIGN(replay,
                  CopyReplay::Find(agent_.options().save.store, agent_.options().pattern_files,
                                   before, checkpoint, announced, "gradients of " + origin));
  }
  std::set<std::uint32_t> modules = replay ? replay->modules() : std::set<std::uint32_t>();
  const MissingBlobs missing = FindBlobs(agent_, modules, &checkpoint);
  std::erase_if(modules, [&](std::uint32_t one) { return HasModule(checkpoint, one); });
  SW_TRY(TakeRequested(connection, agent_.pool(), what, missing, modules, replay.get(), stop,
                       &checkpoint));
  if (replay) {
    const MissingBlobs rest = FindBlobs(agent_, {}, &checkpoint);
    SW_TRY(TakeRequested(connection, agent_.pool(), what, rest, {}, nullptr, stop, &checkpoint));
  }
  return agent_.Accept(origin, std::move(checkpoint), before);
}

}  // namespace shardwright::partial
