// SPDX-License-Identifier: Apache-2.0
#include "support/cli/meter.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "support/base/bytes.h"
#include "support/text/text.h"

namespace shardwright::cli {
namespace {

// Long enough to smooth out single slow files, short enough to follow a change of the device.
constexpr double kMemorySeconds = 5.0;
// Shorter samples measure the scheduler more than the disk.
constexpr double kShortestSampleSeconds = 0.05;

}  // namespace

void ProgressMeter::Start(std::string_view name, double now_seconds) {
  *this = ProgressMeter();
  name_ = name;
  start_seconds_ = now_seconds;
  sample_seconds_ = now_seconds;
}

void ProgressMeter::Update(std::uint64_t bytes_done, std::uint64_t bytes_total,
                           double now_seconds) {
  bytes_total_ = bytes_total;
  const double seconds = now_seconds - sample_seconds_;
  if (seconds >= kShortestSampleSeconds && bytes_done >= sample_bytes_) {
    const double sample = static_cast<double>(bytes_done - sample_bytes_) / seconds;
    const double weight = has_rate_ ? 1 - std::exp(-seconds / kMemorySeconds) : 1;
    rate_ += weight * (sample - rate_);
    has_rate_ = has_rate_ || bytes_done > 0;
    sample_seconds_ = now_seconds;
    sample_bytes_ = bytes_done;
  }
  last_bytes_ = bytes_done;
}

double ProgressMeter::seconds_left() const {
  if (bytes_total_ == 0 || rate_ <= 0) return -1;
  return static_cast<double>(bytes_total_ - std::min(last_bytes_, bytes_total_)) / rate_;
}

std::string ProgressMeter::Text() const {
  std::string text = name_;
  if (last_bytes_ == 0 && bytes_total_ == 0) return text;
  text += ": ";
  if (bytes_total_ != 0) {
    const double part = static_cast<double>(std::min(last_bytes_, bytes_total_)) /
                        static_cast<double>(bytes_total_);
    // Rounded down, so that 100% means done.
    text += std::to_string(static_cast<int>(part * 100)) + "% (" + FormatBytes(last_bytes_) +
            " of " + FormatBytes(bytes_total_) + ")";
  } else {
    text += FormatBytes(last_bytes_);
  }
  if (rate_ >= 1) text += ", " + FormatBytes(static_cast<std::uint64_t>(rate_)) + "/s";
  if (const double left = seconds_left(); left >= 0)
    text += ", " + text::FormatSeconds(left) + " left";
  return text;
}

std::string ProgressMeter::Json(double now_seconds) const {
  nlohmann::ordered_json line = nlohmann::ordered_json::object();
  line["event"] = "progress";
  line["pass"] = name_;
  line["seconds"] = std::max(now_seconds - start_seconds_, 0.0);
  line["bytes_done"] = last_bytes_;
  line["bytes_total"] = nullptr;
  if (bytes_total_ != 0) line["bytes_total"] = bytes_total_;
  line["bytes_per_second"] = nullptr;
  if (has_rate_) line["bytes_per_second"] = rate_;
  line["seconds_left"] = nullptr;
  if (const double left = seconds_left(); left >= 0) line["seconds_left"] = left;
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace shardwright::cli
