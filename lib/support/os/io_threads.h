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

/// Keeps the first error of many threads: the one with the lowest index, so that every run reports
/// the same error. Any other error takes precedence over a stop. Thread-safe except Take.
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

  /// Returns the index of the error. Call it when the threads have ended. \pre failed()
  std::uint64_t index() const { return index_; }

  /// Returns the error, or success if there is none. Call it when the threads have ended.
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

/// Default number of files that are processed at the same time.
inline constexpr unsigned kIoThreads = 32;
/// Maximum number of files that are processed at the same time.
inline constexpr unsigned kIoThreadsMax = 1024;

/// Reports calls that take long, such as opening a file on a server that does not answer.
struct SlowCalls {
  double seconds = 10;  ///< a call that takes longer is slow
  /// Receives the slow call that began first, its duration so far, and the number of other slow
  /// calls. Called again each time that this duration has doubled, or when another call is the
  /// first, but not more often than every `seconds`. Called from a thread of its own. Does not
  /// throw.
  std::function<void(std::uint64_t index, double seconds, std::size_t others)> tell = {};
};

/// Calls `act(index)` for every index below `count`, on up to `threads` threads. The threads
/// mostly wait for a file system, so there may be many more threads than processors. Uses
/// fewer threads if the process may not open enough files or start enough threads. Indices
/// start in ascending order, and no more start after a failure.
/// \param act  opens at most kFilesPerIoThread files at a time; called from many threads
/// \param failed  receives the index of the returned error; may be null
/// \param slow  if not null, reports slow calls of `act`
/// \returns the error of the lowest failed index, which is the same for every number of threads.
///        Any other error takes precedence over kStopped. Rethrows exceptions of `act`.
/// Local.
Status ForEachFile(std::uint64_t count, unsigned threads,
                   const std::function<Status(std::uint64_t index)>& act,
                   std::uint64_t* failed = nullptr, const SlowCalls* slow = nullptr);

/// Maximum number of descriptors that `act` may have open at a time.
inline constexpr unsigned kFilesPerIoThread = 4;

/// Returns how many of `wanted` files a process may keep open: at most a third of the limit of open
/// files.
/// Local.
std::size_t OpenFilesAllowed(std::size_t wanted);

/// Returns the part of `threads` that the process's limit of open files allows, at least one.
/// Local.
unsigned IoThreadsAllowed(unsigned threads);

}  // namespace shardwright::os
