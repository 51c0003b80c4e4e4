// SPDX-License-Identifier: Apache-2.0
#include "placement/strategy/lazarus.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "placement/strategy/units.h"

namespace shardwright::placement {
namespace {

__extension__ using Wide = unsigned __int128;

// Returns the experts in ascending order of (count, id).
std::vector<std::uint32_t> AscendingCounts(std::span<const std::uint32_t> counts) {
  std::vector<std::uint32_t> order(counts.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return counts[a] < counts[b]; });
  return order;
}

// A plan under construction: replicas, free slots and token counts of the units.
class Filling {
 public:
  Filling(std::span<const std::uint64_t> tokens, std::span<const std::uint32_t> counts,
          std::span<const std::uint64_t> slots, const StopCheck& stop)
      : counts_(counts),
        stop_(stop),
        free_(slots.begin(), slots.end()),
        left_(counts.begin(), counts.end()),
        share_(counts.size(), 0),
        load_(slots.size(), 0),
        holds_(slots.size(), std::vector<bool>(counts.size(), false)) {
    plan_.experts.resize(slots.size());
    for (std::size_t u = 0; u < slots.size(); ++u) plan_.experts[u].reserve(slots[u]);
    for (std::size_t e = 0; e < counts.size(); ++e) {
      if (!tokens.empty()) share_[e] = static_cast<double>(tokens[e]) / counts[e];
    }
  }

  bool fits(std::uint32_t unit) const { return free_[unit] > 0; }
  std::uint64_t free_slots(std::uint32_t unit) const { return free_[unit]; }
  bool holds(std::uint32_t unit, std::uint32_t expert) const { return holds_[unit][expert]; }
  std::uint32_t left(std::uint32_t expert) const { return left_[expert]; }
  std::uint32_t units() const { return static_cast<std::uint32_t>(free_.size()); }
  bool stopped() const { return Stopped(stop_); }

  void Put(std::uint32_t expert, std::uint32_t unit) {
    plan_.experts[unit].push_back(expert);
    holds_[unit][expert] = true;
    load_[unit] += share_[expert];
    --free_[unit];
    --left_[expert];
  }

  // Places the remaining replicas, most tokens per replica first, each on the least loaded unit
  // with a free slot, preferably one without the expert.
  void FillByLoad() {
    std::vector<std::uint32_t> order(counts_.size());
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return share_[a] > share_[b]; });
    for (const std::uint32_t expert : order) {
      while (left_[expert] > 0 && !stopped()) Put(expert, LeastLoaded(expert));
    }
  }

  UnitPlan Take() { return std::move(plan_); }

 private:
  std::uint32_t LeastLoaded(std::uint32_t expert) const {
    std::uint32_t best = units();
    for (std::uint32_t u = 0; u < units(); ++u) {
      if (free_[u] == 0) continue;
      if (best == units() || (holds_[best][expert] && !holds_[u][expert]) ||
          (holds_[best][expert] == holds_[u][expert] && load_[u] < load_[best])) {
        best = u;
      }
    }
    return best;
  }

  std::span<const std::uint32_t> counts_;
  const StopCheck& stop_;
  std::vector<std::uint64_t> free_;
  std::vector<std::uint32_t> left_;
  std::vector<double> share_;  // tokens per replica
  std::vector<double> load_;   // by unit
  std::vector<std::vector<bool>> holds_;
  UnitPlan plan_;
};

// Returns a plan for units that can have all experts: each is on the first `count` units.
UnitPlan NestedPlan(std::span<const std::uint64_t> tokens, std::span<const std::uint32_t> counts,
                    std::span<const std::uint64_t> slots, const StopCheck& stop) {
  Filling filling(tokens, counts, slots, stop);
  for (const std::uint32_t expert : AscendingCounts(counts)) {
    for (std::uint32_t u = 0; u < filling.units() && filling.left(expert) > 0; ++u) {
      filling.Put(expert, u);
    }
  }
  filling.FillByLoad();
  return filling.Take();
}

// Returns the unit with most free slots that lacks the expert, ties to the first after `pointer`.
std::uint32_t Roomiest(const Filling& filling, std::uint32_t expert, std::uint32_t pointer) {
  std::uint32_t best = filling.units();
  for (std::uint32_t i = 0; i < filling.units(); ++i) {
    const std::uint32_t u = (pointer + i) % filling.units();
    if (!filling.fits(u) || filling.holds(u, expert)) continue;
    if (best == filling.units() || filling.free_slots(u) > filling.free_slots(best)) best = u;
  }
  return best;
}

// Deals up to `most` replicas of every expert to distinct units; false if one finds no unit.
bool DealRing(std::span<const std::uint32_t> counts, std::uint32_t most, std::uint32_t* pointer,
              Filling* filling) {
  bool all = true;
  for (const std::uint32_t expert : AscendingCounts(counts)) {
    const std::uint32_t wanted = std::min({counts[expert], most, filling->units()});
    for (std::uint32_t i = counts[expert] - filling->left(expert); i < wanted; ++i) {
      if (filling->stopped()) return all;
      const std::uint32_t unit = Roomiest(*filling, expert, *pointer);
      if (unit == filling->units()) {
        all = false;
        break;
      }
      filling->Put(expert, unit);
      *pointer = (unit + 1) % filling->units();
    }
  }
  return all;
}

}  // namespace

std::vector<std::uint32_t> ReplicaCounts(std::span<const std::uint64_t> tokens, std::uint64_t slots,
                                         std::uint32_t copies_min) {
  const std::vector<std::uint32_t> order = internal::AscendingLoad(tokens);
  std::vector<std::uint32_t> counts(tokens.size(), 0);
  std::uint64_t left = std::accumulate(tokens.begin(), tokens.end(), std::uint64_t{0});
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::uint64_t mine = tokens[order[i]];
    const bool last = i + 1 == order.size();
    const std::uint64_t share =
        last ? slots
             : (left > 0 ? static_cast<std::uint64_t>(Wide{mine} * slots / left)
                         : slots / (order.size() - i));
    const std::uint64_t count = std::max<std::uint64_t>(share, copies_min);
    counts[order[i]] = static_cast<std::uint32_t>(count);
    slots -= count;
    left -= mine;
  }
  return counts;
}

void CapCounts(std::span<const std::uint64_t> tokens, std::uint32_t most,
               std::vector<std::uint32_t>* counts) {
  std::uint64_t excess = 0;
  for (std::uint32_t& count : *counts) {
    excess += count > most ? count - most : 0;
    count = std::min(count, most);
  }
  const std::vector<std::uint32_t> order = internal::AscendingLoad(tokens);
  for (auto at = order.rbegin(); at != order.rend() && excess > 0; ++at) {
    const std::uint64_t more = std::min<std::uint64_t>(excess, most - (*counts)[*at]);
    (*counts)[*at] += static_cast<std::uint32_t>(more);
    excess -= more;
  }
}

UnitPlan OverlapPlan(std::span<const std::uint64_t> tokens, std::span<const std::uint32_t> counts,
                     std::span<const std::uint64_t> slots, const StopCheck& stop) {
  const std::uint64_t group = *std::min_element(slots.begin(), slots.end());
  if (counts.size() <= group) return NestedPlan(tokens, counts, slots, stop);
  Filling filling(tokens, counts, slots, stop);
  const std::vector<std::uint32_t> order = AscendingCounts(counts);
  std::uint32_t unit = 0;
  bool cut = false;
  for (std::size_t first = 0; first < order.size(); first += group) {
    const std::size_t last = std::min<std::size_t>(first + group, order.size());
    const std::uint32_t length = std::min(counts[order[first]], filling.units() - unit);
    cut = cut || length < counts[order[first]];
    for (std::uint32_t i = 0; i < length; ++i, ++unit) {
      for (std::size_t e = first; e < last; ++e) filling.Put(order[e], unit);
    }
  }
  filling.FillByLoad();
  UnitPlan plan = filling.Take();
  plan.cut = cut || *std::max_element(slots.begin(), slots.end()) != group;
  return plan;
}

UnitPlan RingPlan(std::span<const std::uint32_t> counts, std::span<const std::uint64_t> slots,
                  std::uint32_t copies_min, const StopCheck& stop) {
  const auto units = static_cast<std::uint32_t>(slots.size());
  Filling at_once({}, counts, slots, stop);
  std::uint32_t pointer = 0;
  const bool distinct = DealRing(counts, units, &pointer, &at_once);
  Filling in_steps({}, counts, slots, stop);
  if (!distinct) {  // the guaranteed copies first, then others that fit
    pointer = 0;
    DealRing(counts, copies_min, &pointer, &in_steps);
    DealRing(counts, units, &pointer, &in_steps);
  }
  Filling& filling = distinct ? at_once : in_steps;
  filling.FillByLoad();
  UnitPlan plan = filling.Take();
  plan.cut = true;
  return plan;
}

}  // namespace shardwright::placement
