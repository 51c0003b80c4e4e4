// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "convert/input.h"
#include "engine/exec/byte_source.h"
#include "engine/exec/integrity.h"
#include "partial/save/save.h"
#include "partial/store/manifest.h"
#include "partial/store/token_log.h"
#include "support/base/result.h"
#include "support/os/buffer.h"

// Checkpoints in memory: what an agent holds (docs/formats/agent.md).

namespace shardwright::partial {

/// Memory for blobs, up to a limit. Buffers that are given back are kept for blobs of the same
/// size, since the kernel takes longer to clear new pages than a copy into old ones does.
/// Thread-safe.
class MemoryPool {
 public:
  explicit MemoryPool(std::uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  /// \error kLimit  more than the limit would be in use, or the machine has no more: both sides
  Result<os::Buffer> Take(std::uint64_t bytes);
  void Give(os::Buffer buffer, std::uint64_t bytes);

  /// Counts bytes that somebody has elsewhere, until they are freed.
  /// \error kLimit  as Take
  Status Count(std::uint64_t bytes);
  void Free(std::uint64_t bytes);

  /// What CheckSpare leaves free.
  void Reserve(std::uint64_t bytes);

  /// For what is of use but must never be in the way of another snapshot.
  /// \error kLimit  so many bytes would leave less free than is reserved: all sides
  Status CheckSpare(std::uint64_t bytes) const;

  /// \error kLimit  as Take, for so many bytes in all
  Status CheckRoom(std::uint64_t bytes, const std::string& what) const;

  std::uint64_t limit_bytes() const { return limit_bytes_; }
  std::uint64_t used_bytes() const;

 private:
  Status CountLocked(std::uint64_t bytes);

  const std::uint64_t limit_bytes_;
  mutable std::mutex mutex_;
  std::uint64_t used_bytes_ = 0;
  std::uint64_t reserved_bytes_ = 0;
  std::uint64_t free_bytes_ = 0;
  std::multimap<std::uint64_t, os::Buffer> free_;  // by size
};

/// Memory outside the buffers of a pool that its limit counts: what comes in from others, as it
/// comes. It is free again when this goes. One thread at a time.
class Counted {
 public:
  Counted() = default;
  explicit Counted(std::shared_ptr<MemoryPool> pool) : pool_(std::move(pool)) {}
  Counted(Counted&& other) noexcept;
  Counted& operator=(Counted&& other) noexcept;
  ~Counted();

  /// \error kLimit  as MemoryPool::Take
  Status Grow(std::uint64_t bytes);

 private:
  std::shared_ptr<MemoryPool> pool_;
  std::uint64_t bytes_ = 0;
};

/// A blob in memory, as a store would hold it. Nobody changes it any more.
class MemoryBlob {
 public:
  /// \param pool  that the buffer was taken from, and goes back to
  /// \param unit_bytes  of the units that its digest is over, in order
  MemoryBlob(std::shared_ptr<MemoryPool> pool, os::Buffer buffer, BlobRef ref,
             std::vector<std::uint32_t> unit_bytes)
      : pool_(std::move(pool)),
        buffer_(std::move(buffer)),
        ref_(ref),
        unit_bytes_(std::move(unit_bytes)) {}
  /// \param counted  the memory of all this
  MemoryBlob(Counted counted, os::Buffer buffer, BlobRef ref, std::vector<std::uint32_t> unit_bytes)
      : counted_(std::move(counted)),
        buffer_(std::move(buffer)),
        ref_(ref),
        unit_bytes_(std::move(unit_bytes)) {}
  MemoryBlob(const MemoryBlob&) = delete;
  MemoryBlob& operator=(const MemoryBlob&) = delete;
  ~MemoryBlob() {
    if (pool_) pool_->Give(std::move(buffer_), ref_.bytes);
  }

  const BlobRef& ref() const { return ref_; }
  std::span<const std::byte> bytes() const { return {buffer_.get(), ref_.bytes}; }
  const std::vector<std::uint32_t>& unit_bytes() const { return unit_bytes_; }

 private:
  std::shared_ptr<MemoryPool> pool_;  // null: counted_ has the memory
  Counted counted_;
  os::Buffer buffer_;
  BlobRef ref_;
  std::vector<std::uint32_t> unit_bytes_;
};

using BlobPtr = std::shared_ptr<const MemoryBlob>;
using BlobMap = std::map<exec::Digest, BlobPtr>;

/// A checkpoint in memory. Its manifest is that of a store with sequence 0, and names only modules
/// that are in `blobs`.
struct MemoryCheckpoint {
  Manifest manifest;
  std::string catalogue;  ///< checkpoints::Serialize of the source
  BlobMap blobs;
  /// The store's last recovery when training made it, 0: there was none. A later one that went back
  /// to an iteration before this one has given it up (GivesUp).
  std::uint64_t recovery = 0;
  /// Modules that were replayed here, by name: the iteration whose snapshot has read them.
  std::map<std::string, std::uint64_t> replayed;
  std::uint64_t own_bytes = 0;  ///< of modules that a snapshot has read in the own iteration
  /// Of a copy: its texts.
  std::shared_ptr<const Counted> counted;
  /// Tokens per expert when it was taken; null: not counted, or a copy of another node's.
  std::shared_ptr<TokenLog> tokens;
};

/// The checkpoint as a source of what is of its own iteration: modules that are older are not in
/// it.
/// \error kBadInput  catalogue and manifest do not fit each other or the blobs: both sides named
/// Local.
Result<std::unique_ptr<convert::Input>> OpenMemory(const MemoryCheckpoint& checkpoint,
                                                   const std::vector<std::string>& pattern_files);

/// What a snapshot took.
struct Taken {
  std::vector<std::array<BlobPtr, kComponents>> modules;  ///< by module; null: not taken
  BlobPtr passed;                                         ///< null: there is nothing
  std::uint64_t bytes = 0;
};

/// Bytes of a source file.
struct FileStretch {
  std::string name;         ///< as checkpoints::SourceFile
  std::uint64_t first = 0;  ///< byte of the file
  std::uint64_t bytes = 0;
};

/// Is told what will be read of a source, before anything of it is read; returns when it is there.
/// The stretches are by file and place, and do not touch each other.
using FillSource = std::function<Status(const std::vector<FileStretch>& stretches)>;

/// A snapshot in two steps, so that training waits for the copy only.
/// Source: docs/pec-planning.md section 6.2.
class SnapshotCopy {
 public:
  /// Copies what a snapshot takes of a checkpoint into memory: non-expert modules, selected
  /// experts, kept components, passed members, and nothing else.
  /// \param fill   empty: all of the source is there
  /// \pre input outlives the copy
  /// \error kLimit  the pool is too small: both sides named; what `fill` and the source return;
  ///        kStopped
  /// Local.
  static Result<std::unique_ptr<SnapshotCopy>> Copy(convert::Input& input,
                                                    const SnapshotChoice& choice,
                                                    const std::shared_ptr<MemoryPool>& pool,
                                                    const SaveRequest& options, Sink& sink,
                                                    const FillSource& fill = {});
  virtual ~SnapshotCopy() = default;

  /// Works out the sums of what was copied, and compares them with those of the source, which is
  /// not read any more: a member that was copied in part proves nothing. Once.
  /// \error kBadInput  a checksum
  /// Local.
  virtual Result<Taken> Seal() = 0;
};

/// Bytes that SnapshotCopy::Copy will read.
std::uint64_t BytesToTake(const convert::Input& input, const SnapshotChoice& choice);

}  // namespace shardwright::partial
