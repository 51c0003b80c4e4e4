// SPDX-License-Identifier: Apache-2.0
#include "partial/select/catch_up.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "partial/select/selection.h"
#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

Status Check(const ReplayPoint& point, std::uint32_t k) {
  if (point.model == nullptr) {
    return Fail(Errc::kUsage,
                "policy gradient-log requires model sizes and gradients from a running trainer");
  }
  if (point.interval == 0 || point.interval > point.iteration || k == 0) {
    return Fail(Errc::kUsage, "policy gradient-log: iteration ", point.iteration, ", ",
                point.interval, " iterations after the previous checkpoint, K = ", k,
                ": expected 1 or more for K, and an interval from 1 to the iteration");
  }
  return {};
}

/// Part of a budget that is left for experts.
struct ExpertsShare {
  std::uint64_t bytes = 1;       ///< per iteration; at least 1, because 0 means no budget
  std::uint64_t over_bytes = 0;  ///< per interval, by which the non-expert part exceeds the budget
};

Result<ExpertsShare> BudgetOfExperts(const ReplayPoint& point) {
  std::uint64_t nonexpert = 0;
  for (const ComponentBytes& one : point.model->nonexpert) {
    SW_TRY_ASSIGN(const std::uint64_t bytes, TotalBytes(one));
    SW_TRY_ASSIGN(nonexpert, CheckedAdd(nonexpert, bytes));
  }
  SW_TRY_ASSIGN(const std::uint64_t all, CheckedMul(point.budget_bytes, point.interval));
  if (all <= nonexpert) return ExpertsShare{1, nonexpert - all};
  return ExpertsShare{std::max<std::uint64_t>((all - nonexpert) / point.interval, 1), 0};
}

/// Moves the longest chains of each layer from gradients to states, until it has k states.
Status FillToK(const ExpertMap& map, const std::vector<std::uint64_t>& cursor,
               const Counts& version, std::uint32_t k, const ReplayPoint& point,
               TransferPlan* plan) {
  for (std::size_t m = 0; m < map.ring.size(); ++m) {
    std::vector<std::uint32_t>& full = plan->full[m];
    std::vector<std::uint32_t>& gradients = plan->gradients[m];
    if (full.size() >= k) continue;
    const std::vector<std::uint32_t>& ring = map.ring[m];
    std::vector<std::tuple<std::uint64_t, std::size_t, std::uint32_t>> order;  // version, position
    for (std::size_t i = 0; i < ring.size(); ++i) {
      const std::uint32_t e = ring[(cursor[m] + i) % ring.size()];
      if (std::binary_search(gradients.begin(), gradients.end(), e)) {
        order.emplace_back(version[m][e], i, e);
      }
    }
    std::sort(order.begin(), order.end());
    order.resize(std::min<std::size_t>(order.size(), k - full.size()));
    for (const auto& [from, place, e] : order) {
      full.push_back(e);
      std::erase(gradients, e);
      const ComponentBytes& bytes = point.model->expert[m][e];
      SW_TRY_ASSIGN(const std::uint64_t state, TotalBytes(bytes));
      SW_TRY_ASSIGN(plan->full_bytes, CheckedAdd(plan->full_bytes, state));
      plan->gradient_bytes -= LogBytes(bytes) * point.interval;
    }
  }
  return {};
}

}  // namespace

Counts ChainStarts(const LevelState& snapshot, const LevelState& persist,
                   std::optional<std::uint64_t> logged_since) {
  std::uint64_t stored = 0;
  for (const auto& layer : persist.version) {
    for (const std::uint64_t version : layer) stored = std::max(stored, version);
  }
  Counts starts = persist.version;
  for (std::size_t m = 0; m < starts.size(); ++m) {
    for (std::size_t e = 0; e < starts[m].size(); ++e) {
      const bool bridged = logged_since && starts[m][e] >= *logged_since;
      if (bridged && snapshot.version[m][e] > stored) starts[m][e] = snapshot.version[m][e];
    }
  }
  return starts;
}

Result<TransferPlan> SelectReplay(const ExpertMap& map, const std::vector<std::uint64_t>& cursor,
                                  const Counts& version, std::uint32_t k,
                                  const ReplayPoint& point) {
  SW_TRY(Check(point, k));
  const LayerExperts experts = map.experts();
  SW_TRY(ValidateShape(version, experts, "versions"));
  const std::uint64_t before = point.iteration - point.interval;
  // Transfers count iterations from 1, versions from 0.
  GradientChains chains = GradientChains::Make(experts);
  for (std::size_t m = 0; m < experts.size(); ++m) {
    for (std::uint32_t e = 0; e < experts[m]; ++e) {
      const std::uint64_t from = version[m][e];
      if (!point.logged_since || from < *point.logged_since || from > before) continue;
      chains.last[m][e] = before + 1;
      chains.steps[m][e] = before - from;
    }
  }
  GradientOptions options;
  options.rule = point.budget_bytes > 0 ? GradientRule::kLeast : GradientRule::kFewest;
  options.interval = point.interval;
  options.full_every = point.full_every;
  options.as_logged = true;
  ExpertsShare share;
  if (point.budget_bytes > 0) {
    SW_TRY_ASSIGN(share, BudgetOfExperts(point));
    options.budget_bytes = share.bytes;
  }
  SW_TRY_ASSIGN(TransferPlan plan, PlanTransfers(chains, point.model->expert, SelectAll(experts),
                                                 point.iteration + 1, options));
  plan.iteration = point.iteration;
  SW_TRY_ASSIGN(plan.over_bytes, CheckedAdd(plan.over_bytes, share.over_bytes));
  if (point.budget_bytes == 0) SW_TRY(FillToK(map, cursor, version, k, point, &plan));
  return plan;
}

}  // namespace shardwright::partial
