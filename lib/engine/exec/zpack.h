// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <tbb/enumerable_thread_specific.h>
#include <tbb/task_arena.h>

#include "engine/exec/byte_source.h"
#include "engine/exec/file_pool.h"
#include "engine/exec/integrity.h"
#include "engine/exec/unfinished_writes.h"
#include "engine/exec/units.h"
#include "engine/layout/shard_map.h"
#include "support/base/result.h"
#include "support/os/file.h"

struct ZSTD_CCtx_s;
struct ZSTD_DCtx_s;

namespace shardwright::exec {

/// A pack file in compressed form: the bytes of the plain one in blocks of 1 MiB, each a zstd frame
/// of its own, so that any part can be read without the rest. Layout (integers little-endian):
///
///   frames, back to back
///   index    u32 compressed size of every block
///   footer   u64 plain bytes, u64 blocks, u32 CRC-32 of index, "SWZPACK1"
///
/// Source: docs/formats/catalogue.md.

inline constexpr std::uint64_t kZpackBlockBytes = std::uint64_t{1} << 20;

/// A zstd context configured for blocks. Creating
/// one takes longer than compressing a small block.
class ZstdContext {
 public:
  ZstdContext();
  ZSTD_CCtx_s* get() const { return context_.get(); }

 private:
  struct Free {
    void operator()(ZSTD_CCtx_s* context) const;
  };
  std::unique_ptr<ZSTD_CCtx_s, Free> context_;
};

/// One context for each thread that compresses.
using ZstdContexts = tbb::enumerable_thread_specific<ZstdContext>;

/// Size and digest of a compressed pack file.
struct ZpackResult {
  std::uint64_t bytes = 0;
  Digest digest{};
};

/// Writes a compressed pack file sequentially. Local; one call at a time.
class ZpackWriter {
 public:
  /// \param file      new and empty
  /// \param contexts  must outlive it; many writers may share them
  /// \param writes    counts the bytes written; may be null
  ZpackWriter(os::File file, ZstdContexts& contexts, UnfinishedWrites* writes = nullptr);

  /// Compresses the next plain bytes, block by block on the threads of an arena, and writes them.
  /// \pre plain.size() is a multiple of kZpackBlockBytes except in the last call
  /// \error kIo
  Status Append(std::span<const std::byte> plain, tbb::task_arena& arena);

  /// Completes and syncs the file. Call it once, at the end. \error kIo
  Result<ZpackResult> Finish();

 private:
  struct Frame {
    std::vector<std::byte> room;
    std::size_t bytes = 0;
  };
  Status AppendBytes(std::span<const std::byte> data);

  os::File file_;
  ZstdContexts* contexts_;
  UnfinishedWrites* writes_;
  std::unique_ptr<DigestStream> digest_;
  std::vector<Frame> frames_;  // of one call, by block
  std::vector<std::uint32_t> sizes_;
  std::uint64_t plain_bytes_ = 0;
  std::uint64_t end_ = 0;
};

/// Writes an output file of a plan in compressed form. Bytes outside the payloads are zero.
/// \param loop   over the plan
/// \param arena  the loop's
/// \param sums   receives the checksums of the file's units, in order
/// \error as UnitLoop::ForUnits and ZpackWriter
/// Local.
Result<ZpackResult> PackFile(const plan::Plan& plan, std::uint32_t file, UnitLoop& loop,
                             ZpackWriter writer, tbb::task_arena& arena,
                             std::vector<UnitSum>* sums);

/// Returns true if the file is complete and has this plain size; a resumed run then keeps it.
bool IsZpack(const os::File& file, std::uint64_t bytes);
/// Checks the file at a path; returns false if it cannot be opened.
bool IsZpack(const std::string& path, std::uint64_t bytes);

/// Reads members from compressed pack files.
class ZpackBytes final : public ByteSource {
 public:
  /// \pre `map` outlives it; `paths` has one entry per file of the map, in that order
  ZpackBytes(const layout::ShardMap& map, std::vector<std::string> paths);

  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override;
  std::uint64_t bytes_read() const override { return bytes_.load(std::memory_order_relaxed); }
  std::uint64_t files_read() const override { return pool_.opened_count(); }

 private:
  struct Index {
    std::uint64_t plain_bytes = 0;
    std::vector<std::uint64_t> begin;  // of every block's frame, plus one past the last
  };
  struct FreeContext {
    void operator()(ZSTD_DCtx_s* context) const;
  };
  /// A thread's buffers and its last block.
  struct Block {
    std::uint32_t file = 0;
    std::uint64_t block = ~std::uint64_t{0};
    std::vector<std::byte> plain;
    std::vector<std::byte> frame;
    std::unique_ptr<ZSTD_DCtx_s, FreeContext> context;
  };
  Result<const Index*> IndexOf(std::uint32_t file);
  Status Load(std::uint32_t file, std::uint64_t block, Block* to);

  const layout::ShardMap& map_;
  std::vector<std::string> paths_;
  FilePool pool_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Index>> indexes_;
  tbb::enumerable_thread_specific<Block> blocks_;
  std::atomic<std::uint64_t> bytes_ = 0;
};

}  // namespace shardwright::exec
