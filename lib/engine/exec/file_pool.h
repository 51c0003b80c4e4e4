// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "support/base/result.h"
#include "support/os/file.h"

namespace shardwright::exec {

/// Keeps a bounded number of files open; a checkpoint has more of them than a process may have
/// descriptors. Threads open different files at the same time. Thread-safe.
/// Local.
class FilePool {
 public:
  using Open = std::function<Result<os::File>(std::uint32_t file)>;

  explicit FilePool(Open open, std::size_t limit = 256);

  /// The open file; it stays open at least as long as the caller holds it.
  /// \error what `open` returns
  Result<std::shared_ptr<const os::File>> Get(std::uint32_t file);

  /// Closes a file as soon as no caller holds it. It may be opened again.
  void Close(std::uint32_t file);

  /// Closes all files.
  /// \pre no caller holds one
  /// \error kIo  what the first close that failed has returned, of all since the pool was made
  Status CloseAll();

  /// How many files have been opened for the first time.
  std::uint64_t opened_count() const;

 private:
  /// The result of closing files, which callers may do after the pool has forgotten them.
  struct Closed {
    std::mutex mutex;
    Status first;
  };
  struct Entry {
    std::shared_ptr<const os::File> file;
    std::list<std::uint32_t>::iterator recent;
  };
  const Open open_;
  const std::size_t limit_;
  const std::shared_ptr<Closed> closed_;
  mutable std::mutex mutex_;
  std::condition_variable opened_;
  std::unordered_set<std::uint32_t> opening_;  // by some thread, without the lock
  std::unordered_map<std::uint32_t, Entry> entries_;
  std::list<std::uint32_t> recent_;  // most recent first
  std::unordered_map<std::uint32_t, bool> seen_;
};

}  // namespace shardwright::exec
