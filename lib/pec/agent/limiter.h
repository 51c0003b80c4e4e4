#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

namespace shardwright::pec {

/// Holds threads back to a number of bytes per second, all of them together. Thread-safe.
class Limiter {
 public:
  /// \param bytes_per_second  0: no limit
  explicit Limiter(std::uint64_t bytes_per_second) : rate_(bytes_per_second) {}

  /// Waits until `bytes` more may move.
  void Spend(std::uint64_t bytes);

 private:
  using Clock = std::chrono::steady_clock;
  const std::uint64_t rate_;
  std::mutex mutex_;
  Clock::time_point free_at_{};
};

}  // namespace shardwright::pec
