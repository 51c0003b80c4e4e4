// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/auto_config.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "partial/select/lost_tokens.h"
#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

Status CheckPositive(const char* what, double value) {
  if (std::isfinite(value) && value > 0) return {};
  return Fail(Errc::kUsage, what, " is ", value, ", expected a positive number");
}

double SnapshotSeconds(const AutoInput& input, std::uint32_t k) {
  return static_cast<double>(input.snapshot.bytes[k - 1]) / input.snapshot_bytes_per_s;
}

double PersistSeconds(const AutoInput& input, std::uint32_t k) {
  return static_cast<double>(input.persist.bytes[k - 1]) / input.persist_bytes_per_s;
}

/// Returns the largest K that causes no snapshot stall, or 1, raised while bytes do not grow.
std::uint32_t ChooseSnapshot(const AutoInput& input) {
  const std::vector<std::uint64_t>& bytes = input.snapshot.bytes;
  std::uint32_t chosen = 1;
  for (std::uint32_t k = 1; k <= bytes.size(); ++k) {
    if (SnapshotSeconds(input, k) <= input.forward_backward_s) chosen = k;
  }
  while (chosen < bytes.size() && bytes[chosen] <= bytes[chosen - 1]) ++chosen;
  return chosen;
}

Result<double> PltOf(const AutoInput& input, const AutoConfig& config, std::uint32_t k_persist) {
  const auto experts = static_cast<std::uint32_t>(input.persist.bytes.size());
  SW_TRY_ASSIGN(const double loss,
                SteadyLossTwoLevels(experts, config.k_snapshot, k_persist,
                                    static_cast<double>(config.interval), input.lost_share));
  return ExpectedPlt(input.fault_rate * input.iterations, loss, input.iterations);
}

/// Returns the requested or the best interval, but at least the duration of a persist with K = 1.
Result<std::uint64_t> ChooseInterval(const AutoInput& input, const CheckpointCosts& costs) {
  const double least = std::max(1.0, std::ceil(PersistSeconds(input, 1) / input.iteration_s));
  if (!(least < 0x1p53)) {
    return Fail(Errc::kUsage,
                "a persist takes more than 2^53 iterations: ", PersistSeconds(input, 1),
                " seconds");
  }
  const auto floor = static_cast<std::uint64_t>(least);
  if (input.interval) return std::max(*input.interval, floor);
  SW_TRY_ASSIGN(const std::optional<std::uint64_t> best,
                BestInterval(costs, PersistSeconds(input, 1)));
  return best.value_or(floor);
}

/// Sets K_persist to the smallest K that meets the PLT limit and can be persisted within the
/// interval. If there is none, sets the largest K that can. Then raises K while bytes do not grow.
Status ChoosePersist(const AutoInput& input, const StopCheck& stop, AutoConfig* config) {
  const double span_s = static_cast<double>(config->interval) * input.iteration_s;
  SW_TRY_ASSIGN(config->expected_plt, PltOf(input, *config, 1));
  for (std::uint32_t k = 2; k <= config->k_snapshot && config->expected_plt > input.plt_limit;
       ++k) {
    SW_TRY(CheckStop(stop));
    if (PersistSeconds(input, k) > span_s) continue;
    config->k_persist = k;
    SW_TRY_ASSIGN(config->expected_plt, PltOf(input, *config, k));
  }
  const std::vector<std::uint64_t>& bytes = input.persist.bytes;
  while (config->k_persist < config->k_snapshot &&
         bytes[config->k_persist] <= bytes[config->k_persist - 1]) {
    ++config->k_persist;
  }
  SW_TRY_ASSIGN(config->expected_plt, PltOf(input, *config, config->k_persist));
  config->plt_in_limit = config->expected_plt <= input.plt_limit;
  return {};
}

/// Returns the bytes per iteration that are logged if checkpoints save K experts per layer.
double LoggedBytes(const AutoInput& input, std::uint32_t k) {
  const auto experts = static_cast<double>(input.persist.bytes.size());
  return static_cast<double>(input.log_bytes) * (experts - k) / experts;
}

/// Returns a lossless run with K experts per snapshot.
/// \param free_bytes_per_s  storage bandwidth of a rank that its log does not use
Result<ReplayConfig> ReplayWithK(const AutoInput& input, std::uint32_t k, double free_bytes_per_s) {
  const auto experts = static_cast<std::uint32_t>(input.persist.bytes.size());
  const ReplayRates rates{input.snapshot_bytes_per_s, input.persist_bytes_per_s,
                          input.replay_elems_per_s};
  const auto log_bytes = static_cast<double>(input.log_bytes);
  ReplayConfig out;
  out.log_stall_s =
      LogStall(log_bytes, LoggedBytes(input, k), input.ranks, rates, input.iteration_s);
  AutoConfig& config = out.config;
  config.k_snapshot = config.k_persist = k;
  config.snapshot_s = SnapshotSeconds(input, k);
  config.stall_s = SaveStall(config.snapshot_s, input.forward_backward_s);
  config.persist_s = static_cast<double>(input.persist.bytes[k - 1]) / free_bytes_per_s;
  const double least = std::max(1.0, std::ceil(config.persist_s / input.iteration_s));
  if (!(least < 0x1p53)) {
    return Fail(Errc::kUsage, "a persist with a gradient log takes more than 2^53 iterations");
  }
  // Replay time and repeated iterations both grow in proportion to the interval.
  SW_TRY_ASSIGN(const ReplayWork work, SteadyReplay(experts, k, 1, log_bytes));
  const double replay_s = ReplaySeconds(work, input.ranks, rates);
  SW_TRY_ASSIGN(const std::optional<std::uint64_t> best,
                BestInterval({config.stall_s, 1, input.iteration_s + 2 * replay_s, input.fault_rate,
                              input.restart_s},
                             0));
  config.interval =
      std::max(static_cast<std::uint64_t>(least), input.interval.value_or(best.value_or(1)));
  const auto interval = static_cast<double>(config.interval);
  out.replay_s = replay_s * interval;
  out.window = config.interval * CeilDiv(experts, k);
  const CheckpointCosts costs{config.stall_s + interval * out.log_stall_s, interval,
                              input.iteration_s, input.fault_rate, input.restart_s + out.replay_s};
  SW_TRY_ASSIGN(config.overhead_s, ExpectedOverhead(costs, input.iterations));
  SW_TRY_ASSIGN(config.ettr, EffectiveTimeRatio(costs));
  return out;
}

}  // namespace

Status Validate(const AutoInput& input) {
  if (input.snapshot.bytes.empty() || input.snapshot.bytes.size() != input.persist.bytes.size()) {
    return Fail(Errc::kUsage, "largest shares for ", input.snapshot.bytes.size(),
                " values of K for snapshots and for ", input.persist.bytes.size(),
                " for persists: expected K from 1 to N for both");
  }
  SW_TRY(CheckPositive("the snapshot bandwidth in bytes per second", input.snapshot_bytes_per_s));
  SW_TRY(CheckPositive("the persist bandwidth in bytes per second", input.persist_bytes_per_s));
  SW_TRY(CheckPositive("the time of forward and backward in seconds", input.forward_backward_s));
  SW_TRY(CheckPositive("the time of an iteration in seconds", input.iteration_s));
  return CheckPositive("the length of the run in iterations", input.iterations);
}

Result<AutoConfig> ChooseConfig(const AutoInput& input, const StopCheck& stop) {
  SW_TRY(Validate(input));
  AutoConfig config;
  config.k_snapshot = ChooseSnapshot(input);
  config.snapshot_s = SnapshotSeconds(input, config.k_snapshot);
  config.stall_s = SaveStall(config.snapshot_s, input.forward_backward_s);
  CheckpointCosts costs{config.stall_s, 1, input.iteration_s, input.fault_rate, input.restart_s};
  SW_TRY_ASSIGN(config.interval, ChooseInterval(input, costs));
  SW_TRY(ChoosePersist(input, stop, &config));
  config.persist_s = PersistSeconds(input, config.k_persist);
  costs.interval = static_cast<double>(config.interval);
  SW_TRY_ASSIGN(config.overhead_s, ExpectedOverhead(costs, input.iterations));
  SW_TRY_ASSIGN(config.ettr, EffectiveTimeRatio(costs));
  return config;
}

Result<std::optional<ReplayConfig>> ChooseReplay(const AutoInput& input, const StopCheck& stop) {
  SW_TRY(Validate(input));
  std::optional<ReplayConfig> best;
  for (std::uint32_t k = 1; k < input.persist.bytes.size(); ++k) {
    SW_TRY(CheckStop(stop));
    const double log_bytes_per_s = LoggedBytes(input, k) / input.ranks / input.iteration_s;
    const double free_bytes_per_s = input.persist_bytes_per_s - log_bytes_per_s;
    if (free_bytes_per_s <= 0) continue;
    SW_TRY_ASSIGN(const ReplayConfig one, ReplayWithK(input, k, free_bytes_per_s));
    if (!best || one.config.overhead_s < best->config.overhead_s) best = one;
  }
  return best;
}

}  // namespace shardwright::partial
