// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

#include "support/base/sink.h"

namespace shardwright::exec {

/// Counts the bytes that this rank writes into an output. If the output is not completed, the
/// destructor adds these bytes to the sink. Rank 0 adds the total size of a complete output.
/// Thread-safe. Local.
class UnfinishedWrites {
 public:
  /// \pre the sink outlives it
  explicit UnfinishedWrites(Sink& sink) : sink_(sink) {}
  UnfinishedWrites(const UnfinishedWrites&) = delete;
  UnfinishedWrites& operator=(const UnfinishedWrites&) = delete;
  ~UnfinishedWrites() {
    if (!complete_) sink_.AddWritten(bytes_, 0);
  }

  void Add(std::uint64_t bytes) { bytes_.fetch_add(bytes, std::memory_order_relaxed); }

  /// Marks the output as complete.
  void Complete() { complete_ = true; }

 private:
  Sink& sink_;
  std::atomic<std::uint64_t> bytes_ = 0;
  bool complete_ = false;
};

}  // namespace shardwright::exec
