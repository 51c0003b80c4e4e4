// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/replay_costs.h"

#include <algorithm>

#include "partial/select/lost_tokens.h"
#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

constexpr double kGradientBytes = 4;  // per element in the log: float32

double Seconds(double amount, double per_s) { return per_s > 0 ? amount / per_s : 0; }

}  // namespace

double LogStall(double iteration_bytes, double logged_bytes, std::uint32_t ranks,
                const ReplayRates& rates, double iteration_s) {
  const double write_s = Seconds(logged_bytes / ranks, rates.storage_bytes_per_s);
  const double late_s = iteration_s > 0 ? std::max(0.0, write_s - iteration_s) : 0;
  return Seconds(iteration_bytes / ranks, rates.copy_bytes_per_s) + late_s;
}

double ReplaySeconds(const ReplayWork& work, std::uint32_t ranks, const ReplayRates& rates) {
  const double used = work.chain_bytes / ranks;
  return Seconds(work.log_bytes + used, rates.storage_bytes_per_s) +
         Seconds(used / kGradientBytes, rates.elems_per_s);
}

Result<ReplayWork> SteadyReplay(std::uint32_t n, std::uint32_t k, double interval,
                                double iteration_bytes) {
  SW_TRY_ASSIGN(const double behind, SteadyLoss(n, k, interval));
  const std::uint32_t taken = std::min(n, k);
  const auto rounds = static_cast<double>(CeilDiv(n, taken));
  const double logged = iteration_bytes * (n - taken) / n;
  return ReplayWork{(rounds - 0.5) * interval * logged, behind * iteration_bytes};
}

}  // namespace shardwright::partial
