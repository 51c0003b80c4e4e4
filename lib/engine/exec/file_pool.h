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

/// Keeps a bounded number of files open, because a checkpoint can have more files than a
/// process may open at once. Threads open different files at the same time. Thread-safe.
/// Local.
class FilePool {
 public:
  using Open = std::function<Result<os::File>(std::uint32_t file)>;

  explicit FilePool(Open open, std::size_t limit = 256);

  /// Returns the open file, which stays open at least until the caller releases it.
  /// \error what `open` returns
  Result<std::shared_ptr<const os::File>> Get(std::uint32_t file);

  /// Keeps a file open that the caller has opened, as if Get had opened it.
  /// \pre no thread calls Get for this file
  void Keep(std::uint32_t file, os::File opened);

  /// Closes a file as soon as no caller uses it. Get may open it again.
  void Close(std::uint32_t file);

  /// Closes all files.
  /// \pre no caller uses a file
  /// \error kIo  the first failed close since the pool was created, with its original message
  Status CloseAll();

  /// Returns the number of distinct files opened so far.
  std::uint64_t opened_count() const;

 private:
  std::shared_ptr<const os::File> Store(std::unique_lock<std::mutex> lock, std::uint32_t file,
                                        os::File opened);

  /// The first error of closing a file; callers may close files after the pool has dropped them.
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
  std::unordered_set<std::uint32_t> opening_;  // by a thread without the lock
  std::unordered_map<std::uint32_t, Entry> entries_;
  std::list<std::uint32_t> recent_;  // most recent first
  std::unordered_map<std::uint32_t, bool> seen_;
};

}  // namespace shardwright::exec
