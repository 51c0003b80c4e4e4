// SPDX-License-Identifier: Apache-2.0
// lib/support/os: all access to files, locks and sockets.
// Every file-system call passes the fault hook (fault.h), so that a test can stop
// the program, or make a call fail, at any of them. commit.h renames an output to
// its final name in one step: whenever the program is killed, the name leads to the
// complete old or the complete new output. A name from a checkpoint must pass SafeName
// (dir.h) before it is used in a path.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "support/base/result.h"

namespace shardwright::os {

/// Identity of a file. Equal identities mean the same bytes, as far as the file system reports.
struct Identity {
  std::uint64_t bytes = 0;
  std::int64_t mtime_ns = 0;
  std::uint64_t inode = 0;
  friend bool operator==(const Identity&, const Identity&) = default;
};

/// An open file. Reads and writes are positioned, repeat short system calls until done, and may
/// run on many threads at once. Every call passes the fault hook (support/os/fault.h).
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
  /// \param executable  if set, all users with read permission may also run the file
  /// \error kBusy if it exists; kIo otherwise
  static Result<File> Create(const std::string& path, bool executable = false);

  /// Opens an existing regular file for reading and writing.
  /// \error kNotFound if it is absent or not a regular file; kIo otherwise
  static Result<File> OpenWrite(const std::string& path);

  /// Returns the identity of the file. \error kNotFound if it cannot be read
  Result<Identity> Stat() const;

  /// Returns whether its owner may run it. \error kNotFound if it cannot be checked
  Result<bool> IsExecutable() const;

  /// Reads `out.size()` bytes from `offset`.
  /// \error kBadInput if the file ends earlier; kNotFound on a read error
  Status ReadAt(std::uint64_t offset, std::span<std::byte> out) const;

  /// Writes all of `data` at `offset`.
  /// \error kIo, with errno
  Status WriteAt(std::uint64_t offset, std::span<const std::byte> data) const;

  /// Reserves space, which also sets the size. Does nothing if the file is small or the file system
  /// cannot reserve space.
  /// \error kIo, with errno (ENOSPC before anything is written)
  Status Reserve(std::uint64_t bytes) const;

  /// Reserves space as Reserve does, and sets the size in any case. Some file systems write zeros
  /// to make a file longer.
  /// \error as Reserve
  Status Allocate(std::uint64_t bytes) const;

  /// Flushes data and metadata to the device. Do not retry after a failure.
  /// \error kIo, with errno
  Status Sync() const;

  /// Closes the file. A network or FUSE file system may not report until now that
  /// it could not store the data.
  /// \error kIo, with errno; the file is closed even then
  Status Close();

  /// Starts to write the whole pages of a range to the device, so that a later sync waits less. A
  /// hint, which some file systems ignore. A failed write is an error of the sync.
  void StartWriteback(std::uint64_t offset, std::uint64_t bytes) const;

  /// Removes the file's pages from the page cache, so that the next read comes from the device.
  /// \pre the file was synced
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
