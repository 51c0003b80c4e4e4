// SPDX-License-Identifier: Apache-2.0
#include "partial/select/selection.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <string>
#include <tuple>
#include <utility>

#include "partial/select/budget.h"
#include "support/base/checked.h"
#include "support/base/limits.h"

namespace shardwright::partial {
namespace {

/// Returns the experts of a layer in rounds of one per rank.
std::vector<std::uint32_t> RingOf(std::span<const std::uint32_t> rank, std::uint32_t ep) {
  std::vector<std::uint32_t> seen(ep, 0);
  std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> order;  // round, rank, id
  order.reserve(rank.size());
  for (std::uint32_t e = 0; e < rank.size(); ++e) order.emplace_back(seen[rank[e]]++, rank[e], e);
  std::sort(order.begin(), order.end());
  std::vector<std::uint32_t> ring;
  ring.reserve(rank.size());
  for (const auto& entry : order) ring.push_back(std::get<2>(entry));
  return ring;
}

/// Takes `count` of the experts group[i] = (rank, order), ascending: always
/// from the rank with fewest so far, ties in favor of the first in order.
void TakeEvenly(std::span<const std::pair<std::uint32_t, std::uint32_t>> group, std::size_t count,
                std::vector<std::uint64_t>* rank_count, std::vector<std::uint32_t>* orders) {
  using Head = std::tuple<std::uint64_t, std::uint32_t, std::size_t>;  // count, order, index
  std::priority_queue<Head, std::vector<Head>, std::greater<>> heads;
  for (std::size_t i = 0; i < group.size(); ++i) {
    if (i == 0 || group[i].first != group[i - 1].first) {
      heads.emplace((*rank_count)[group[i].first], group[i].second, i);
    }
  }
  for (; count > 0; --count) {
    const std::size_t i = std::get<2>(heads.top());
    heads.pop();
    orders->push_back(group[i].second);
    const std::uint64_t taken = ++(*rank_count)[group[i].first];
    if (i + 1 < group.size() && group[i + 1].first == group[i].first) {
      heads.emplace(taken, group[i + 1].second, i + 1);
    }
  }
}

Status ValidateOptions(const SelectionOptions& options) {
  if (options.policy != Policy::kSequential && options.policy != Policy::kLoadAware) {
    return {};
  }
  if (options.k_persist == 0) {
    return Fail(Errc::kUsage, "K of the persist level is 0, expected at least 1");
  }
  if (options.k_persist > options.k_snapshot) {
    return Fail(Errc::kUsage, "K of the persist level is ", options.k_persist,
                ", above K of the snapshot level, ", options.k_snapshot);
  }
  return {};
}

}  // namespace

std::string_view Name(Policy policy) {
  switch (policy) {
    case Policy::kSequential:
      return "sequential";
    case Policy::kLoadAware:
      return "load-aware";
    case Policy::kBudget:
      return "budget";
    case Policy::kBudgetGlobal:
      return "budget-global";
    case Policy::kReplay:
      return "gradient-log";
    case Policy::kFull:
      break;
  }
  return "full";
}

Result<ExpertMap> EvenExpertMap(const LayerExperts& experts, std::uint32_t ep) {
  SW_TRY(ValidateExperts(experts));
  PerExpert<std::uint32_t> rank(experts.size());
  for (std::size_t m = 0; m < experts.size(); ++m) {
    if (ep == 0 || experts[m] % ep != 0) {
      return Fail(Errc::kUsage, "MoE layer ", m, ": ", experts[m],
                  " experts cannot be shared evenly by ", ep, " expert-parallel ranks");
    }
    const std::uint32_t per = experts[m] / ep;
    rank[m].reserve(experts[m]);
    for (std::uint32_t e = 0; e < experts[m]; ++e) rank[m].push_back(e / per);
  }
  return MakeExpertMap(std::move(rank), ep);
}

Result<ExpertMap> MakeExpertMap(PerExpert<std::uint32_t> rank, std::uint32_t ep) {
  if (ep == 0 || ep > limits::kRanks) {
    return Fail(ep == 0 ? Errc::kBadInput : Errc::kLimit, ep,
                " expert-parallel ranks, expected 1 to ", limits::kRanks);
  }
  SW_TRY(ValidateExperts(ShapeOf(rank)));
  ExpertMap map{ep, std::move(rank), {}};
  for (std::size_t m = 0; m < map.rank.size(); ++m) {
    for (std::size_t e = 0; e < map.rank[m].size(); ++e) {
      if (map.rank[m][e] >= ep) {
        return Fail(Errc::kBadInput, ExpertName(m, e), ": expert-parallel rank ", map.rank[m][e],
                    ", there are ", ep);
      }
    }
    map.ring.push_back(RingOf(map.rank[m], ep));
  }
  return map;
}

Selection SelectSequential(const ExpertMap& map, const LevelState& state, std::uint32_t k) {
  Selection selection(map.ring.size());
  for (std::size_t m = 0; m < map.ring.size(); ++m) {
    const std::vector<std::uint32_t>& ring = map.ring[m];
    const std::size_t count = std::min<std::size_t>(k, ring.size());
    selection[m].reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      selection[m].push_back(ring[(state.cursor[m] + i) % ring.size()]);
    }
  }
  return selection;
}

Selection SelectLoadAware(const LevelState& state, std::uint32_t k,
                          std::optional<std::uint64_t> max_age) {
  Selection selection(state.tokens.size());
  for (std::size_t m = 0; m < state.tokens.size(); ++m) {
    const std::size_t experts = state.tokens[m].size();
    const std::size_t count = std::min<std::size_t>(k, experts);
    const std::uint64_t age_limit = max_age.value_or(4 * CeilDiv(experts, count));
    // Overdue experts come first, oldest save first. Other experts have equal keys.
    const auto key = [&](std::uint32_t e) {
      const bool overdue = state.age(m, e) > age_limit;
      return std::tuple(!overdue, overdue ? state.saved_at[m][e] : 0, ~state.unsaved(m, e),
                        state.version[m][e], e);
    };
    std::vector<std::uint32_t>& ids = selection[m];
    ids.resize(experts);
    std::iota(ids.begin(), ids.end(), 0U);
    const auto end = ids.begin() + static_cast<std::ptrdiff_t>(count);
    std::partial_sort(ids.begin(), end, ids.end(),
                      [&](std::uint32_t a, std::uint32_t b) { return key(a) < key(b); });
    ids.resize(count);
  }
  return selection;
}

Selection SelectAll(const LayerExperts& experts) {
  Selection selection;
  for (std::uint32_t n : experts) {
    std::vector<std::uint32_t>& layer = selection.emplace_back(n);
    std::iota(layer.begin(), layer.end(), 0U);
  }
  return selection;
}

Selection SelectPersist(const ExpertMap& map, const LevelState& persist, const Selection& snapshot,
                        std::uint32_t k_persist) {
  std::vector<std::uint64_t> rank_count(map.ep, 0);
  Selection selection(snapshot.size());
  std::vector<std::tuple<std::uint64_t, std::uint32_t, std::uint32_t>> sorted;  // version, rank, i
  std::vector<std::pair<std::uint32_t, std::uint32_t>> group;
  std::vector<std::uint32_t> orders;
  for (std::size_t m = 0; m < snapshot.size(); ++m) {
    sorted.clear();
    for (std::uint32_t i = 0; i < snapshot[m].size(); ++i) {
      const std::uint32_t e = snapshot[m][i];
      sorted.emplace_back(persist.version[m][e], map.rank[m][e], i);
    }
    std::sort(sorted.begin(), sorted.end());
    orders.clear();
    std::size_t left = std::min<std::size_t>(k_persist, sorted.size());
    for (std::size_t first = 0; left > 0;) {
      group.clear();
      std::size_t last = first;
      for (; last < sorted.size() && std::get<0>(sorted[last]) == std::get<0>(sorted[first]);
           ++last) {
        group.emplace_back(std::get<1>(sorted[last]), std::get<2>(sorted[last]));
      }
      const std::size_t count = std::min(left, group.size());
      TakeEvenly(group, count, &rank_count, &orders);
      left -= count;
      first = last;
    }
    for (std::uint32_t i : orders) selection[m].push_back(snapshot[m][i]);
  }
  return selection;
}

Result<TwoLevelSelection> SelectTwoLevels(const ExpertMap& map, const LevelState& snapshot,
                                          const LevelState& persist,
                                          const SelectionOptions& options) {
  SW_TRY(ValidateOptions(options));
  const LayerExperts experts = map.experts();
  if (auto fits = Validate(snapshot, experts); !fits) {
    return Within("snapshot level", std::move(fits).error());
  }
  if (auto fits = Validate(persist, experts); !fits) {
    return Within("persist level", std::move(fits).error());
  }
  TwoLevelSelection chosen;
  switch (options.policy) {
    case Policy::kSequential:
      chosen.snapshot = SelectSequential(map, snapshot, options.k_snapshot);
      break;
    case Policy::kLoadAware:
      chosen.snapshot = SelectLoadAware(snapshot, options.k_snapshot, options.max_age);
      break;
    case Policy::kBudget:
    case Policy::kBudgetGlobal: {
      const auto choose = options.policy == Policy::kBudget ? SelectByLayerShares : SelectGlobally;
      SW_TRY_ASSIGN(BudgetSelection budget,
                    choose(Unsaved(persist), persist.version, options.budget));
      chosen.snapshot = std::move(budget.selected);
      chosen.persist = chosen.snapshot;
      return chosen;
    }
    case Policy::kReplay: {
      SW_TRY_ASSIGN(TransferPlan plan,
                    SelectReplay(map, snapshot.cursor,
                                 ChainStarts(snapshot, persist, options.replay.logged_since),
                                 options.k_snapshot, options.replay));
      chosen.snapshot = std::move(plan.full);
      chosen.persist = chosen.snapshot;
      return chosen;
    }
    case Policy::kFull:
      chosen.snapshot = SelectAll(experts);
      chosen.persist = chosen.snapshot;
      return chosen;
  }
  chosen.persist = SelectPersist(map, persist, chosen.snapshot, options.k_persist);
  return chosen;
}

}  // namespace shardwright::partial
