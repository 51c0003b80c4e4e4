// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

#include "placement/recovery/recovery.h"
#include "placement/strategy/lazarus.h"
#include "placement/strategy/units.h"

namespace shardwright::placement {
namespace {

using internal::Holders;

constexpr std::uint32_t kTableUnits = 16;         // 2^16 failure sets are compared at once
constexpr std::uint64_t kTableSwaps = 40'000;     // swaps tried per plan with few units
constexpr std::uint64_t kSmallestSwaps = 50'000;  // swaps tried per plan with more units

void Swap(UnitPlan* plan, std::uint32_t a, std::size_t i, std::uint32_t b, std::size_t j) {
  std::swap(plan->experts[a][i], plan->experts[b][j]);
}

// Stores all failure sets of few units as bits, grouped by size: size k is words [begin[k],
// begin[k + 1]), padded with zeros. The failure sets that lose a set of units are the conjunction
// of the variables of its units.
class FailureTable {
 public:
  explicit FailureTable(std::uint32_t units) : units_(units) {
    std::vector<std::vector<std::uint32_t>> layers(units + std::size_t{1});
    for (std::uint32_t f = 0; f < (1U << units); ++f) {
      layers[static_cast<std::size_t>(std::popcount(f))].push_back(f);
    }
    begin_.push_back(0);
    for (const auto& layer : layers) begin_.push_back(begin_.back() + (layer.size() + 63) / 64);
    variables_.assign(units, std::vector<std::uint64_t>(begin_.back(), 0));
    for (std::size_t k = 0; k < layers.size(); ++k) {
      for (std::size_t i = 0; i < layers[k].size(); ++i) {
        for (std::uint32_t u = 0; u < units; ++u) {
          if ((layers[k][i] >> u & 1U) == 0) continue;
          variables_[u][begin_[k] + i / 64] |= std::uint64_t{1} << (i % 64);
        }
      }
    }
  }

  std::size_t words() const { return begin_.back(); }
  std::size_t layer_begin(std::size_t k) const { return begin_[k]; }
  std::size_t layer_count() const { return begin_.size() - 1; }

  std::vector<std::uint32_t> Members(const UnitSet& set) const {
    std::vector<std::uint32_t> members;
    for (std::uint32_t u = 0; u < units_; ++u) {
      if (set.Has(u)) members.push_back(u);
    }
    SW_CHECK(!members.empty());
    return members;
  }

  // Returns the failure sets of word `w` that lose all of these units.
  std::uint64_t Lost(const std::vector<std::uint32_t>& members, std::size_t w) const {
    std::uint64_t lost = ~std::uint64_t{0};
    for (const std::uint32_t u : members) lost &= variables_[u][w];
    return lost;
  }

 private:
  std::uint32_t units_;
  std::vector<std::size_t> begin_;
  std::vector<std::vector<std::uint64_t>> variables_;  // [unit][word]
};

// Searches swaps for the best improvement, with the whole table of failure sets.
class TableSearch {
 public:
  TableSearch(UnitPlan* plan, std::uint32_t expert_count)
      : plan_(plan),
        expert_count_(expert_count),
        table_(static_cast<std::uint32_t>(plan->experts.size())) {}

  void Run(const StopCheck& stop) {
    while (looked_ < kTableSwaps && !Stopped(stop) && Step()) {
    }
  }

  std::vector<std::uint64_t> LostBySize() {
    Load();
    return best_;
  }

 private:
  struct Candidate {
    std::uint32_t a = 0;
    std::uint32_t b = 0;
    std::size_t i = 0;
    std::size_t j = 0;
  };

  // Computes the failure sets that lose at least one, two or three experts.
  void Load() {
    const Holders holders(*plan_, expert_count_);
    lost_.resize(expert_count_);
    for (auto& layer : planes_) layer.assign(table_.words(), 0);
    for (std::uint32_t e = 0; e < expert_count_; ++e) {
      const std::vector<std::uint32_t> members = table_.Members(holders.sets[e]);
      lost_[e].resize(table_.words());
      for (std::size_t w = 0; w < table_.words(); ++w) {
        lost_[e][w] = table_.Lost(members, w);
        planes_[2][w] |= planes_[1][w] & lost_[e][w];
        planes_[1][w] |= planes_[0][w] & lost_[e][w];
        planes_[0][w] |= lost_[e][w];
      }
    }
    best_.assign(table_.layer_count(), 0);
    for (std::size_t k = 0; k < best_.size(); ++k) {
      for (std::size_t w = table_.layer_begin(k); w < table_.layer_begin(k + 1); ++w) {
        best_[k] += static_cast<std::uint64_t>(std::popcount(planes_[0][w]));
      }
    }
  }

  bool Step() {
    Load();
    const Holders holders(*plan_, expert_count_);
    bool found = false;
    Candidate chosen;
    for (std::uint32_t a = 0; a < plan_->experts.size(); ++a) {
      for (std::uint32_t b = a + 1; b < plan_->experts.size(); ++b) {
        for (std::size_t i = 0; i < plan_->experts[a].size(); ++i) {
          for (std::size_t j = 0; j < plan_->experts[b].size(); ++j) {
            if (looked_ >= kTableSwaps) break;
            if (!Better(holders, plan_->experts[a][i], plan_->experts[b][j], a, b)) continue;
            found = true;
            chosen = {a, b, i, j};
          }
        }
      }
    }
    if (found) Swap(plan_, chosen.a, chosen.i, chosen.b, chosen.j);
    return found;
  }

  // Returns true if swapping gives a better vector than best_, and stores it in best_.
  bool Better(const Holders& holders, std::uint32_t x, std::uint32_t y, std::uint32_t a,
              std::uint32_t b) {
    if (x == y || (holders.count[b][x] > 0 && holders.count[a][y] > 0 && holders.count[a][x] > 1 &&
                   holders.count[b][y] > 1)) {
      return false;
    }
    ++looked_;
    const std::vector<std::uint32_t> x_units = table_.Members(holders.Moved(x, a, b));
    const std::vector<std::uint32_t> y_units = table_.Members(holders.Moved(y, b, a));
    std::vector<std::uint64_t>& counts = counts_;
    counts.assign(table_.layer_count(), 0);
    bool ahead = false;
    for (std::size_t k = 0; k < table_.layer_count(); ++k) {
      for (std::size_t w = table_.layer_begin(k); w < table_.layer_begin(k + 1); ++w) {
        const std::uint64_t both = lost_[x][w] & lost_[y][w];
        const std::uint64_t either = lost_[x][w] | lost_[y][w];
        const std::uint64_t others =
            planes_[2][w] | (planes_[1][w] & ~both) | (planes_[0][w] & ~either);
        counts[k] += static_cast<std::uint64_t>(
            std::popcount(others | table_.Lost(x_units, w) | table_.Lost(y_units, w)));
      }
      if (!ahead && counts[k] > best_[k]) return false;
      ahead = ahead || counts[k] < best_[k];
    }
    if (ahead) std::swap(best_, counts);
    return ahead;
  }

  UnitPlan* plan_;
  std::uint32_t expert_count_;
  FailureTable table_;
  std::uint64_t looked_ = 0;
  std::vector<std::vector<std::uint64_t>> lost_;  // [expert][word]
  std::vector<std::uint64_t> planes_[3];
  std::vector<std::uint64_t> best_;  // lost failure sets by size, best found
  std::vector<std::uint64_t> counts_;
};

// Tracks for many units the size of the smallest sets and the number of different ones, which
// determine the first size of failures with a loss.
class SmallestSets {
 public:
  explicit SmallestSets(const std::vector<UnitSet>& sets) {
    for (const UnitSet& set : sets) Add(set, 1);
  }

  void Add(const UnitSet& set, int times) {
    auto& family = families_[set.size()];
    const std::vector<std::uint64_t> key(set.words().begin(), set.words().end());
    int& count = family[key];
    count += times;
    if (count == 0) family.erase(key);
    if (family.empty()) families_.erase(set.size());
  }

  // Returns size and negated count of the smallest sets, then of the next. Greater is better.
  std::vector<std::int64_t> Score() const {
    std::vector<std::int64_t> score;
    for (const auto& [size, family] : families_) {
      score.push_back(size);
      score.push_back(-static_cast<std::int64_t>(family.size()));
      if (score.size() == 4) break;
    }
    return score;
  }

  std::uint32_t smallest() const { return families_.begin()->first; }

  // Returns false if replacing a set of the smallest size by `next`, and one of size `other` by
  // one of size `other_next`, cannot raise the score.
  bool MayRaise(const UnitSet& next, std::uint32_t other, std::uint32_t other_next) const {
    const auto second = std::next(families_.begin());
    const std::uint32_t bound = second == families_.end() ? ~0U : second->first;
    if (next.size() != smallest() || other <= bound || other_next <= bound) return true;
    const auto& family = families_.begin()->second;
    return family.contains({next.words().begin(), next.words().end()});
  }

 private:
  std::map<std::uint32_t, std::map<std::vector<std::uint64_t>, int>> families_;
};

// Tries to give each expert of a smallest set another unit, or the units of another smallest set.
void ImproveSmallest(UnitPlan* plan, std::uint32_t expert_count, const StopCheck& stop) {
  Holders holders(*plan, expert_count);
  SmallestSets sets(holders.sets);
  std::vector<std::int64_t> best = sets.Score();
  std::uint64_t looked = 0;
  const auto units = static_cast<std::uint32_t>(plan->experts.size());
  bool improved = true;
  while (improved) {
    improved = false;
    for (std::uint32_t a = 0; a < units; ++a) {
      for (std::size_t i = 0; i < plan->experts[a].size(); ++i) {
        if (Stopped(stop)) return;
        if (holders.sets[plan->experts[a][i]].size() != sets.smallest()) continue;
        for (std::uint32_t b = 0; b < units; ++b) {
          for (std::size_t j = 0; a != b && j < plan->experts[b].size(); ++j) {
            const std::uint32_t x = plan->experts[a][i];
            const std::uint32_t y = plan->experts[b][j];
            if (x == y) continue;
            if (++looked > kSmallestSwaps) return;
            const UnitSet new_x = holders.Moved(x, a, b);
            const UnitSet new_y = holders.Moved(y, b, a);
            if (new_x.size() < sets.smallest() || new_y.size() < sets.smallest()) continue;
            if (!sets.MayRaise(new_x, holders.sets[y].size(), new_y.size())) continue;
            sets.Add(holders.sets[x], -1);
            sets.Add(holders.sets[y], -1);
            sets.Add(new_x, 1);
            sets.Add(new_y, 1);
            std::vector<std::int64_t> score = sets.Score();
            if (score > best) {
              best = std::move(score);
              --holders.count[a][x], ++holders.count[b][x];
              --holders.count[b][y], ++holders.count[a][y];
              holders.sets[x] = new_x;
              holders.sets[y] = new_y;
              Swap(plan, a, i, b, j);
              improved = true;
            } else {
              sets.Add(new_x, -1);
              sets.Add(new_y, -1);
              sets.Add(holders.sets[x], 1);
              sets.Add(holders.sets[y], 1);
            }
          }
        }
      }
    }
  }
}

// Returns true if `a` survives more than `b`, fewest failures first.
bool SurvivesMore(UnitPlan* a, UnitPlan* b, std::uint32_t expert_count, const StopCheck& stop) {
  const auto units = static_cast<std::uint32_t>(a->experts.size());
  if (units <= kTableUnits) {
    return TableSearch(a, expert_count).LostBySize() < TableSearch(b, expert_count).LostBySize();
  }
  const Holders of_a(*a, expert_count);
  const Holders of_b(*b, expert_count);
  const auto score_a = SmallestSets(of_a.sets).Score();
  const auto score_b = SmallestSets(of_b.sets).Score();
  if (score_a[0] != score_b[0] || score_a[1] != score_b[1]) return score_a > score_b;
  RecoveryOptions options;
  options.stop = stop;
  const RecoveryProbability recovery_a = SolveRecovery(of_a.sets, units, options);
  const RecoveryProbability recovery_b = SolveRecovery(of_b.sets, units, options);
  return recovery_a.exact() && recovery_b.exact() && recovery_a.lost < recovery_b.lost;
}

}  // namespace

void RepairBySwaps(UnitPlan* plan, std::uint32_t expert_count, const StopCheck& stop) {
  if (plan->experts.size() <= kTableUnits) {
    TableSearch(plan, expert_count).Run(stop);
  } else {
    ImproveSmallest(plan, expert_count, stop);
  }
}

UnitPlan RecoveryPlan(std::span<const std::uint64_t> tokens, std::span<const std::uint32_t> counts,
                      std::span<const std::uint64_t> slots, std::uint32_t copies_min,
                      const StopCheck& stop) {
  UnitPlan plan = OverlapPlan(tokens, counts, slots, stop);
  if (!plan.cut || Stopped(stop)) return plan;
  const auto expert_count = static_cast<std::uint32_t>(counts.size());
  UnitPlan ring = RingPlan(counts, slots, copies_min, stop);
  if (Stopped(stop)) return plan;
  RepairBySwaps(&plan, expert_count, stop);
  RepairBySwaps(&ring, expert_count, stop);
  if (Stopped(stop)) return plan;
  const Holders holders(plan, expert_count);
  const bool keeps = std::all_of(holders.sets.begin(), holders.sets.end(),
                                 [&](const UnitSet& set) { return set.size() >= copies_min; });
  return keeps && !SurvivesMore(&ring, &plan, expert_count, stop) ? plan : ring;
}

}  // namespace shardwright::placement
