// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <map>
#include <unordered_map>

#include "placement/recovery/recovery_internal.h"

namespace shardwright::placement::internal {
namespace {

// Returns an order that keeps sets together: natural, or grown from a unit through its sets.
std::vector<std::uint32_t> GrownOrder(const Component& component) {
  std::vector<std::vector<std::uint32_t>> sets_of(component.units);
  for (std::uint32_t s = 0; s < component.sets.size(); ++s) {
    for (const std::uint32_t unit : component.sets[s]) sets_of[unit].push_back(s);
  }
  std::vector<std::uint32_t> missing(component.sets.size());
  for (std::size_t s = 0; s < missing.size(); ++s) {
    missing[s] = static_cast<std::uint32_t>(component.sets[s].size());
  }
  std::vector<bool> taken(component.units, false);
  std::vector<bool> begun(component.sets.size(), false);
  // A unit costs the sets that it opens, minus the sets that it closes or that are open.
  const auto cost_of_set = [&](std::uint32_t s) {
    return begun[s] ? (missing[s] == 1 ? -2 : -1) : 1;
  };
  std::vector<std::int64_t> cost(component.units, 0);
  for (std::uint32_t u = 0; u < component.units; ++u) {
    for (const std::uint32_t s : sets_of[u]) cost[u] += cost_of_set(s);
  }
  std::vector<std::uint32_t> order;
  while (order.size() < component.units) {
    std::uint32_t best = component.units;
    for (std::uint32_t u = 0; u < component.units; ++u) {
      if (!taken[u] && (best == component.units || cost[u] < cost[best])) best = u;
    }
    taken[best] = true;
    order.push_back(best);
    for (const std::uint32_t s : sets_of[best]) {
      const int before = cost_of_set(s);
      begun[s] = true;
      --missing[s];
      const int change = cost_of_set(s) - before;
      if (change == 0) continue;
      for (const std::uint32_t u : component.sets[s]) cost[u] += change;
    }
  }
  return order;
}

// Sets that begin, contain or end at each unit of an order. An open set has a place in the state,
// bit `place`, which is free again after the set ends.
struct Step {
  std::vector<std::uint32_t> begins;  // places
  std::vector<std::uint32_t> holds;   // places of all sets of the unit
  std::vector<std::uint32_t> ends;    // places
};

std::vector<Step> StepsOf(const Component& component, const std::vector<std::uint32_t>& order,
                          std::uint32_t* places) {
  std::vector<std::uint32_t> position(component.units);
  for (std::uint32_t i = 0; i < component.units; ++i) position[order[i]] = i;
  std::vector<std::vector<std::uint32_t>> begin_at(component.units);
  std::vector<std::vector<std::uint32_t>> end_at(component.units);
  std::vector<std::vector<std::uint32_t>> hold_at(component.units);
  for (std::uint32_t s = 0; s < component.sets.size(); ++s) {
    std::uint32_t low = component.units;
    std::uint32_t high = 0;
    for (const std::uint32_t unit : component.sets[s]) {
      low = std::min(low, position[unit]);
      high = std::max(high, position[unit]);
      hold_at[position[unit]].push_back(s);
    }
    begin_at[low].push_back(s);
    end_at[high].push_back(s);
  }
  std::vector<Step> steps(component.units);
  std::vector<std::uint32_t> place(component.sets.size(), 0);
  std::vector<std::uint32_t> free_places;
  *places = 0;
  for (std::uint32_t i = 0; i < component.units; ++i) {
    for (const std::uint32_t s : begin_at[i]) {
      if (free_places.empty()) free_places.push_back((*places)++);
      place[s] = free_places.back();
      free_places.pop_back();
      steps[i].begins.push_back(place[s]);
    }
    for (const std::uint32_t s : hold_at[i]) steps[i].holds.push_back(place[s]);
    for (const std::uint32_t s : end_at[i]) {
      steps[i].ends.push_back(place[s]);
      free_places.push_back(place[s]);
    }
  }
  return steps;
}

using State = std::vector<std::uint64_t>;

struct StateHash {
  std::size_t operator()(const State& state) const {
    std::uint64_t hash = 0x9e3779b97f4a7c15;
    for (const std::uint64_t word : state) {
      hash = (hash ^ word) * 0xbf58476d1ce4e5b9;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

bool Bit(const State& state, std::uint32_t place) {
  return (state[place / 64] >> (place % 64) & 1) != 0;
}

template <class T>
std::optional<Counts<T>> WalkFrontier(const Component& component,
                                      const std::vector<std::uint32_t>& order,
                                      std::uint64_t states_max, std::uint32_t cap,
                                      const StopCheck& stop) {
  std::uint32_t places = 0;
  const std::vector<Step> steps = StepsOf(component, order, &places);
  const std::size_t sizes = std::size_t{std::min(component.units, cap)} + 1;
  // The counts of all states are in one vector; a table has the position of each state's first one.
  using Table = std::unordered_map<State, std::size_t, StateHash>;
  Table now;
  now.emplace(State((places + std::size_t{63}) / 64, 0), 0);
  std::vector<T> counts_now(sizes, T{0});
  counts_now[0] = 1;
  std::vector<T> counts_next;
  std::vector<T> dead(sizes, T{0});
  for (const Step& step : steps) {
    if (Stopped(stop)) return std::nullopt;
    for (std::size_t k = sizes - 1; k > 0; --k) dead[k] += dead[k - 1];
    Table next;
    next.reserve(now.size() * 2);
    counts_next.clear();
    const auto counts_of = [&](State&& state) {
      const auto [at, added] = next.try_emplace(std::move(state), counts_next.size());
      if (added) counts_next.resize(counts_next.size() + sizes, T{0});
      return counts_next.data() + at->second;
    };
    for (const auto& [state, position] : now) {
      const T* const counts = counts_now.data() + position;
      State up = state;  // the unit lives, so its sets survive
      for (const std::uint32_t p : step.holds) up[p / 64] &= ~(std::uint64_t{1} << (p % 64));
      T* const to_up = counts_of(std::move(up));
      for (std::size_t k = 0; k < sizes; ++k) to_up[k] += counts[k];

      State down = state;  // the unit fails, so new sets are open
      for (const std::uint32_t p : step.begins) down[p / 64] |= std::uint64_t{1} << (p % 64);
      const bool lost = std::any_of(step.ends.begin(), step.ends.end(),
                                    [&](std::uint32_t p) { return Bit(down, p); });
      T* const to_down = lost ? dead.data() : counts_of(std::move(down));
      for (std::size_t k = 1; k < sizes; ++k) to_down[k] += counts[k - 1];
    }
    if (next.size() > states_max) return std::nullopt;
    now = std::move(next);
    counts_now.swap(counts_next);
  }
  Counts<T> result{std::vector<T>(sizes, T{0}), std::move(dead)};
  for (const auto& [state, position] : now) {
    for (std::size_t k = 0; k < sizes; ++k) result.alive[k] += counts_now[position + k];
  }
  return result;
}

std::uint64_t MaskOf(const std::vector<std::uint32_t>& set) {
  std::uint64_t mask = 0;
  for (const std::uint32_t unit : set) mask |= std::uint64_t{1} << unit;
  return mask;
}

}  // namespace

template <class T>
std::optional<Counts<T>> SolveFrontier(const Component& component, std::uint64_t states_max,
                                       std::uint32_t cap, const StopCheck& stop) {
  std::vector<std::uint32_t> natural(component.units);
  for (std::uint32_t i = 0; i < component.units; ++i) natural[i] = i;
  if (auto counts = WalkFrontier<T>(component, natural, states_max, cap, stop)) return counts;
  return WalkFrontier<T>(component, GrownOrder(component), states_max, cap, stop);
}

template <class T>
Counts<T> SolveInclusionExclusion(const Component& component, std::uint32_t cap) {
  // Signed number of set families by their union. Equal unions cancel or add up early.
  std::map<std::vector<std::uint64_t>, std::int64_t> unions;
  const std::size_t words = (component.units + std::size_t{63}) / 64;
  unions[std::vector<std::uint64_t>(words, 0)] = -1;
  for (const auto& set : component.sets) {
    std::map<std::vector<std::uint64_t>, std::int64_t> with;
    for (const auto& [together, sign] : unions) {
      std::vector<std::uint64_t> more = together;
      for (const std::uint32_t unit : set) more[unit / 64] |= std::uint64_t{1} << (unit % 64);
      with[std::move(more)] -= sign;
    }
    for (auto& [together, sign] : with) unions[together] += sign;
  }
  const std::size_t sizes = std::size_t{std::min(component.units, cap)} + 1;
  std::vector<std::int64_t> by_size(component.units + std::size_t{1}, 0);
  for (const auto& [together, sign] : unions) {
    std::uint32_t size = 0;
    for (const std::uint64_t word : together)
      size += static_cast<std::uint32_t>(std::popcount(word));
    if (size > 0) by_size[size] += sign;
  }
  const std::vector<T> all = Binomials<T>(component.units, cap);
  Counts<T> counts{all, std::vector<T>(sizes, T{0})};
  for (std::uint32_t u = 1; u <= component.units; ++u) {
    if (by_size[u] == 0) continue;
    const std::vector<T> rest = Binomials<T>(component.units - u, cap);
    for (std::size_t j = 0; j < rest.size() && u + j < sizes; ++j) {
      counts.dead[u + j] += static_cast<T>(by_size[u]) * rest[j];
    }
  }
  for (std::size_t k = 0; k < sizes; ++k) counts.alive[k] = all[k] - counts.dead[k];
  return counts;
}

std::uint64_t CountLost(const Component& component, std::uint32_t k, const StopCheck& stop) {
  std::vector<std::uint64_t> masks;
  for (const auto& set : component.sets) masks.push_back(MaskOf(set));
  const std::uint32_t n = component.units;
  SW_CHECK(k <= n && n <= 64);
  const std::uint64_t last = k == 0 ? 0 : ((~std::uint64_t{0} >> (64 - k)) << (n - k));
  std::uint64_t failed = k == 0 ? 0 : ~std::uint64_t{0} >> (64 - k);
  std::uint64_t lost = 0;
  while (true) {
    lost += std::any_of(masks.begin(), masks.end(),
                        [&](std::uint64_t mask) { return (failed & mask) == mask; })
                ? 1
                : 0;
    if (failed == last || Stopped(stop)) return lost;
    const std::uint64_t low = failed & (~failed + 1);  // next mask with the same number of bits
    const std::uint64_t ripple = failed + low;
    failed = ripple | (((failed ^ ripple) >> 2) / low);
  }
}

template <class T>
std::optional<Counts<T>> SolveEnumeration(const Component& component, std::uint64_t sets_max,
                                          std::uint32_t cap, const StopCheck& stop) {
  if (component.units > 64) return std::nullopt;
  const std::vector<T> all = Binomials<T>(component.units, cap);
  Counts<T> counts{std::vector<T>(all.size(), T{0}), all};
  for (std::uint32_t k = 0; k < all.size(); ++k) {
    if (static_cast<long double>(all[k]) > static_cast<long double>(sets_max)) return std::nullopt;
    counts.dead[k] = static_cast<T>(CountLost(component, k, stop));
    counts.alive[k] = all[k] - counts.dead[k];
    if (counts.alive[k] == T{0}) break;  // if all k failures are lost, more failures are too
  }
  return counts;
}

#define SW_MOE_COUNTS(T)                                                                          \
  template std::optional<Counts<T>> SolveFrontier(const Component&, std::uint64_t, std::uint32_t, \
                                                  const StopCheck&);                              \
  template Counts<T> SolveInclusionExclusion(const Component&, std::uint32_t);                    \
  template std::optional<Counts<T>> SolveEnumeration(const Component&, std::uint64_t,             \
                                                     std::uint32_t, const StopCheck&)
SW_MOE_COUNTS(std::uint64_t);
SW_MOE_COUNTS(double);
SW_MOE_COUNTS(long double);
#undef SW_MOE_COUNTS

}  // namespace shardwright::placement::internal
