// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace shardwright::cli {

/// Turns the bytes of one pass into rate, time left and text.
/// Pure: the caller brings the clock. Not thread-safe.
class ProgressMeter {
 public:
  /// Starts the pass `name` at `now_seconds`.
  void Start(std::string_view name, double now_seconds);

  /// Tells how far the pass is. \pre now_seconds never goes back
  void Update(std::uint64_t bytes_done, std::uint64_t bytes_total, double now_seconds);

  /// Bytes per second lately; 0 while unknown. Old seconds count less the older they are.
  double rate() const { return rate_; }

  /// Seconds until the pass is done at that rate; negative while unknown.
  double seconds_left() const;

  /// "write: 43% (1.87 GiB of 4.36 GiB), 2.10 GiB/s, 1.2 s left", or the part of it that is known.
  std::string Text() const;

  /// The same as one line of JSON; unknown numbers are null.
  std::string Json(double now_seconds) const;

 private:
  std::string name_;
  double start_seconds_ = 0;
  double sample_seconds_ = 0;
  std::uint64_t sample_bytes_ = 0;
  std::uint64_t last_bytes_ = 0;
  std::uint64_t bytes_total_ = 0;
  double rate_ = 0;
  bool has_rate_ = false;
};

}  // namespace shardwright::cli
