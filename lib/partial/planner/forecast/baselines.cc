// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/baselines.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace shardwright::partial {
namespace {

constexpr double kCheckFreqOverhead = 0.05;     // max_overhead of its iterator
constexpr double kCheckFreqMoreIterations = 2;  // its step while the overhead is larger

/// Returns a full checkpoint with its times; the stall and the interval are not set.
AutoConfig FullConfig(const AutoInput& input, std::uint64_t rank_bytes) {
  AutoConfig config;
  config.k_snapshot = static_cast<std::uint32_t>(input.snapshot.bytes.size());
  config.k_persist = config.k_snapshot;
  config.snapshot_s = static_cast<double>(rank_bytes) / input.snapshot_bytes_per_s;
  config.persist_s = static_cast<double>(rank_bytes) / input.persist_bytes_per_s;
  return config;
}

CheckpointCosts CostsOf(const AutoInput& input, const AutoConfig& config) {
  return {config.stall_s, static_cast<double>(config.interval), input.iteration_s, input.fault_rate,
          input.restart_s};
}

/// Sets the interval, and the costs that follow from it.
Result<AutoConfig> WithInterval(const AutoInput& input, AutoConfig config, double interval) {
  if (!(interval < 0x1p53)) {
    return Fail(Errc::kUsage, "a full checkpoint takes more than 2^53 iterations");
  }
  config.interval = static_cast<std::uint64_t>(interval);
  const CheckpointCosts costs = CostsOf(input, config);
  SW_TRY_ASSIGN(config.overhead_s, ExpectedOverhead(costs, input.iterations));
  SW_TRY_ASSIGN(config.ettr, EffectiveTimeRatio(costs));
  return config;
}

}  // namespace

Result<AutoConfig> BlockingConfig(const AutoInput& input, std::uint64_t rank_bytes) {
  SW_TRY(Validate(input));
  AutoConfig config = FullConfig(input, rank_bytes);
  config.stall_s = config.snapshot_s + config.persist_s;
  std::optional<std::uint64_t> interval = input.interval;
  if (!interval) {
    SW_TRY_ASSIGN(interval, BestInterval(CostsOf(input, config), 0));
  }
  const double persist = std::max(1.0, std::ceil(config.persist_s / input.iteration_s));
  return WithInterval(input, config, interval ? static_cast<double>(*interval) : persist);
}

Result<AutoConfig> CheckFreqConfig(const AutoInput& input, std::uint64_t rank_bytes) {
  SW_TRY(Validate(input));
  AutoConfig config = FullConfig(input, rank_bytes);
  config.stall_s = SaveStall(config.snapshot_s, input.forward_backward_s);
  const double hidden_s = config.snapshot_s + config.persist_s - config.stall_s;
  double interval = std::max(1.0, std::ceil(hidden_s / input.iteration_s));
  if (input.interval) {
    interval = std::max(interval, static_cast<double>(*input.interval));
  } else {
    const double needed = config.stall_s / (kCheckFreqOverhead * input.iteration_s);
    const double steps = std::ceil(std::max(0.0, needed - interval) / kCheckFreqMoreIterations);
    interval += steps * kCheckFreqMoreIterations;
  }
  return WithInterval(input, config, interval);
}

Result<AutoConfig> GeminiConfig(const AutoInput& input, std::uint64_t rank_bytes,
                                double network_bytes_per_s) {
  SW_TRY(Validate(input));
  if (!(network_bytes_per_s > 0)) {
    return Fail(Errc::kUsage, "expected a bandwidth to other nodes above 0");
  }
  AutoConfig config = FullConfig(input, rank_bytes);
  config.persist_s = static_cast<double>(rank_bytes) / network_bytes_per_s;
  config.stall_s = SaveStall(config.snapshot_s, input.forward_backward_s);
  const double hidden_s = config.snapshot_s + config.persist_s - config.stall_s;
  const double least = std::max(1.0, std::ceil(hidden_s / input.iteration_s));
  std::optional<std::uint64_t> interval = input.interval;
  if (!interval) {
    SW_TRY_ASSIGN(interval, BestInterval(CostsOf(input, config), 0));
  }
  return WithInterval(input, config, std::max(least, static_cast<double>(interval.value_or(1))));
}

double StallReduction(double stall_s, double blocking_stall_s) {
  return blocking_stall_s > 0 ? 1 - stall_s / blocking_stall_s : 0;
}

}  // namespace shardwright::partial
