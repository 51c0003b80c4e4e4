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
  bytes_.sample_seconds = now_seconds;
  files_.sample_seconds = now_seconds;
}

void ProgressMeter::Amount::Update(std::uint64_t now_done, std::uint64_t now_total,
                                   double now_seconds) {
  total = now_total;
  const double seconds = now_seconds - sample_seconds;
  if (seconds >= kShortestSampleSeconds && now_done >= sample) {
    const double latest = static_cast<double>(now_done - sample) / seconds;
    const double weight = has_rate ? 1 - std::exp(-seconds / kMemorySeconds) : 1;
    rate += weight * (latest - rate);
    has_rate = has_rate || now_done > 0;
    sample_seconds = now_seconds;
    sample = now_done;
  }
  done = now_done;
}

double ProgressMeter::Amount::seconds_left() const {
  if (total == 0 || rate <= 0) return -1;
  return static_cast<double>(total - std::min(done, total)) / rate;
}

double ProgressMeter::seconds_left() const {
  return bytes_.known() ? bytes_.seconds_left() : files_.seconds_left();
}

std::string ProgressMeter::Text() const {
  const bool bytes = bytes_.known();
  const Amount& amount = bytes ? bytes_ : files_;
  if (!amount.known()) return name_;
  const auto format = [&](std::uint64_t count) {
    return bytes ? FormatBytes(count) : std::to_string(count);
  };
  const std::string_view unit = bytes ? "" : " files";
  std::string text = name_ + ": ";
  if (amount.total != 0) {
    const double part = static_cast<double>(std::min(amount.done, amount.total)) /
                        static_cast<double>(amount.total);
    // Rounded down, so that 100% means done.
    text += std::to_string(static_cast<int>(part * 100)) + "% (" + format(amount.done) + " of " +
            format(amount.total);
    text.append(unit) += ")";
  } else {
    text.append(format(amount.done)).append(unit);
  }
  if (amount.rate >= 1) {
    text += ", " + format(static_cast<std::uint64_t>(amount.rate));
    text.append(unit) += "/s";
  }
  if (const double left = seconds_left(); left >= 0)
    text += ", " + text::FormatSeconds(left) + " left";
  return text;
}

std::string ProgressMeter::Json(double now_seconds) const {
  nlohmann::ordered_json line = nlohmann::ordered_json::object();
  line["event"] = "progress";
  line["pass"] = name_;
  line["seconds"] = std::max(now_seconds - start_seconds_, 0.0);
  const auto add = [&](const std::string& unit, const Amount& amount) {
    line[unit + "_done"] = amount.done;
    line[unit + "_total"] = nullptr;
    if (amount.total != 0) line[unit + "_total"] = amount.total;
    line[unit + "_per_second"] = nullptr;
    if (amount.has_rate) line[unit + "_per_second"] = amount.rate;
  };
  add("bytes", bytes_);
  add("files", files_);
  line["seconds_left"] = nullptr;
  if (const double left = seconds_left(); left >= 0) line["seconds_left"] = left;
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace shardwright::cli
