#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <tbb/enumerable_thread_specific.h>

#include "base/result.h"
#include "exec/byte_source.h"
#include "exec/file_pool.h"
#include "exec/integrity.h"
#include "plan/target.h"

namespace shardwright::ucp {

/// A pack file in compressed form: the bytes of the plain one in blocks of 1 MiB, each a zstd frame
/// of its own, so that any stretch can be read without the rest. Layout (integers little-endian):
///
///   frames, back to back
///   index    u32 compressed size of every block
///   footer   u64 plain bytes, u64 blocks, u32 CRC-32 of index, "SWZPACK1"
///
/// Source: docs/formats/catalogue.md.

/// What WriteZpack did.
struct ZpackResult {
  std::uint64_t bytes = 0;
  exec::Digest digest{};
};

/// Compresses `bytes` plain bytes that `fill(offset, block)` provides into a new file, and syncs
/// it. \param threads  blocks are filled and compressed in parallel; fill must be thread-safe
/// \error kIo, and what fill returns
/// Local.
Result<ZpackResult> WriteZpack(
    const std::string& path, std::uint64_t bytes,
    const std::function<Status(std::uint64_t, std::span<std::byte>)>& fill, unsigned threads);

/// True if the file is complete and of this plain size: what a resumed run need not write again.
bool IsZpack(const std::string& path, std::uint64_t bytes);

/// Reads members out of compressed pack files.
class ZpackBytes final : public exec::ByteSource {
 public:
  /// \pre `map` outlives it; paths are by file index of the map
  ZpackBytes(const layout::ShardMap& map, std::vector<std::string> paths);

  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override;
  std::uint64_t bytes_read() const override { return bytes_.load(std::memory_order_relaxed); }
  std::uint64_t files_read() const override { return pool_.opened_count(); }

 private:
  struct Index {
    std::uint64_t plain_bytes = 0;
    std::vector<std::uint64_t> begin;  // of every block's frame, plus one past the last
  };
  struct Block {
    std::uint32_t file = 0;
    std::uint64_t block = ~std::uint64_t{0};
    std::vector<std::byte> plain;
    std::vector<std::byte> frame;
  };
  Result<const Index*> IndexOf(std::uint32_t file);
  Status Load(std::uint32_t file, std::uint64_t block, Block* to);

  const layout::ShardMap& map_;
  std::vector<std::string> paths_;
  exec::FilePool pool_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Index>> indexes_;
  tbb::enumerable_thread_specific<Block> blocks_;
  std::atomic<std::uint64_t> bytes_ = 0;
};

}  // namespace shardwright::ucp
