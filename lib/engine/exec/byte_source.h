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

/// Where the payload bytes of a source's members come from. Thread-safe.
class ByteSource {
 public:
  ByteSource() = default;
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;
  virtual ~ByteSource() = default;

  /// Fills `out` with a member's bytes from `offset`.
  /// \error kNotFound  the file is gone or has changed; kBadInput  it ends before
  virtual Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) = 0;

  /// Looks at a file of the map again, after what was read of it: true if it has grown since it was
  /// found, which a file that may grow does.
  /// \error kNotFound  it is gone or has changed
  virtual Result<bool> Recheck(std::uint32_t /*file*/) { return false; }

  /// Opens a whole file of the map, for a clone or a link of it.
  /// \error kNotFound  it is gone or has changed; kInternal  members do not lie in files
  virtual Result<os::File> Open(std::uint32_t /*file*/) {
    return Fail(Errc::kInternal, "the source has no files to open");
  }

  /// Whether PlaceOf has something to say.
  virtual bool has_places() const { return false; }

  /// Where some of a member's bytes stand among those that are made together, as the states of a
  /// parameter are: units that are read in ascending order of this have them made once. Absent:
  /// any order is as good.
  virtual std::optional<std::uint64_t> PlaceOf(std::uint32_t /*member*/, std::uint64_t /*offset*/) {
    return std::nullopt;
  }

  /// Payload bytes read so far, and files opened for them.
  virtual std::uint64_t bytes_read() const = 0;
  virtual std::uint64_t files_read() const = 0;
};

/// Adds the bytes and files read from a source to a sink at the end of its lifetime, so that a run
/// that stops or fails reports them too. Local.
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

/// One file of a source: where it is, and who it was when it was catalogued.
struct SourcePath {
  std::string path;
  os::Identity identity;
  bool may_grow = false;  ///< what was appended since is no change: a log that somebody writes
  /// Where its items lie, ascending, if some are compressed: members lie where they would if none
  /// were. Else empty.
  std::vector<zstd::CompressedItem> stretches = {};
  /// The path without links, by which it is opened: another user may have put a link in its place
  /// since. Empty: by `path`.
  std::string real = {};
};

/// True if a file is, as far as the file system can tell, the one that was catalogued. Pure.
bool IsUnchanged(const SourcePath& source, const os::Identity& now);

/// Opens a file that must be the one that was catalogued.
/// \param grown  if not null: set where it is longer now
/// \error kNotFound  it is gone or has changed
Result<os::File> OpenUnchanged(const SourcePath& source, bool* grown = nullptr);

/// Reads members where they lie: in the source's own files. What is compressed is read from its
/// beginning, or from where the same thread has read to; a member that is read in order is
/// decompressed once for each thread that does.
class FileBytes final : public ByteSource {
 public:
  /// \pre `map` outlives it; paths are by file index of the map
  FileBytes(const layout::ShardMap& map, std::vector<SourcePath> paths);

  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override;
  Result<bool> Recheck(std::uint32_t file) override;
  Result<os::File> Open(std::uint32_t file) override { return OpenUnchanged(paths_[file]); }
  std::uint64_t bytes_read() const override { return bytes_.load(std::memory_order_relaxed); }
  std::uint64_t files_read() const override { return pool_.opened_count(); }

 private:
  /// A thread's place in a compressed item.
  struct Reading {
    std::shared_ptr<const os::File> file;
    const zstd::CompressedItem* stretch = nullptr;
    zstd::Stream stream;
    std::vector<std::byte> skipped;
  };
  Status ReadStretches(const std::shared_ptr<const os::File>& file,
                       const std::vector<zstd::CompressedItem>& stretches, std::uint64_t first,
                       std::span<std::byte> out);

  const layout::ShardMap& map_;
  std::vector<SourcePath> paths_;
  FilePool pool_;
  tbb::enumerable_thread_specific<Reading> readings_;
  std::atomic<std::uint64_t> bytes_ = 0;
};

}  // namespace shardwright::exec
