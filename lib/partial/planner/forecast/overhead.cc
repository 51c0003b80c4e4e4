// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/overhead.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace shardwright::partial {
namespace {

Status CheckAtLeast(const char* what, double value, double least) {
  if (std::isfinite(value) && value >= least) return {};
  return Fail(Errc::kUsage, what, " is ", value, ", expected a number that is at least ", least);
}

Status CheckPositive(const char* what, double value) {
  if (std::isfinite(value) && value > 0) return {};
  return Fail(Errc::kUsage, what, " is ", value, ", expected a positive number");
}

Status Check(const CheckpointCosts& costs) {
  SW_TRY(CheckAtLeast("the time to save in seconds", costs.save_s, 0));
  SW_TRY(CheckPositive("the interval between checkpoints", costs.interval));
  SW_TRY(CheckAtLeast("the time of an iteration in seconds", costs.iteration_s, 0));
  SW_TRY(CheckAtLeast("the fault rate per iteration", costs.fault_rate, 0));
  return CheckAtLeast("the time to restart in seconds", costs.restart_s, 0);
}

double Rate(const CheckpointCosts& costs, double interval) {
  return costs.save_s / interval + costs.fault_rate * interval * costs.iteration_s / 2;
}

}  // namespace

double SaveStall(double snapshot_s, double forward_backward_s) {
  return std::max(0.0, snapshot_s - forward_backward_s);
}

Result<double> ExpectedOverhead(const CheckpointCosts& costs, double iterations) {
  SW_TRY(Check(costs));
  SW_TRY(CheckPositive("the length of the run in iterations", iterations));
  const double faults = costs.fault_rate * iterations;
  return costs.save_s * iterations / costs.interval +
         faults * (costs.restart_s + costs.interval * costs.iteration_s / 2);
}

Result<double> OverheadRate(const CheckpointCosts& costs) {
  SW_TRY(Check(costs));
  return Rate(costs, costs.interval);
}

Result<std::optional<std::uint64_t>> BestInterval(const CheckpointCosts& costs, double persist_s) {
  CheckpointCosts checked = costs;
  checked.interval = 1;  // ignore the caller's interval
  SW_TRY(Check(checked));
  SW_TRY(CheckPositive("the time of an iteration in seconds", costs.iteration_s));
  SW_TRY(CheckAtLeast("the time to persist in seconds", persist_s, 0));
  const double least = std::max(1.0, std::ceil(persist_s / costs.iteration_s));
  if (costs.fault_rate == 0 && costs.save_s > 0) return std::optional<std::uint64_t>();
  double best = least;
  if (costs.save_s > 0) {
    const double exact = std::sqrt(2 * costs.save_s / (costs.fault_rate * costs.iteration_s));
    const double below = std::max(1.0, std::floor(exact));
    best = std::max(least, Rate(costs, below) <= Rate(costs, below + 1) ? below : below + 1);
  }
  if (!(best < 0x1p53)) {
    return Fail(Errc::kUsage,
                "the best interval is above 2^53 iterations, because the fault rate of ",
                costs.fault_rate, " per iteration is too low for the other times");
  }
  return std::optional<std::uint64_t>(static_cast<std::uint64_t>(best));
}

Result<double> EffectiveTimeRatio(const CheckpointCosts& costs) {
  SW_TRY(Check(costs));
  SW_TRY(CheckPositive("the time of an iteration in seconds", costs.iteration_s));
  const double span_s = costs.interval * costs.iteration_s;
  const double recovery_s = costs.restart_s + span_s / 2;
  return 1 / (1 + costs.save_s / span_s) / (1 + recovery_s * costs.fault_rate / costs.iteration_s);
}

Result<double> WastedWork(double checkpoint_s, double retrieval_s, double interval,
                          double iteration_s) {
  SW_TRY(CheckAtLeast("the time of a checkpoint in seconds", checkpoint_s, 0));
  SW_TRY(CheckAtLeast("the time of the retrieval in seconds", retrieval_s, 0));
  SW_TRY(CheckAtLeast("the interval between checkpoints", interval, 0));
  SW_TRY(CheckAtLeast("the time of an iteration in seconds", iteration_s, 0));
  return checkpoint_s + retrieval_s + interval / 2 * iteration_s;
}

}  // namespace shardwright::partial
