// SPDX-License-Identifier: Apache-2.0
#include "partial/select/dynamic_k.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "partial/select/lost_tokens.h"

namespace shardwright::partial {
namespace {

void Raise(DynamicK* state) {
  state->k = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(std::uint64_t{state->k} * 2, state->experts));
  state->spent = 0;
}

/// Returns the number of doublings from k to at least `experts`.
std::uint32_t LevelsFrom(std::uint32_t k, std::uint32_t experts) {
  std::uint32_t levels = 0;
  for (std::uint64_t reached = k; reached < experts; reached *= 2) ++levels;
  return levels;
}

}  // namespace

Result<DynamicK> MakeDynamicK(std::uint32_t experts, std::uint32_t k, double limit, bool predict) {
  if (k == 0 || k > experts) {
    return Fail(Errc::kUsage, "dynamic K starts at ", k, ", expected 1 to ", experts);
  }
  if (!std::isfinite(limit) || limit <= 0) {
    return Fail(Errc::kUsage, "the limit of lost tokens is ", limit,
                ", expected a positive number");
  }
  return DynamicK{experts, k, LevelsFrom(k, experts), limit, 0, 0, predict, 0};
}

Status Validate(const DynamicK& state) {
  if (state.k == 0 || state.k > state.experts) {
    return Fail(Errc::kBadInput, "dynamic K: k is ", state.k, ", expected 1 to ", state.experts);
  }
  if (state.levels < LevelsFrom(state.k, state.experts) || state.levels > 32) {
    return Fail(Errc::kBadInput, "dynamic K: ", state.levels,
                " levels do not lead from k = ", state.k, " to ", state.experts, " experts");
  }
  const bool sane = std::isfinite(state.limit) && state.limit > 0 && state.spent >= 0 &&
                    std::isfinite(state.total) && state.spent <= state.total;
  if (!sane) {
    return Fail(Errc::kBadInput,
                "dynamic K: expected a positive limit and losses from 0, found a limit of ",
                state.limit, ", losses of ", state.spent, " at this K and of ", state.total,
                " in total");
  }
  return {};
}

Status CheckExperts(const DynamicK& state, const LayerExperts& experts) {
  const std::uint32_t most =
      experts.empty() ? 0 : *std::max_element(experts.begin(), experts.end());
  if (state.experts == most) return {};
  return Fail(Errc::kBadInput, "dynamic K: expected ", state.experts,
              " experts in the largest layer, found ", most);
}

FaultCost EvenFaultCost(LayerExperts experts, std::uint64_t interval, std::uint64_t iterations) {
  return [experts = std::move(experts), interval, iterations](std::uint32_t k) {
    double sum = 0;
    for (const std::uint32_t n : experts) {
      const auto loss = SteadyLoss(n, k, static_cast<double>(interval));
      SW_CHECK(loss.has_value());
      sum += *loss;
    }
    return sum / static_cast<double>(experts.size()) / static_cast<double>(iterations);
  };
}

void RaiseAhead(DynamicK* state, const FaultCost& cost) {
  if (!state->predict) return;
  while (state->k < state->experts && state->spent + cost(state->k) > state->share()) Raise(state);
}

Status EnterRecovery(DynamicK* state, double plt) {
  if (!std::isfinite(plt) || plt < 0) {
    return Fail(Errc::kUsage, "the PLT of a recovery is ", plt, ", expected a number from 0");
  }
  state->spent += plt;
  state->total += plt;
  if (state->k < state->experts && state->spent > state->share()) Raise(state);
  return {};
}

std::optional<std::vector<KLevel>> LevelsAhead(const DynamicK& state, const FaultCost& cost) {
  std::vector<KLevel> levels;
  for (DynamicK level = state; level.k < level.experts; Raise(&level)) {
    const double each = cost(level.k);
    const double whole = std::floor((level.share() - level.spent) / each);
    // The fault that exceeds the share is the level's last one, unless `predict` avoids it.
    const double faults = std::max(0.0, whole) + (level.predict ? 0 : 1);
    if (!(faults < 0x1p53)) return std::nullopt;
    levels.push_back({level.k, each, static_cast<std::uint64_t>(faults)});
  }
  return levels;
}

std::optional<std::uint64_t> FaultsCovered(const DynamicK& state, const FaultCost& cost) {
  const std::optional<std::vector<KLevel>> levels = LevelsAhead(state, cost);
  if (!levels) return std::nullopt;
  std::uint64_t faults = 0;
  for (const KLevel& level : *levels) faults += level.faults;
  return faults < (std::uint64_t{1} << 53) ? std::optional(faults) : std::nullopt;
}

}  // namespace shardwright::partial
