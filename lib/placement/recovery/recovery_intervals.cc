// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <list>

#include "placement/recovery/recovery_internal.h"

namespace shardwright::placement::internal {
namespace {

constexpr std::uint32_t kUnplaced = std::numeric_limits<std::uint32_t>::max();

// Blocks of units, from left to right. The order of the units in a block is still open. Two sets
// that meet always overlap properly (none contains another), so there is only one way to insert
// each further set, up to reversing the whole order.
class Blocks {
 public:
  explicit Blocks(std::uint32_t units) : home_(units, blocks_.end()) {}

  void Start(const std::vector<std::uint32_t>& set) {
    blocks_.push_back(set);
    for (const std::uint32_t unit : set) home_[unit] = blocks_.begin();
  }

  bool placed(std::uint32_t unit) const { return home_[unit] != blocks_.end(); }

  // Returns false if the set cannot be a run.
  bool Insert(const std::vector<std::uint32_t>& set) {
    std::vector<std::uint32_t> fresh;
    std::vector<bool> in_set(home_.size(), false);
    for (const std::uint32_t unit : set) {
      in_set[unit] = true;
      if (!placed(unit)) fresh.push_back(unit);
    }
    const auto touched = [&](const Block& block) {
      return std::any_of(block.begin(), block.end(), [&](std::uint32_t u) { return in_set[u]; });
    };
    const auto whole = [&](const Block& block) {
      return std::all_of(block.begin(), block.end(), [&](std::uint32_t u) { return in_set[u]; });
    };
    const auto first = std::find_if(blocks_.begin(), blocks_.end(), touched);
    if (first == blocks_.end()) return false;
    auto last = first;
    for (auto at = std::next(first); at != blocks_.end() && touched(*at); ++at) last = at;
    if (std::any_of(std::next(last), blocks_.end(), touched)) return false;
    for (auto at = first; at != last; ++at) {
      if (at != first && !whole(*at)) return false;
    }
    return Place(first, last, in_set, fresh, whole(*first), whole(*last));
  }

  std::vector<std::uint32_t> Order() const {
    std::vector<std::uint32_t> order;
    for (const Block& block : blocks_) order.insert(order.end(), block.begin(), block.end());
    return order;
  }

 private:
  using Block = std::vector<std::uint32_t>;
  using At = std::list<Block>::iterator;

  bool Place(At first, At last, const std::vector<bool>& in_set,
             const std::vector<std::uint32_t>& fresh, bool first_whole, bool last_whole) {
    // New units go to the end that the run reaches. The units that the set shares with the
    // block at that end must then be outermost.
    const bool at_left = first == blocks_.begin();
    const bool at_right = std::next(last) == blocks_.end();
    if (first == last) {
      if (!fresh.empty() && !at_left && !at_right) return false;
      const bool left_side = at_left && !at_right && !fresh.empty();
      if (!first_whole) Split(first, in_set, left_side);
      if (!fresh.empty()) Append(fresh, left_side);
      return true;
    }
    const bool to_right = at_right && last_whole;
    const bool to_left = at_left && first_whole;
    if (!fresh.empty() && !to_right && !to_left) return false;
    if (!first_whole) Split(first, in_set, false);
    if (!last_whole) Split(last, in_set, true);
    if (!fresh.empty()) Append(fresh, !to_right);
    return true;
  }

  // Splits a block into units of the set and the others, with the set's on the left or right.
  void Split(At block, const std::vector<bool>& in_set, bool set_left) {
    Block inside;
    Block outside;
    for (const std::uint32_t unit : *block) (in_set[unit] ? inside : outside).push_back(unit);
    *block = set_left ? inside : outside;
    const At right = blocks_.insert(std::next(block), set_left ? outside : inside);
    for (const std::uint32_t unit : *right) home_[unit] = right;
  }

  void Append(const std::vector<std::uint32_t>& units, bool left) {
    const At at = blocks_.insert(left ? blocks_.begin() : blocks_.end(), units);
    for (const std::uint32_t unit : units) home_[unit] = at;
  }

  std::list<Block> blocks_;
  std::vector<At> home_;
};

// Returns the sets in an order in which each meets an earlier one.
std::vector<std::uint32_t> Walk(const Component& component) {
  std::vector<std::vector<std::uint32_t>> sets_of(component.units);
  for (std::uint32_t s = 0; s < component.sets.size(); ++s) {
    for (const std::uint32_t unit : component.sets[s]) sets_of[unit].push_back(s);
  }
  std::vector<bool> seen(component.sets.size(), false);
  std::vector<std::uint32_t> walk{0};
  seen[0] = true;
  for (std::size_t i = 0; i < walk.size(); ++i) {
    for (const std::uint32_t unit : component.sets[walk[i]]) {
      for (const std::uint32_t s : sets_of[unit]) {
        if (!seen[s]) {
          seen[s] = true;
          walk.push_back(s);
        }
      }
    }
  }
  return walk;
}

bool IsRunIn(const std::vector<std::uint32_t>& set, const std::vector<std::uint32_t>& position) {
  std::uint32_t low = kUnplaced;
  std::uint32_t high = 0;
  for (const std::uint32_t unit : set) {
    low = std::min(low, position[unit]);
    high = std::max(high, position[unit]);
  }
  return high - low + 1 == set.size();
}

}  // namespace

std::optional<std::vector<std::uint32_t>> RunOrder(const Component& component) {
  Blocks blocks(component.units);
  bool started = false;
  for (const std::uint32_t s : Walk(component)) {
    if (!started) {
      blocks.Start(component.sets[s]);
      started = true;
    } else if (!blocks.Insert(component.sets[s])) {
      return std::nullopt;
    }
  }
  std::vector<std::uint32_t> order = blocks.Order();
  if (order.size() != component.units) return std::nullopt;
  std::vector<std::uint32_t> position(component.units);
  for (std::uint32_t i = 0; i < component.units; ++i) position[order[i]] = i;
  for (const auto& set : component.sets) {
    if (!IsRunIn(set, position)) return std::nullopt;
  }
  return order;
}

template <class T>
Counts<T> SolveIntervals(const Component& component, const std::vector<std::uint32_t>& order,
                         std::uint32_t cap) {
  const std::uint32_t n = component.units;
  std::vector<std::uint32_t> position(n);
  for (std::uint32_t i = 0; i < n; ++i) position[order[i]] = i;
  std::vector<std::uint32_t> ends(n, kUnplaced);  // length of the set that ends at this position
  std::uint32_t longest = 0;
  for (const auto& set : component.sets) {
    std::uint32_t high = 0;
    for (const std::uint32_t unit : set) high = std::max(high, position[unit]);
    const auto length = static_cast<std::uint32_t>(set.size());
    ends[high] = std::min(ends[high], length);
    longest = std::max(longest, length);
  }
  const std::size_t sizes = std::size_t{std::min(n, cap)} + 1;
  // runs[r][k] counts the failure sets of size k so far with exactly the last r units failed.
  // `longest` also stands for any longer run, since no set needs more.
  std::vector<std::vector<T>> runs(longest + std::size_t{1}, std::vector<T>(sizes, T{0}));
  runs[0][0] = 1;
  std::vector<T> dead(sizes, T{0});
  for (std::uint32_t i = 0; i < n; ++i) {
    for (std::size_t k = sizes - 1; k > 0; --k) dead[k] += dead[k - 1];
    std::vector<T> up(sizes, T{0});
    for (const auto& run : runs) {
      for (std::size_t k = 0; k < sizes; ++k) up[k] += run[k];
    }
    std::vector<T> full = std::move(runs[longest]);
    for (std::uint32_t r = longest; r > 0; --r) runs[r] = std::move(runs[r - 1]);
    for (std::size_t k = 0; k < sizes; ++k) runs[longest][k] += full[k];
    runs[0] = std::move(up);
    for (std::uint32_t r = 1; r <= longest; ++r) {
      for (std::size_t k = sizes - 1; k > 0; --k) runs[r][k] = runs[r][k - 1];
      runs[r][0] = 0;
      if (r < ends[i]) continue;
      for (std::size_t k = 0; k < sizes; ++k) {
        dead[k] += runs[r][k];
        runs[r][k] = 0;
      }
    }
  }
  std::vector<T> alive(sizes, T{0});
  for (const auto& run : runs) {
    for (std::size_t k = 0; k < sizes; ++k) alive[k] += run[k];
  }
  return {std::move(alive), std::move(dead)};
}

template Counts<std::uint64_t> SolveIntervals(const Component&, const std::vector<std::uint32_t>&,
                                              std::uint32_t);
template Counts<double> SolveIntervals(const Component&, const std::vector<std::uint32_t>&,
                                       std::uint32_t);
template Counts<long double> SolveIntervals(const Component&, const std::vector<std::uint32_t>&,
                                            std::uint32_t);

}  // namespace shardwright::placement::internal
