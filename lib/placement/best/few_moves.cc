// SPDX-License-Identifier: Apache-2.0
#include "placement/best/few_moves_internal.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "placement/best/replicas_internal.h"
#include "placement/best/search_internal.h"

namespace shardwright::placement::internal {
namespace {

/// Slots of a layer.
struct State {
  std::vector<std::int32_t> slots;
  std::uint64_t key = 0;  ///< equal for the same experts on the same devices
};

/// A change of a state: one expert in place of another, or a swap.
struct Change {
  double peak = 0;
  double excess = 0;  ///< tokens of all devices above the goal
  std::uint64_t key = 0;
  std::size_t slot = 0;
  std::int32_t expert = 0;       ///< its new expert
  std::size_t other_slot = 0;    ///< of a swap; equal to `slot` otherwise
  std::uint64_t from_moves = 0;  ///< of the state that it changes
  std::size_t from = 0;          ///< index of that state

  auto by_peak() const { return std::tie(peak, excess, key); }
  auto by_excess() const { return std::tie(excess, peak, key); }
};

/// Evaluates changes of one state at a time.
class Expansion {
 public:
  Expansion(const SearchGround& ground, const WindowShares& shares,
            std::span<const std::uint8_t> held, double goal)
      : ground_(ground), shares_(shares), held_(held), goal_(goal), replicas_(ground, shares) {
    for (std::uint32_t d = 0; d < ground.size(); ++d) {
      device_of_.insert(device_of_.end(), ground.slots[d], d);
    }
  }

  std::uint64_t KeyOf(std::span<const std::int32_t> slots) const {
    std::uint64_t key = 0;
    for (std::size_t s = 0; s < slots.size(); ++s) key ^= Mark(device_of_[s], slots[s]);
    return key;
  }

  /// Calls add(change, cost) for each change of a state that costs moves.
  template <class Add>
  void ForChanges(const State& state, const Add& add) {
    Load(state);
    const std::size_t slot_count = state.slots.size();
    for (std::size_t s = 0; s < slot_count; ++s) {
      const std::uint32_t d = device_of_[s];
      if (state.slots[s] == kNoExpert) continue;
      const auto y = static_cast<std::uint32_t>(state.slots[s]);
      const auto replace = [&](std::uint32_t z) {
        if (z == y || replicas_.count(y) < 2 || !replicas_.Fits(d, z)) return;
        const int cost = CostOf(d, z) - CostOf(d, y);
        if (cost > 0) add(Replaced(state, s, y, z), cost);
      };
      if (d == busiest_) {
        for (std::uint32_t z = 0; z < replicas_.experts(); ++z) replace(z);
        for (std::size_t other = 0; other < slot_count; ++other) {
          const std::uint32_t b = device_of_[other];
          if (b == d || state.slots[other] == kNoExpert) continue;
          const auto x = static_cast<std::uint32_t>(state.slots[other]);
          if (x == y || !replicas_.Fits(d, x) || !replicas_.Fits(b, y)) continue;
          const int cost = CostOf(d, x) + CostOf(b, y) - CostOf(d, y) - CostOf(b, x);
          if (cost > 0) add(Swapped(state, s, other, y, x), cost);
        }
      } else {
        for (const std::uint32_t z : on_busiest_) replace(z);
      }
    }
  }

 private:
  double& LoadAt(std::uint32_t w, std::uint32_t d) {
    return load_[std::size_t{w} * ground_.size() + d];
  }
  int CostOf(std::uint32_t d, std::uint32_t e) const {
    return held_[std::size_t{d} * replicas_.experts() + e] != 0 ? 0 : 1;
  }
  std::uint64_t Mark(std::uint32_t d, std::int32_t expert) const {
    std::uint64_t x =
        std::uint64_t{d} * (replicas_.experts() + 1) + static_cast<std::uint64_t>(expert + 1);
    x = (x + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  void Load(const State& state) {
    replicas_.Clear();
    for (std::size_t s = 0; s < state.slots.size(); ++s) {
      if (state.slots[s] == kNoExpert) continue;
      replicas_.Add(static_cast<std::uint32_t>(state.slots[s]), device_of_[s]);
    }
    load_.assign(std::size_t{shares_.count()} * ground_.size(), 0);
    for (std::uint32_t w = 0; w < shares_.count(); ++w) {
      for (std::uint32_t e = 0; e < replicas_.experts(); ++e) {
        for (const std::uint32_t d : replicas_.holders(e)) {
          LoadAt(w, d) += replicas_.Share(w, e) / ground_.speed[d];
        }
      }
    }
    excess_ = 0;
    for (const double load : load_) excess_ += std::max(load - goal_, 0.0);
    by_load_.resize(load_.size());
    for (std::uint32_t i = 0; i < by_load_.size(); ++i) by_load_[i] = i;
    std::sort(by_load_.begin(), by_load_.end(), [&](std::uint32_t a, std::uint32_t b) {
      return load_[a] != load_[b] ? load_[a] > load_[b] : a < b;
    });
    changed_.assign(load_.size(), 0);
    busiest_ = by_load_[0] % ground_.size();
    on_busiest_.clear();
    for (std::uint32_t e = 0; e < replicas_.experts(); ++e) {
      if (replicas_.Holds(busiest_, e)) on_busiest_.push_back(e);
    }
  }

  /// Adds tokens to a device in a window, for the change that is evaluated. Call it once per
  /// device.
  void Shift(std::uint32_t w, std::uint32_t d, double more) {
    const auto row = static_cast<std::uint32_t>(std::size_t{w} * ground_.size() + d);
    changed_[row] = 1;
    rows_.push_back({row, more / ground_.speed[d]});
  }

  /// Returns the change with its peak and excess, from the tokens that Shift has collected.
  Change Evaluated(Change change) {
    change.excess = excess_;
    for (const auto& [row, more] : rows_) {
      const double load = load_[row] + more;
      change.peak = std::max(change.peak, load);
      change.excess += std::max(load - goal_, 0.0) - std::max(load_[row] - goal_, 0.0);
    }
    const auto same = std::find_if(by_load_.begin(), by_load_.end(),
                                   [&](std::uint32_t row) { return changed_[row] == 0; });
    if (same != by_load_.end()) change.peak = std::max(change.peak, load_[*same]);
    for (const auto& [row, more] : rows_) changed_[row] = 0;
    rows_.clear();
    return change;
  }

  Change Replaced(const State& state, std::size_t slot, std::uint32_t y, std::uint32_t z) {
    const std::uint32_t device = device_of_[slot];
    replicas_.ForReplaced(device, y, z, [this](auto... shift) { Shift(shift...); });
    const auto expert = static_cast<std::int32_t>(z);
    const std::uint64_t key = state.key ^ Mark(device, state.slots[slot]) ^ Mark(device, expert);
    return Evaluated({0, 0, key, slot, expert, slot});
  }

  Change Swapped(const State& state, std::size_t slot, std::size_t other, std::uint32_t y,
                 std::uint32_t x) {
    const std::uint32_t a = device_of_[slot];
    const std::uint32_t b = device_of_[other];
    replicas_.ForSwapped(a, y, b, x, [this](auto... shift) { Shift(shift...); });
    const std::uint64_t key = state.key ^ Mark(a, state.slots[slot]) ^ Mark(a, state.slots[other]) ^
                              Mark(b, state.slots[other]) ^ Mark(b, state.slots[slot]);
    return Evaluated({0, 0, key, slot, state.slots[other], other});
  }

  const SearchGround& ground_;
  const WindowShares& shares_;
  std::span<const std::uint8_t> held_;
  double goal_;
  Replicas replicas_;
  std::vector<std::uint32_t> device_of_;  // by slot
  std::vector<double> load_;              // [window][device]
  std::vector<std::uint32_t> by_load_;    // rows of load_, largest first
  std::vector<std::uint8_t> changed_;     // [window][device]: of the change that is evaluated
  std::vector<std::pair<std::uint32_t, double>> rows_;  // changed ones, with their difference
  std::uint32_t busiest_ = 0;                           // every change involves this device
  std::vector<std::uint32_t> on_busiest_;
  double excess_ = 0;
};

/// The best changes that lead to one number of moves: half of them by the peak, and half by the
/// excess, because several moves together may lower the peak.
class Beam {
 public:
  void Add(const Change& change, std::size_t width) {
    Insert(
        change, width / 2 + width % 2, [](const Change& one) { return one.by_peak(); }, &peaks_);
    Insert(
        change, width / 2, [](const Change& one) { return one.by_excess(); }, &excesses_);
  }
  /// Returns the changes, the one with the smallest peak first.
  std::vector<Change> Changes() const {
    std::vector<Change> all = peaks_;
    for (const Change& one : excesses_) {
      if (!Has(peaks_, one)) all.push_back(one);
    }
    return all;
  }

 private:
  static bool Has(const std::vector<Change>& list, const Change& change) {
    return std::any_of(list.begin(), list.end(),
                       [&](const Change& one) { return one.key == change.key; });
  }
  template <class Rank>
  static void Insert(const Change& change, std::size_t width, const Rank& rank,
                     std::vector<Change>* list) {
    if (width == 0 || (list->size() == width && rank(list->back()) <= rank(change))) return;
    if (Has(*list, change)) return;
    const auto less = [&](const Change& a, const Change& b) { return rank(a) < rank(b); };
    list->insert(std::upper_bound(list->begin(), list->end(), change, less), change);
    if (list->size() > width) list->pop_back();
  }

  std::vector<Change> peaks_;  // in ascending order
  std::vector<Change> excesses_;
};

State Applied(const State& state, const Change& change) {
  State next{state.slots, change.key};
  if (change.other_slot != change.slot) next.slots[change.other_slot] = state.slots[change.slot];
  next.slots[change.slot] = change.expert;
  return next;
}

}  // namespace

std::vector<std::vector<std::int32_t>> FewMoves(
    const SearchGround& ground, const WindowShares& shares, std::span<const std::int32_t> slots,
    std::span<const std::uint8_t> held, std::uint64_t most, double goal, std::uint64_t steps) {
  constexpr std::size_t kWidest = 512;
  const std::size_t of_device = slots.size() / ground.size() + 1;
  const std::uint64_t changes = of_device * (shares.experts() + 2 * slots.size()) * most;
  const auto width = static_cast<std::size_t>(
      std::min<std::uint64_t>(changes == 0 ? 0 : steps / changes, kWidest));
  if (width == 0 || shares.count() == 0) return {};
  Expansion expansion(ground, shares, held, goal);
  std::vector<std::vector<State>> states(most + 1);
  std::vector<Beam> beams(most + 1);
  states[0].push_back({{slots.begin(), slots.end()}, expansion.KeyOf(slots)});
  double peak = shares.Peak(ground, slots);
  std::vector<std::vector<std::int32_t>> found;
  for (std::uint64_t moves = 0; !Stopped(ground.stop); ++moves) {
    for (const Change& change : beams[moves].Changes()) {
      states[moves].push_back(Applied(states[change.from_moves][change.from], change));
    }
    if (moves > 0 && !states[moves].empty()) {
      const std::vector<std::int32_t>& best = states[moves].front().slots;
      const double reached = shares.Peak(ground, best);
      if (reached < peak * kLess) {
        peak = reached;
        found.push_back(best);
      }
    }
    if (moves == most || peak <= goal) break;
    for (std::size_t i = 0; i < states[moves].size(); ++i) {
      expansion.ForChanges(states[moves][i], [&](Change change, int cost) {
        const std::uint64_t to = moves + static_cast<std::uint64_t>(cost);
        if (to > most) return;
        change.from_moves = moves;
        change.from = i;
        beams[to].Add(change, width);
      });
    }
  }
  return found;
}

}  // namespace shardwright::placement::internal
