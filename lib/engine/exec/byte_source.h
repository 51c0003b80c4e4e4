// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <tbb/enumerable_thread_specific.h>

#include "engine/exec/file_pool.h"
#include "engine/layout/shard_map.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/os/file.h"
#include "support/zstd/compressed_item.h"
#include "support/zstd/stream.h"

namespace shardwright::exec {

/// Provides the payload bytes of a source's members. Thread-safe.
class ByteSource {
 public:
  ByteSource() = default;
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;
  virtual ~ByteSource() = default;

  /// Fills `out` with a member's bytes, starting at `offset`.
  /// \error kNotFound  the file is missing or has changed; kBadInput  it is too short
  virtual Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) = 0;

  /// Checks a file of the map again after reading: returns true if it has grown
  /// since it was catalogued, which is allowed for files with SourcePath::may_grow.
  /// \error kNotFound  the file is missing or has changed otherwise
  virtual Result<bool> Recheck(std::uint32_t /*file*/) { return false; }

  /// Opens a whole file of the map, to clone or link it.
  /// \error kNotFound  it is missing or has changed; kInternal  the members are not stored in files
  virtual Result<os::File> Open(std::uint32_t /*file*/) {
    return Fail(Errc::kInternal, "the source has no files to open");
  }

  /// Returns true if PlaceOf returns positions.
  virtual bool has_places() const { return false; }

  /// Returns the position of a member's bytes among bytes that the source computes
  /// together, such as all states of a parameter. Reading units in ascending
  /// position computes such a group once. Absent if the order makes no difference.
  virtual std::optional<std::uint64_t> PlaceOf(std::uint32_t /*member*/, std::uint64_t /*offset*/) {
    return std::nullopt;
  }

  /// Return the payload bytes read so far, and the number of files opened to read them.
  virtual std::uint64_t bytes_read() const = 0;
  virtual std::uint64_t files_read() const = 0;
};

/// Adds the bytes and files read from a source to a sink at the end of its
/// lifetime, so that a run that stops or fails also reports them. Local.
class CountReads {
 public:
  /// \pre both outlive it
  CountReads(const ByteSource& source, Sink& sink) : source_(source), sink_(sink) {}
  CountReads(const CountReads&) = delete;
  CountReads& operator=(const CountReads&) = delete;
  ~CountReads() { sink_.AddRead(source_.bytes_read(), source_.files_read()); }

 private:
  const ByteSource& source_;
  Sink& sink_;
};

/// One file of a source: its path, and its identity at the time when it was catalogued.
struct SourcePath {
  std::string path;
  os::Identity identity;
  bool may_grow = false;  ///< appended bytes are not a change: a log that is still being written
  /// Positions of its items, ascending, if some are compressed: members
  /// have the offsets that they would have uncompressed. Otherwise empty.
  std::vector<zstd::CompressedItem> stretches = {};
  /// The path with links resolved, used to open the file, because another
  /// user may have replaced the path with a link. If empty, `path` is used.
  std::string real = {};
};

/// Returns true if the file system's metadata show the file that was catalogued. Pure.
bool IsUnchanged(const SourcePath& source, const os::Identity& now);

/// Opens a file and checks that it is the one that was catalogued.
/// \param grown  if not null, set to true if the file is longer now
/// \error kNotFound  the file is missing or has changed
Result<os::File> OpenUnchanged(const SourcePath& source, bool* grown = nullptr);

/// Reads members directly from the source's files. Decompresses a compressed
/// item from its beginning, or continues from the current position of the same
/// thread. Each thread that reads a member in order decompresses it once.
class FileBytes final : public ByteSource {
 public:
  /// \pre `map` outlives it; `paths` has one entry per file of the map, in that order
  FileBytes(const layout::ShardMap& map, std::vector<SourcePath> paths);

  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override;
  Result<bool> Recheck(std::uint32_t file) override;
  Result<os::File> Open(std::uint32_t file) override { return OpenUnchanged(paths_[file]); }
  std::uint64_t bytes_read() const override { return bytes_.load(std::memory_order_relaxed); }
  std::uint64_t files_read() const override { return pool_.opened_count(); }

 private:
  /// A thread's position in a compressed item.
  struct Reading {
    std::shared_ptr<const os::File> file;
    const zstd::CompressedItem* stretch = nullptr;
    zstd::Stream stream;
    std::vector<std::byte> skipped;
  };
  Status ReadByteRanges(const std::shared_ptr<const os::File>& file,
                        const std::vector<zstd::CompressedItem>& stretches, std::uint64_t first,
                        std::span<std::byte> out);

  const layout::ShardMap& map_;
  std::vector<SourcePath> paths_;
  FilePool pool_;
  tbb::enumerable_thread_specific<Reading> readings_;
  std::atomic<std::uint64_t> bytes_ = 0;
};

}  // namespace shardwright::exec
