// SPDX-License-Identifier: Apache-2.0
// lib/support/os: the only door to the file system.
// Files, folders, locks, sockets and the journal of a run. Every call passes the fault hook
// (fault.h), so that a test can stop the program, or make a call fail, at any of them. commit.h
// gives an output its name in one step: whatever kills the program, the name leads to the whole old
// output or to the whole new one. Names out of checkpoints are no paths until SafeName (dir.h) has
// passed them.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "support/base/result.h"

namespace shardwright::os {

/// Who a file is: equal identities mean the same bytes as far as the file system can tell.
struct Identity {
  std::uint64_t bytes = 0;
  std::int64_t mtime_ns = 0;
  std::uint64_t inode = 0;
  friend bool operator==(const Identity&, const Identity&) = default;
};

/// An open file. Reads and writes are positioned, loop until done and may run on many threads at
/// once. Every call passes the fault hook (support/os/fault.h).
class File {
 public:
  File() = default;
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  /// Opens an existing regular file for reading.
  /// \error kNotFound if it is absent, unreadable or not a regular file
  static Result<File> OpenRead(const std::string& path);

  /// Creates a new file for reading and writing.
  /// \param executable  whoever may read it may also run it
  /// \error kBusy if it exists; kIo otherwise
  static Result<File> Create(const std::string& path, bool executable = false);

  /// Opens an existing regular file for reading and writing.
  /// \error kNotFound if it is absent or not a regular file; kIo otherwise
  static Result<File> OpenWrite(const std::string& path);

  /// \error kNotFound if it cannot be asked
  Result<Identity> Stat() const;

  /// True if its owner may run it. \error kNotFound if it cannot be asked
  Result<bool> IsExecutable() const;

  /// Fills `out` from `offset`.
  /// \error kBadInput if the file ends before; kNotFound on a read error
  Status ReadAt(std::uint64_t offset, std::span<std::byte> out) const;

  /// Writes all of `data` at `offset`.
  /// \error kIo, with errno
  Status WriteAt(std::uint64_t offset, std::span<const std::byte> data) const;

  /// Reserves space and sets the size. Falls back to setting the size where the file system cannot
  /// reserve.
  /// \error kIo, with errno (ENOSPC before anything is written)
  Status Allocate(std::uint64_t bytes) const;

  /// Flushes data and metadata to the device. A failure is final: never retried.
  /// \error kIo, with errno
  Status Sync() const;

  /// Closes the file. A network or FUSE file system may report only here that it could not store
  /// what was written.
  /// \error kIo, with errno; the file is closed all the same
  Status Close();

  /// Drops the file's pages from memory, so that the next read comes from the device.
  /// \pre it was synced
  /// \returns false if pages stayed in memory
  bool DropCache() const;

  const std::string& path() const { return path_; }
  bool is_open() const { return fd_ >= 0; }

 private:
  friend struct FileFd;
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}

  int fd_ = -1;
  std::string path_;
};

}  // namespace shardwright::os
