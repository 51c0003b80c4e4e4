// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace shardwright::cli {

/// Turns the bytes of one pass into a rate, the time left and a text. Pure: the caller
/// passes the time. Not thread-safe.
class ProgressMeter {
 public:
  /// Starts the pass `name` at `now_seconds`.
  void Start(std::string_view name, double now_seconds);

  /// Sets the progress of the pass. \pre now_seconds never decreases
  void Update(std::uint64_t bytes_done, std::uint64_t bytes_total, double now_seconds);

  /// Returns the recent rate in bytes per second, 0 if unknown. Older samples count less.
  double rate() const { return rate_; }

  /// Returns the seconds until the pass ends at that rate, negative if unknown.
  double seconds_left() const;

  /// Returns the known parts of "write: 43% (1.87 GiB of 4.36 GiB), 2.10 GiB/s, 1.2 s left".
  std::string Text() const;

  /// Returns the progress as one line of JSON. Unknown numbers are null.
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
