// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "placement/recovery/recovery.h"
#include "placement/strategy/lazarus.h"
#include "placement/strategy/units.h"

namespace shardwright::placement {
namespace {

using internal::Holders;

constexpr std::size_t kTries = 64;  // limit of recovery computations per step

// Returns the mean over all numbers of failures; nothing if no cheap exact method applies.
std::optional<double> MeanSurvived(const std::vector<UnitSet>& sets, std::uint32_t units,
                                   const StopCheck& stop) {
  RecoveryOptions options;
  options.frontier_max = 1024;
  options.enumeration_max = 2000;
  options.samples = 1;
  options.failures_max = 32;
  options.stop = stop;
  const RecoveryProbability recovery = SolveRecovery(sets, units, options);
  if (!recovery.exact()) return std::nullopt;
  const double sum = std::accumulate(recovery.survived.begin(), recovery.survived.end(), 0.0);
  return sum / static_cast<double>(recovery.survived.size());
}

class Balancer {
 public:
  Balancer(std::span<const std::uint64_t> tokens, std::uint32_t copies_min, double loss,
           UnitPlan* plan, const StopCheck& stop)
      : plan_(plan),
        stop_(stop),
        copies_min_(copies_min),
        holders_(*plan, static_cast<std::uint32_t>(tokens.size())),
        share_(tokens.size(), 0),
        load_(plan->experts.size(), 0),
        watch_recovery_(loss < 1) {
    std::vector<std::uint32_t> counts(tokens.size(), 0);
    for (const auto& experts : plan->experts) {
      for (const std::uint32_t e : experts) ++counts[e];
    }
    for (std::size_t e = 0; e < share_.size(); ++e) {
      share_[e] = static_cast<double>(tokens[e]) / std::max(counts[e], 1U);
    }
    for (std::size_t u = 0; u < load_.size(); ++u) {
      for (const std::uint32_t e : plan->experts[u]) load_[u] += share_[e];
    }
    if (watch_recovery_) {
      const auto now = MeanSurvived(holders_.sets, units(), stop_);
      possible_ = now.has_value();
      least_ = now.value_or(0) - loss;
    }
  }

  void Run() {
    std::size_t steps = 0;
    for (const auto& experts : plan_->experts) steps += experts.size();
    for (; possible_ && steps > 0 && !Stopped(stop_) && Step(); --steps) {
    }
  }

 private:
  struct Candidate {
    double peak = 0;  // larger relative load of the two units afterwards
    std::uint32_t unit = 0;
    std::size_t i = 0;
    std::size_t j = 0;
  };

  std::uint32_t units() const { return static_cast<std::uint32_t>(load_.size()); }

  // Returns the load per slot, since units with more slots should have more load.
  double Relative(std::uint32_t u, double load) const {
    return load / static_cast<double>(std::max<std::size_t>(plan_->experts[u].size(), 1));
  }

  bool Step() {
    std::uint32_t top = 0;
    for (std::uint32_t u = 1; u < units(); ++u) {
      if (Relative(u, load_[u]) > Relative(top, load_[top])) top = u;
    }
    std::vector<Candidate> candidates = Candidates(top);
    std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
      if (a.peak != b.peak) return a.peak < b.peak;
      return std::tie(a.unit, a.i, a.j) < std::tie(b.unit, b.i, b.j);
    });
    std::size_t tries = kTries;
    for (const Candidate& candidate : candidates) {
      const std::uint32_t x = plan_->experts[top][candidate.i];
      const std::uint32_t y = plan_->experts[candidate.unit][candidate.j];
      UnitSet new_x = holders_.Moved(x, top, candidate.unit);
      UnitSet new_y = holders_.Moved(y, candidate.unit, top);
      if (new_x.size() < std::min(copies_min_, holders_.sets[x].size())) continue;
      if (new_y.size() < std::min(copies_min_, holders_.sets[y].size())) continue;
      if (tries-- == 0) return false;
      if (!Accept(x, y, &new_x, &new_y)) continue;
      Apply(top, candidate, x, y);
      return true;
    }
    return false;
  }

  std::vector<Candidate> Candidates(std::uint32_t top) const {
    std::vector<Candidate> candidates;
    const double peak = Relative(top, load_[top]);
    for (std::uint32_t u = 0; u < units() && !Stopped(stop_); ++u) {
      if (u == top) continue;
      for (std::size_t i = 0; i < plan_->experts[top].size(); ++i) {
        for (std::size_t j = 0; j < plan_->experts[u].size(); ++j) {
          const double moved = share_[plan_->experts[top][i]] - share_[plan_->experts[u][j]];
          if (moved <= 0) continue;
          const double after =
              std::max(Relative(top, load_[top] - moved), Relative(u, load_[u] + moved));
          if (after < peak * (1 - 1e-12)) candidates.push_back({after, u, i, j});
        }
      }
    }
    return candidates;
  }

  // Applies the new sets if the recovery probability stays high enough.
  bool Accept(std::uint32_t x, std::uint32_t y, UnitSet* new_x, UnitSet* new_y) {
    std::swap(holders_.sets[x], *new_x);
    std::swap(holders_.sets[y], *new_y);
    if (!watch_recovery_) return true;
    const auto now = MeanSurvived(holders_.sets, units(), stop_);
    if (now && *now >= least_) return true;
    std::swap(holders_.sets[x], *new_x);
    std::swap(holders_.sets[y], *new_y);
    return false;
  }

  void Apply(std::uint32_t top, const Candidate& candidate, std::uint32_t x, std::uint32_t y) {
    const double moved = share_[x] - share_[y];
    load_[top] -= moved;
    load_[candidate.unit] += moved;
    --holders_.count[top][x];
    ++holders_.count[candidate.unit][x];
    --holders_.count[candidate.unit][y];
    ++holders_.count[top][y];
    std::swap(plan_->experts[top][candidate.i], plan_->experts[candidate.unit][candidate.j]);
  }

  UnitPlan* plan_;
  const StopCheck& stop_;
  std::uint32_t copies_min_;
  Holders holders_;
  std::vector<double> share_;  // tokens per replica
  std::vector<double> load_;
  bool watch_recovery_;
  bool possible_ = true;
  double least_ = 0;
};

}  // namespace

void BalanceUnits(std::span<const std::uint64_t> tokens, std::uint32_t copies_min, double loss,
                  UnitPlan* plan, const StopCheck& stop) {
  Balancer(tokens, copies_min, loss, plan, stop).Run();
}

}  // namespace shardwright::placement
