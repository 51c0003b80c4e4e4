// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

enum class BufferState : std::uint8_t { kIdle, kFilling, kFilled, kPersisting, kRecovery };

/// Returns "idle", "filling", "filled", "persisting" or "recovery".
const char* Name(BufferState state);

/// A version of a module. Its bytes are immutable, so that buffers share them.
struct Blob {
  std::uint64_t version = 0;
  std::shared_ptr<const void> data;
};

/// State machine of a node's three snapshot buffers: the content and state of each. Copies
/// no bytes and writes no files; the agent reports events to it and executes its answers.
///
///   1. Begin     takes an idle buffer to fill; if there is none, discards the content of the
///                oldest filled buffer and takes that
///   2. Put, End  replace the selected modules; then the buffer is filled
///   3. StartPersist, EndPersist  write the newest filled buffer,
///                which then becomes the buffer for recovery
///
/// At most one buffer is filling, one persisting and one for recovery. After the first EndPersist,
/// one is always for recovery. Only Advance changes a buffer that is persisting or for recovery.
/// Some complete content is never older than the last durable save. Not thread-safe.
/// Source: MoC-System section 5.2; docs/pec-planning.md section 6.2.
class SnapshotBuffers {
 public:
  using Content = std::map<ModuleId, Blob>;
  static constexpr std::size_t kBuffers = 3;

  /// Begins a checkpoint and returns the buffer to fill. It starts with the content
  /// of the newest complete buffer, so that experts that are not selected are kept.
  /// \pre if the newest complete iteration is begun again, its content
  ///      differs and every module of that iteration is put again
  /// \error kBusy  a buffer is being filled; kUsage  older than the newest complete buffer
  Result<std::size_t> Begin(std::uint64_t iteration);

  /// Replaces a module of the checkpoint that is being filled.
  /// \error kUsage  no buffer is being filled
  Status Put(const ModuleId& module, std::shared_ptr<const void> data);

  /// Completes the snapshot. Another filled buffer of the same iteration becomes idle.
  /// \error kUsage  no buffer is being filled; kMismatch  a module that every
  ///        checkpoint contains is older: names it (the buffer keeps filling)
  Status End();

  /// Replaces a module of a buffer by a newer version, for example after a replay.
  /// \param from  data of the module that the buffer must still contain
  /// \returns true if it did, and the module was replaced
  /// \pre not idle; the version is not above the buffer's iteration
  bool Advance(std::size_t buffer, const ModuleId& module, const std::shared_ptr<const void>& from,
               Blob to);

  /// Makes the buffer that is being filled idle, after a fault or at
  /// the end of training. Does nothing if no buffer is being filled.
  void AbandonFilling();

  /// Starts to persist the newest filled buffer unless a persist is in progress. Older
  /// filled buffers become idle, because storage never moves to an older iteration.
  /// \returns the buffer to write; absent: nothing to persist
  std::optional<std::size_t> StartPersist();

  /// Completes a persist: its buffer is now for recovery, the previous one becomes idle.
  /// \error kUsage  no buffer is persisting
  Status EndPersist();

  /// Ends a failed persist: its buffer is filled again, or idle if a newer one is filled.
  /// \error kUsage  no buffer is persisting
  Status FailPersist();

  /// Makes all buffers newer than `resume` idle, because training resumes from
  /// there. The caller must have stopped a persist of a newer iteration before.
  void Rollback(std::uint64_t resume);

  BufferState state(std::size_t buffer) const { return buffers_[buffer].state; }
  /// Returns the iteration of the checkpoint in a buffer. \pre not idle
  std::uint64_t iteration(std::size_t buffer) const { return buffers_[buffer].iteration; }
  const Content& content(std::size_t buffer) const { return buffers_[buffer].content; }
  /// Returns the newest buffer that is in the given state.
  std::optional<std::size_t> Find(BufferState state) const;
  /// Returns the newest complete buffer, one that is filled, persisting or for recovery.
  std::optional<std::size_t> NewestComplete() const;
  /// Counts snapshots that were discarded without being persisted.
  std::uint64_t skipped() const { return skipped_; }
  /// Counts failed persists.
  std::uint64_t failed() const { return failed_; }

 private:
  struct Buffer {
    BufferState state = BufferState::kIdle;
    std::uint64_t iteration = 0;
    std::uint64_t begun = 0;  ///< number of its Begin; orders buffers of one iteration
    Content content;
  };

  static bool IsNewer(const Buffer& a, const Buffer& b) {
    return std::pair(a.iteration, a.begun) > std::pair(b.iteration, b.begun);
  }
  void MakeIdle(std::size_t buffer);

  std::array<Buffer, kBuffers> buffers_;
  std::uint64_t begun_ = 0;
  std::uint64_t skipped_ = 0;
  std::uint64_t failed_ = 0;
};

}  // namespace shardwright::partial
