#include "pec/dynamic_k.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace shardwright::pec {
namespace {

void Raise(DynamicK* state) {
  state->k = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(std::uint64_t{state->k} * 2, state->experts));
  state->spent = 0;
}

/// Doublings from k to at least `experts`.
std::uint32_t LevelsFrom(std::uint32_t k, std::uint32_t experts) {
  std::uint32_t levels = 0;
  for (std::uint64_t reached = k; reached < experts; reached *= 2) ++levels;
  return levels;
}

}  // namespace

Result<DynamicK> MakeDynamicK(std::uint32_t experts, std::uint32_t k, double limit, bool predict) {
  if (k == 0 || k > experts) {
    return Fail(Errc::kUsage, "dynamic K starts at " + std::to_string(k) + ", expected 1 to " +
                                  std::to_string(experts));
  }
  if (!std::isfinite(limit) || limit <= 0) {
    return Fail(Errc::kUsage, "the limit of lost tokens is " + std::to_string(limit) +
                                  ", expected a positive number");
  }
  return DynamicK{experts, k, LevelsFrom(k, experts), limit, 0, 0, predict};
}

Status Validate(const DynamicK& state) {
  if (state.k == 0 || state.k > state.experts) {
    return Fail(Errc::kBadInput, "dynamic K: k is " + std::to_string(state.k) + ", expected 1 to " +
                                     std::to_string(state.experts));
  }
  if (state.levels < LevelsFrom(state.k, state.experts) || state.levels > 32) {
    return Fail(Errc::kBadInput, "dynamic K: " + std::to_string(state.levels) +
                                     " levels do not lead from k = " + std::to_string(state.k) +
                                     " to " + std::to_string(state.experts) + " experts");
  }
  const bool sane = std::isfinite(state.limit) && state.limit > 0 && state.spent >= 0 &&
                    std::isfinite(state.total) && state.spent <= state.total;
  if (!sane) {
    return Fail(Errc::kBadInput, "dynamic K: a limit of " + std::to_string(state.limit) +
                                     ", of which this level spent " + std::to_string(state.spent) +
                                     " and all levels " + std::to_string(state.total));
  }
  return {};
}

void RaiseAhead(DynamicK* state, const FaultCost& cost) {
  if (!state->predict) return;
  while (state->k < state->experts && state->spent + cost(state->k) > state->share()) Raise(state);
}

Status EnterRecovery(DynamicK* state, double plt) {
  if (!std::isfinite(plt) || plt < 0) {
    return Fail(Errc::kUsage, "a recovery that cost a PLT of " + std::to_string(plt));
  }
  state->spent += plt;
  state->total += plt;
  if (state->k < state->experts && state->spent > state->share()) Raise(state);
  return {};
}

std::optional<std::uint64_t> FaultsCovered(const DynamicK& state, const FaultCost& cost) {
  DynamicK level = state;
  double faults = 0;
  while (level.k < level.experts) {
    const double each = cost(level.k);
    const double whole = std::floor((level.share() - level.spent) / each);
    // The fault that exceeds the share is the level's last one, unless it is foreseen.
    faults += std::max(0.0, whole) + (level.predict ? 0 : 1);
    if (!(faults < 0x1p53)) return std::nullopt;
    Raise(&level);
  }
  return static_cast<std::uint64_t>(faults);
}

}  // namespace shardwright::pec
