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

/// "idle", "filling", "filled", "persisting", "recovery".
const char* Name(BufferState state);

/// A version of a module; nobody changes the bytes any more. Buffers share them.
struct Blob {
  std::uint64_t version = 0;
  std::shared_ptr<const void> data;
};

/// The three snapshot buffers of a node, as a state machine: who holds what, and in which state. It
/// copies no bytes and writes no files; the agent tells it what happens and does what it answers.
///
///   1. Begin     an idle buffer is filled; without one the oldest filled one, whose content is
///                given up
///   2. Put, End  the selected modules are replaced; the buffer is filled
///   3. StartPersist, EndPersist  the newest filled buffer is written, and is then the one to
///                recover from
///
/// At most one buffer each is filling, persisting, for recovery. From the first EndPersist on there
/// is one for recovery. What is persisting or for recovery never changes but by Advance. Some
/// complete content is never older than the last durable checkpoint. Not thread-safe.
/// Source: MoC-System section 5.2; docs/pec-planning.md section 6.2.
class SnapshotBuffers {
 public:
  using Content = std::map<ModuleId, Blob>;
  static constexpr std::size_t kBuffers = 3;

  /// A checkpoint begins: the buffer to fill. Its content is that of the newest complete buffer, so
  /// that experts that are not selected stay.
  /// \pre the iteration of the newest complete buffer is begun again only for other content, and
  ///      then every module that is of it there is put again
  /// \error kBusy  one is being filled; kUsage  an iteration below that of the newest complete one
  Result<std::size_t> Begin(std::uint64_t iteration);

  /// A module of the checkpoint that is being filled.
  /// \error kUsage  none is being filled
  Status Put(const ModuleId& module, std::shared_ptr<const void> data);

  /// The snapshot is complete. Another filled one of its iteration becomes idle.
  /// \error kUsage  none is being filled; kMismatch  a module that every checkpoint has is of an
  ///        older version: names it (the buffer goes on being filled)
  Status End();

  /// A module of a buffer is brought to a newer version by other means than a snapshot.
  /// \param from  what the buffer must hold of it for that
  /// \returns whether it did
  /// \pre not idle; the version is not above the buffer's iteration
  bool Advance(std::size_t buffer, const ModuleId& module, const std::shared_ptr<const void>& from,
               Blob to);

  /// A fault, or the end of training, while a buffer is filled: it becomes idle. Nothing is
  /// filling: nothing happens.
  void AbandonFilling();

  /// The newest filled buffer starts to persist, if none does yet. Older filled ones become idle,
  /// for storage never goes back.
  /// \returns the buffer to write; absent: nothing to do
  std::optional<std::size_t> StartPersist();

  /// The persist is durable: its buffer is the one to recover from, the one before becomes idle.
  /// \error kUsage  nothing is persisting
  Status EndPersist();

  /// The persist failed: its buffer is filled again, or idle if a newer one is filled.
  /// \error kUsage  nothing is persisting
  Status FailPersist();

  /// Training goes on from an older iteration: everything newer becomes idle, whatever its state. A
  /// persist of a newer iteration must have been stopped before.
  void Rollback(std::uint64_t resume);

  BufferState state(std::size_t buffer) const { return buffers_[buffer].state; }
  /// Of the checkpoint that a buffer holds. \pre not idle
  std::uint64_t iteration(std::size_t buffer) const { return buffers_[buffer].iteration; }
  const Content& content(std::size_t buffer) const { return buffers_[buffer].content; }
  /// The buffer in a state; of several the newest.
  std::optional<std::size_t> Find(BufferState state) const;
  /// The newest buffer that is complete: filled, persisting or for recovery.
  std::optional<std::size_t> NewestComplete() const;
  /// Snapshots that were given up without being persisted.
  std::uint64_t skipped() const { return skipped_; }
  /// Persists that failed.
  std::uint64_t failed() const { return failed_; }

 private:
  struct Buffer {
    BufferState state = BufferState::kIdle;
    std::uint64_t iteration = 0;
    std::uint64_t begun = 0;  ///< number of its Begin: of one iteration the later is newer
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
