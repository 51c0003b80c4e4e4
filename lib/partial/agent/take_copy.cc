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

/// A request to the sender of a copy: a line per blob or module.
class RequestText {
 public:
  void Add(const BlobRef& ref) {
    Need(ref);
    text_ += exec::Hex(ref.digest) + "\n";
  }
  /// Requests the gradients of a module. Their replay needs the memory of its blobs.
  void AddGradients(const Manifest& manifest, std::uint32_t module) {
    for (const auto& held : manifest.modules[module]) {
      if (held) Need(held->blob);
    }
    text_ += StrCat("gradients ", module, "\n");
  }
  /// \error kLimit  the pool lacks memory for the requested bytes
  Status Send(os::Connection& connection, const MemoryPool& pool, const std::string& what) const {
    SW_TRY(pool.CheckRoom(bytes_, what));
    return SendText(connection, text_);
  }

 private:
  void Need(const BlobRef& ref) {
    if (__builtin_add_overflow(bytes_, ref.bytes, &bytes_)) bytes_ = ~std::uint64_t{0};
  }

  std::string text_;
  std::uint64_t bytes_ = 0;
};

/// Receives requested blobs into a copy.
Status ReceiveBlobs(os::Connection& connection, const std::shared_ptr<MemoryPool>& pool,
                    const MissingBlobs& blobs, MemoryCheckpoint* copy) {
  for (const auto& [digest, ref] : blobs) {
    SW_TRY_ASSIGN(copy->blobs[digest], ReceiveBlob(connection, ref, pool));
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
  const std::shared_ptr<const MemoryCheckpoint> before = agent_.CopyOf(origin);
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
  RequestText request;
  for (const auto& [digest, ref] : missing) request.Add(ref);
  for (const std::uint32_t module : modules) request.AddGradients(checkpoint.manifest, module);
  SW_TRY(request.Send(connection, *agent_.pool(), what));
  SW_TRY(ReceiveBlobs(connection, agent_.pool(), missing, &checkpoint));
  for (const std::uint32_t module : modules) {
    SW_TRY(replay->Take(connection, agent_.pool(), module, stop, &checkpoint));
  }
  if (replay) {
    const MissingBlobs rest = FindBlobs(agent_, {}, &checkpoint);
    RequestText states;
    for (const auto& [digest, ref] : rest) states.Add(ref);
    SW_TRY(states.Send(connection, *agent_.pool(), what));
    SW_TRY(ReceiveBlobs(connection, agent_.pool(), rest, &checkpoint));
  }
  return agent_.Accept(origin, std::move(checkpoint), before);
}

}  // namespace shardwright::partial
