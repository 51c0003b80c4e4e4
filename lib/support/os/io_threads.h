// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <utility>

#include "support/base/result.h"

namespace shardwright::os {

/// The first error of many threads, by the lowest index of what failed, so that every run reports
/// the same one; an error outranks a stop. Thread-safe but for Take.
class FirstError {
 public:
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

  void Set(std::uint64_t index, Error error) {
    if (error.code == Errc::kStopped) index = std::numeric_limits<std::uint64_t>::max();
    const std::lock_guard lock(mutex_);
    if (!failed() || index < index_) {
      index_ = index;
      error_ = std::move(error);
    }
    failed_.store(true, std::memory_order_relaxed);
  }

  /// The index of the error. Call it when the threads are done. \pre failed()
  std::uint64_t index() const { return index_; }

  /// The error, or success if none was set. Call it when the threads are done.
  Status Take() {
    if (!failed()) return {};
    return tl::unexpected<Error>(std::move(error_));
  }

 private:
  std::atomic<bool> failed_ = false;
  std::mutex mutex_;
  std::uint64_t index_ = 0;
  Error error_;
};

/// How many files are worked on at the same time where nothing else was asked for.
inline constexpr unsigned kIoThreads = 32;
/// The most that can be asked for.
inline constexpr unsigned kIoThreadsMax = 1024;

/// Calls `act(index)` for every index below `count`, for up to `threads` of them at a time. The
/// threads mostly wait for a file system, so there may be many more of them than processors. Uses
/// fewer where the process may not open so many files or start so many threads. Indices begin in
/// ascending order; after a failure nothing more begins.
/// \param act  opens at most kFilesPerIoThread files at a time; called from many threads
/// \param failed  gets, with an error, the index of it; may be null
/// \returns the error of the lowest index that failed, the same for every number of threads; an
///          error outranks a stop (kStopped). Exceptions of `act` are passed on.
/// Local.
Status ForEachFile(std::uint64_t count, unsigned threads,
                   const std::function<Status(std::uint64_t index)>& act,
                   std::uint64_t* failed = nullptr);

/// Descriptors that a thread of ForEachFile may need at a time.
inline constexpr unsigned kFilesPerIoThread = 4;

/// Returns how many of `threads` the limit of open files of this process allows, at least one.
/// Local.
unsigned IoThreadsAllowed(unsigned threads);

}  // namespace shardwright::os
