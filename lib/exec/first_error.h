#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include "base/result.h"

namespace shardwright::exec {

/// The first error of many threads, by the lowest index of what failed, so that every run reports
/// the same one. Thread-safe but for Take.
class FirstError {
 public:
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

  void Set(std::uint64_t index, Error error) {
    const std::lock_guard lock(mutex_);
    if (!failed() || index < index_) {
      index_ = index;
      error_ = std::move(error);
    }
    failed_.store(true, std::memory_order_relaxed);
  }

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

}  // namespace shardwright::exec
