// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "partial/agent/memory/memory.h"
#include "partial/gradient_log/module_chain.h"
#include "partial/store/modules.h"
#include "support/base/result.h"

// Replays the steps of a module on blobs in memory, those of this agent's snapshots
// (agent_replay.cc) and those of copies from peers (gradient_copy.h). Source: docs/lossless.md.

namespace shardwright::partial {

inline constexpr const char* kReplayStopped = "the replay was stopped before it was done";

/// Pool memory for a blob that is being computed.
class BlobRoom {
 public:
  BlobRoom() = default;
  BlobRoom(std::shared_ptr<MemoryPool> pool, BlobMemory buffer, std::uint64_t bytes)
      : pool_(std::move(pool)), buffer_(std::move(buffer)), bytes_(bytes) {}
  BlobRoom(BlobRoom&&) noexcept = default;
  BlobRoom& operator=(BlobRoom&&) = delete;
  ~BlobRoom() {
    if (buffer_) pool_->Give(std::move(buffer_), bytes_);
  }

  explicit operator bool() const { return buffer_ != nullptr; }
  std::span<std::byte> bytes() const { return {buffer_.get(), bytes_}; }
  BlobMemory Take() { return std::move(buffer_); }

 private:
  std::shared_ptr<MemoryPool> pool_;
  BlobMemory buffer_;
  std::uint64_t bytes_ = 0;
};

/// Buffers of a thread that applies steps.
struct ReplayWorkspace {
  std::vector<float> values;
  std::vector<std::byte> gradient;
};

/// An expert during its replay to the iteration of a snapshot.
struct ModuleReplay {
  std::uint32_t module = 0;
  ReplayedModule chain;
  std::array<BlobPtr, kComponents> old;   ///< null: of that iteration already, or absent
  std::vector<BlobRoom> rooms;            ///< by component
  std::array<BlobPtr, kComponents> made;  ///< replaces `old`
  std::string refused;                    ///< why it stays older; empty: it does not
};

/// Finds the steps that lead a module to an iteration, and the blobs that they change.
/// \param index  of the module in its manifest
/// \param held   its older blobs, which `blobs` contains
/// \error as FindChain
/// Local. The result is valid during the lifetime of the log.
Result<ModuleReplay> FindReplay(const checkpoints::Checkpoint& checkpoint, const Module& module,
                                std::uint32_t index, const StoredModule& held, const BlobMap& blobs,
                                std::uint64_t to, ReplayLog* log);

/// Takes memory for the results of a module.
/// \error kLimit
/// Local.
Status ReserveReplay(const std::shared_ptr<MemoryPool>& pool, ModuleReplay* one);

/// Computes the blobs of a module: `made`.
/// \param stop  polled between ranges; may be empty
/// \pre ReserveReplay has taken memory
/// \error kBadInput  corrupt memory; kStopped; as MakeSteps
/// Local. Thread-safe for different modules and workspaces.
Status MakeReplay(const Module& module, const layout::ShardMap& map, const ReplayLog& log,
                  LogReads& reads, const std::shared_ptr<MemoryPool>& pool,
                  const std::function<bool()>& stop, ReplayWorkspace* work, ModuleReplay* one);

}  // namespace shardwright::partial
