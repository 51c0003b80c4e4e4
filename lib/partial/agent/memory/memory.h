// SPDX-License-Identifier: Apache-2.0
// lib/partial/agent/memory: checkpoints in the memory of an agent (memory.h), taken from a source
// by SnapshotCopy, and optimizer steps that are replayed on their blobs (memory_replay.h). Source:
// docs/formats/agent.md, docs/lossless.md.

#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
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

namespace shardwright::partial {

struct FreeBlobMemory {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};

/// Owner of uninitialized memory.
using BlobMemory = std::unique_ptr<std::byte[], FreeBlobMemory>;

/// Allocates memory. Uses huge pages for 2 MiB or more, if the system has them, because
/// reading files into huge pages is about 20 % faster.
/// \returns null if there is no memory left
inline BlobMemory MakeBlobMemory(std::uint64_t bytes) {
  constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
  if (bytes < kHugePage) {
    return BlobMemory(static_cast<std::byte*>(std::malloc(bytes > 0 ? bytes : 1)));
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, kHugePage, bytes) != 0) return nullptr;
  // Advises whole huge pages only, so that the remainder does not occupy another one. The
  // advice is optional, so its result is ignored.
  (void)madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return BlobMemory(static_cast<std::byte*>(memory));
}

/// Memory for blobs, up to a limit. Keeps returned buffers for
/// blobs of the same size, because the kernel takes longer to
/// clear new pages than a copy into old ones takes. Thread-safe.
class MemoryPool {
 public:
  explicit MemoryPool(std::uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  /// \error kLimit  the pool's limit or the machine's memory is exceeded: names both sizes
  Result<BlobMemory> Take(std::uint64_t bytes);
  void Give(BlobMemory buffer, std::uint64_t bytes);

  /// Counts bytes that a caller has allocated elsewhere, until Free.
  /// \error kLimit  as Take
  Status Count(std::uint64_t bytes);
  void Free(std::uint64_t bytes);

  /// Sets the number of bytes that CheckSpare leaves free.
  void Reserve(std::uint64_t bytes);

  /// Checks memory for optional data that must never prevent another snapshot.
  /// \error kLimit  the bytes would leave less than the reserve free: names all sizes
  Status CheckSpare(std::uint64_t bytes) const;

  /// \error kLimit  `bytes` together with the bytes in use exceed the limit
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
  std::multimap<std::uint64_t, BlobMemory> free_;  // by size
};

/// Memory outside the buffers of a pool that counts towards its limit, for data that
/// arrives from other processes. The destructor frees it. For one thread at a time.
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

/// A blob in memory with the content that a store's file would have. Immutable.
class MemoryBlob {
 public:
  /// \param pool  origin of the buffer; the destructor returns it there
  /// \param unit_bytes  lengths of the units that the digest covers, in order
  MemoryBlob(std::shared_ptr<MemoryPool> pool, BlobMemory buffer, BlobRef ref,
             std::vector<std::uint32_t> unit_bytes)
      : pool_(std::move(pool)),
        buffer_(std::move(buffer)),
        ref_(ref),
        unit_bytes_(std::move(unit_bytes)) {}
  /// \param counted  accounts for the memory of the buffer
  MemoryBlob(Counted counted, BlobMemory buffer, BlobRef ref, std::vector<std::uint32_t> unit_bytes)
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
  std::shared_ptr<MemoryPool> pool_;  // null: counted_ owns the memory
  Counted counted_;
  BlobMemory buffer_;
  BlobRef ref_;
  std::vector<std::uint32_t> unit_bytes_;
};

using BlobPtr = std::shared_ptr<const MemoryBlob>;
using BlobMap = std::map<exec::Digest, BlobPtr>;

/// A checkpoint in memory. Its manifest is like that of a store
/// with sequence 0, and contains only modules that are in `blobs`.
struct MemoryCheckpoint {
  Manifest manifest;
  std::string catalogue;  ///< checkpoints::Serialize of the source
  BlobMap blobs;
  /// The store's last recovery when training produced the checkpoint; 0: there was
  /// none. A later recovery to an iteration before this one rolls it back (GivesUp).
  std::uint64_t recovery = 0;
  /// Modules replayed by this agent, by name: the iteration of the snapshot that read them.
  std::map<std::string, std::uint64_t> replayed;
  std::uint64_t own_bytes = 0;  ///< modules that a snapshot read at this iteration
  /// Memory of the manifest and catalogue of a copy.
  std::shared_ptr<const Counted> counted;
  /// Tokens per expert at the snapshot; null: not counted, or a copy from another node.
  std::shared_ptr<TokenLog> tokens;
};

/// Returns true if a checkpoint has blobs of a module, all of the given version.
bool IsAllOf(const StoredModule& module, std::uint64_t version);

/// Opens the modules of the checkpoint that have its own
/// iteration as a source. Older modules are left out.
/// \error kBadInput  catalogue, manifest and blobs are inconsistent: names both sizes
/// Local.
Result<std::unique_ptr<convert::Input>> OpenMemory(const MemoryCheckpoint& checkpoint,
                                                   const std::vector<std::string>& pattern_files);

/// Result of a snapshot.
struct Taken {
  std::vector<std::array<BlobPtr, kComponents>> modules;  ///< by module; null: not copied
  BlobPtr passed;                                         ///< passed members; null: none
  std::uint64_t bytes = 0;
};

/// A byte range of a source file.
struct FileByteRange {
  std::string name;         ///< as checkpoints::SourceFile
  std::uint64_t first = 0;  ///< offset in the file
  std::uint64_t bytes = 0;
};

/// Called with all byte ranges that will be read, before the first read; returns when the
/// bytes are available. The ranges are sorted by file and offset, and do not touch each other.
using FillSource = std::function<Status(const std::vector<FileByteRange>& stretches)>;

/// Takes a snapshot in two steps, so that training waits only for the copy.
/// Source: docs/pec-planning.md section 6.2.
class SnapshotCopy {
 public:
  /// Copies the data of a snapshot into memory: non-expert modules,
  /// selected experts, kept components and passed members.
  /// \param fill   empty: the source is already complete
  /// \pre input outlives the copy
  /// \error kLimit  the pool is too small: names both sizes;
  ///        the errors of `fill` and of the source; kStopped
  /// Local.
  static Result<std::unique_ptr<SnapshotCopy>> Copy(convert::Input& input,
                                                    const SnapshotChoice& choice,
                                                    const std::shared_ptr<MemoryPool>& pool,
                                                    const SaveRequest& options, Sink& sink,
                                                    const FillSource& fill = {});
  virtual ~SnapshotCopy() = default;

  /// Computes the checksums of the copied bytes and compares them with those of the source,
  /// without reading it again. Members copied in part cannot be compared. Call once.
  /// \error kBadInput  a checksum differs
  /// Local.
  virtual Result<Taken> Seal() = 0;
};

/// Returns the number of bytes that SnapshotCopy::Copy will read.
std::uint64_t BytesToTake(const convert::Input& input, const SnapshotChoice& choice);

}  // namespace shardwright::partial
