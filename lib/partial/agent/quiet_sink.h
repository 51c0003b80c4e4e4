// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "support/base/sink.h"

namespace shardwright::partial {

/// Forwards warnings and notes but no passes or progress, because several snapshots,
/// persists and copies run at once and each would end the pass of another.
class QuietSink final : public NullSink {
 public:
  /// \param stop  stop flag that replaces that of `sink`; null: use `sink`
  explicit QuietSink(Sink& sink, const std::atomic<bool>* stop = nullptr)
      : sink_(sink), stop_(stop) {}
  void AddRead(std::uint64_t bytes, std::uint64_t files) override { sink_.AddRead(bytes, files); }
  void AddWritten(std::uint64_t bytes, std::uint64_t files) override {
    sink_.AddWritten(bytes, files);
  }
  void Warn(std::string message) override { sink_.Warn(std::move(message)); }
  void Note(std::string message, int level) override { sink_.Note(std::move(message), level); }
  bool stop_requested() const override {
    return stop_ != nullptr ? stop_->load(std::memory_order_relaxed) : sink_.stop_requested();
  }

 private:
  Sink& sink_;
  const std::atomic<bool>* stop_;
};

}  // namespace shardwright::partial
