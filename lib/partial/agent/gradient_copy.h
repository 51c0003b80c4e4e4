// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "partial/agent/agent_client.h"
#include "partial/agent/gradient_logs.h"
#include "partial/agent/memory/memory.h"
#include "partial/agent/memory/memory_replay.h"
#include "partial/gradient_log/log_reader.h"
#include "partial/gradient_log/module_chain.h"
#include "partial/store/modules.h"
#include "support/base/result.h"
#include "support/os/socket.h"

// Copies for peers with logged gradients in place of states. The receiver of such a copy replays
// the gradients onto the previous copy. It keeps only blobs with the digests of the sender's
// manifest and requests the states of all others, so each copy is a state of the sender.
// Source: docs/formats/agent.md, docs/lossless.md; MoEtion (arXiv 2412.15411v1), algorithm 3.

namespace shardwright::partial {

/// Chooses the gradients that copies for one peer may contain. For one thread at a time.
class PeerGradients {
 public:
  /// \pre logs outlives it
  explicit PeerGradients(GradientLogs& logs) : logs_(logs) {}
  PeerGradients(const PeerGradients&) = delete;
  PeerGradients& operator=(const PeerGradients&) = delete;
  ~PeerGradients() { logs_.Retain(this, std::nullopt); }

  /// Returns the gradients since the peer's copy of each module of a snapshot's own iteration, if
  /// they are fewer bytes than its state. Until the next call of Sent or Failed, the logs keep the
  /// records that later copies may need.
  AnnouncedGradients For(const MemoryCheckpoint& snapshot);

  /// Records that the peer has a copy.
  /// \param replays  the peer can replay gradients onto it
  void Sent(const MemoryCheckpoint& snapshot, bool replays);
  /// Records that the content of the peer's memory is unknown. The next copy has states only.
  void Failed();

 private:
  GradientLogs& logs_;
  std::map<std::string, std::uint64_t, std::less<>> versions_;  // of modules in the peer's copy
};

/// The gradients announced for a copy that another agent sends, and the blobs computed from them.
/// For one thread at a time.
class CopyReplay {
 public:
  /// Reads announced gradients and finds the modules that it leads from a previous copy to the new
  /// one.
  /// \param store    store of the copies, with the recoveries; may be missing
  /// \param base     previous copy of the same agent; null: there is none
  /// \param copy     the new one, with its manifest and catalogue
  /// \param announced  a record per line, as in a gradient log
  /// \error kBadInput, kUnsupported  malformed records, catalogue or store; kIo
  /// Local.
  static Result<std::unique_ptr<CopyReplay>> Find(const std::string& store,
                                                  const std::vector<std::string>& pattern_files,
                                                  std::shared_ptr<const MemoryCheckpoint> base,
                                                  const MemoryCheckpoint& copy,
                                                  std::string_view announced,
                                                  const std::string& where);

  /// Returns the indices of these modules in the manifest.
  const std::set<std::uint32_t>& modules() const { return modules_; }

  /// Receives the gradients of one of these modules, and replays them. Adds the computed blobs
  /// to the copy if all of them have the digests of its manifest, and none otherwise.
  /// \param stop  ends the replay early
  /// \error kLimit  memory; kIo; kStopped
  Status Take(os::Connection& connection, const std::shared_ptr<MemoryPool>& pool,
              std::uint32_t module, const std::function<bool()>& stop, MemoryCheckpoint* copy);

 private:
  using Records = std::vector<std::shared_ptr<LoggedRecord>>;

  CopyReplay() = default;
  Status ReadAnnounced(std::string_view announced, const std::string& where);
  Status FindModules(const std::string& store, const std::vector<std::string>& pattern_files,
                     const MemoryCheckpoint& copy);

  std::shared_ptr<const MemoryCheckpoint> base_;
  std::map<std::string, Records, std::less<>> announced_;  // by module
  std::optional<ReplayLog> log_;
  checkpoints::Checkpoint checkpoint_;
  Model model_;
  std::set<std::uint32_t> modules_;
  std::map<std::uint32_t, ModuleReplay> found_;
  ReplayWorkspace work_;
};

}  // namespace shardwright::partial
