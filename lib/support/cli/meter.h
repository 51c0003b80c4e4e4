// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace shardwright::cli {

/// Turns the bytes or files of one pass into a rate, the time left and a text. Pure: the caller
/// passes the time. Not thread-safe.
class ProgressMeter {
 public:
  /// Starts the pass `name` at `now_seconds`.
  void Start(std::string_view name, double now_seconds);

  /// Sets the progress of the pass in bytes. \pre now_seconds never decreases
  void Update(std::uint64_t bytes_done, std::uint64_t bytes_total, double now_seconds) {
    bytes_.Update(bytes_done, bytes_total, now_seconds);
  }

  /// Sets the progress of the pass in files. \pre now_seconds never decreases
  void UpdateFiles(std::uint64_t files_done, std::uint64_t files_total, double now_seconds) {
    files_.Update(files_done, files_total, now_seconds);
  }

  /// Returns the recent rate in bytes per second, 0 if unknown. Older samples count less.
  double rate() const { return bytes_.rate; }

  /// Returns the seconds until the pass ends at the rate of bytes, or of files if there
  /// are no bytes. Negative if unknown.
  double seconds_left() const;

  /// Returns the known parts of "write: 43% (1.87 GiB of 4.36 GiB), 2.10 GiB/s, 1.2 s left". In a
  /// pass without bytes: of "scan: 43% (14093 of 32768 files), 2300 files/s, 8.1 s left".
  std::string Text() const;

  /// Returns the progress as one line of JSON. Unknown numbers are null.
  std::string Json(double now_seconds) const;

 private:
  /// Progress in one unit: bytes or files.
  struct Amount {
    double sample_seconds = 0;
    std::uint64_t sample = 0;
    std::uint64_t done = 0;
    std::uint64_t total = 0;
    double rate = 0;  // per second
    bool has_rate = false;

    void Update(std::uint64_t now_done, std::uint64_t now_total, double now_seconds);
    bool known() const { return done != 0 || total != 0; }
    double seconds_left() const;
  };

  std::string name_;
  double start_seconds_ = 0;
  Amount bytes_;
  Amount files_;
};

}  // namespace shardwright::cli
