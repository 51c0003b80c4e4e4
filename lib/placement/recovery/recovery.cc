// SPDX-License-Identifier: Apache-2.0
#include "placement/recovery/recovery.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "placement/recovery/recovery_internal.h"

namespace shardwright::placement {
namespace {

using internal::Component;
using internal::Counts;

constexpr std::uint32_t kFewSets = 20;
// Largest number of units with counts that fit in 64 bits, and in a double.
constexpr std::uint32_t kUnitsOfInteger = 62;
constexpr std::uint32_t kUnitsOfDouble = 1000;

std::vector<std::uint32_t> Members(const UnitSet& set) {
  std::vector<std::uint32_t> units;
  for (std::size_t w = 0; w < set.words().size(); ++w) {
    for (std::uint64_t word = set.words()[w]; word != 0; word &= word - 1) {
      units.push_back(static_cast<std::uint32_t>(w * 64) +
                      static_cast<std::uint32_t>(std::countr_zero(word)));
    }
  }
  return units;
}

// Drops every set that contains another one: the larger survives whenever the smaller does.
std::vector<std::vector<std::uint32_t>> Minimal(const std::vector<UnitSet>& sets,
                                                std::uint32_t units, const StopCheck& stop) {
  struct Sized {
    std::uint32_t size;
    const UnitSet* set;
  };
  std::vector<Sized> order;
  order.reserve(sets.size());
  for (const UnitSet& set : sets) order.push_back({set.size(), &set});
  std::sort(order.begin(), order.end(), [](const Sized& a, const Sized& b) {
    if (a.size != b.size) return a.size < b.size;
    return std::lexicographical_compare(a.set->words().begin(), a.set->words().end(),
                                        b.set->words().begin(), b.set->words().end());
  });
  const auto same = [](const Sized& a, const Sized& b) { return *a.set == *b.set; };
  order.erase(std::unique(order.begin(), order.end(), same), order.end());
  std::vector<std::vector<std::uint32_t>> kept;
  std::vector<std::vector<const UnitSet*>> by_lowest(units);  // kept sets by their lowest unit
  for (const Sized& sized : order) {
    if (Stopped(stop)) break;
    const UnitSet* const set = sized.set;
    std::vector<std::uint32_t> members = Members(*set);
    const bool covers = std::any_of(members.begin(), members.end(), [&](std::uint32_t unit) {
      return std::any_of(by_lowest[unit].begin(), by_lowest[unit].end(),
                         [&](const UnitSet* small) { return set->Contains(*small); });
    });
    if (covers) continue;
    if (!members.empty()) by_lowest[members.front()].push_back(set);
    kept.push_back(std::move(members));
  }
  return kept;
}

std::vector<Component> Split(const std::vector<std::vector<std::uint32_t>>& sets,
                             std::uint32_t units) {
  std::vector<std::uint32_t> parent(units);
  std::iota(parent.begin(), parent.end(), 0U);
  const auto root = [&](std::uint32_t u) {
    while (parent[u] != u) u = parent[u] = parent[parent[u]];
    return u;
  };
  for (const auto& set : sets) {
    for (const std::uint32_t unit : set) parent[root(unit)] = root(set.front());
  }
  std::vector<std::uint32_t> index(units, units);  // by root unit: its component
  std::vector<std::uint32_t> name(units, 0);       // by unit: its number in the component
  std::vector<Component> components;
  std::vector<bool> used(units, false);
  for (const auto& set : sets) {
    for (const std::uint32_t unit : set) used[unit] = true;
  }
  for (std::uint32_t u = 0; u < units; ++u) {
    if (!used[u]) continue;
    std::uint32_t& at = index[root(u)];
    if (at == units) {
      at = static_cast<std::uint32_t>(components.size());
      components.emplace_back();
    }
    name[u] = components[at].units++;
  }
  for (const auto& set : sets) {
    auto& mine = components[index[root(set.front())]].sets.emplace_back();
    for (const std::uint32_t unit : set) mine.push_back(name[unit]);
  }
  return components;
}

template <class T>
struct Solved {
  Counts<T> counts;
  RecoveryMethod method = RecoveryMethod::kProduct;
};

template <class T>
std::optional<Solved<T>> SolveForced(const Component& component, const RecoveryOptions& options,
                                     std::uint32_t cap) {
  const auto found = [&](std::optional<Counts<T>> counts) -> std::optional<Solved<T>> {
    if (!counts) return std::nullopt;
    return Solved<T>{*std::move(counts), *options.force};
  };
  switch (*options.force) {
    case RecoveryMethod::kInclusionExclusion:
      if (component.sets.size() > kFewSets) return std::nullopt;
      return found(internal::SolveInclusionExclusion<T>(component, cap));
    case RecoveryMethod::kFrontier:
      return found(internal::SolveFrontier<T>(component, options.frontier_max, cap, options.stop));
    case RecoveryMethod::kEnumeration:
      return found(
          internal::SolveEnumeration<T>(component, options.enumeration_max, cap, options.stop));
    default:
      return std::nullopt;
  }
}

template <class T>
std::optional<Solved<T>> SolveComponent(const Component& component, const RecoveryOptions& options,
                                        std::uint32_t cap) {
  if (options.force) {
    if (auto solved = SolveForced<T>(component, options, cap)) return solved;
  }
  if (component.sets.size() == 1) {
    std::vector<T> alive = internal::Binomials<T>(component.units, cap);
    std::vector<T> dead(alive.size(), T{0});
    if (component.units <= cap) std::swap(alive[component.units], dead[component.units]);
    return Solved<T>{{std::move(alive), std::move(dead)}, RecoveryMethod::kProduct};
  }
  if (const auto order = internal::RunOrder(component)) {
    return Solved<T>{internal::SolveIntervals<T>(component, *order, cap),
                     RecoveryMethod::kIntervals};
  }
  if (auto counts =
          internal::SolveFrontier<T>(component, options.frontier_max, cap, options.stop)) {
    return Solved<T>{*std::move(counts), RecoveryMethod::kFrontier};
  }
  if (component.sets.size() <= kFewSets) {
    return Solved<T>{internal::SolveInclusionExclusion<T>(component, cap),
                     RecoveryMethod::kInclusionExclusion};
  }
  if (auto counts =
          internal::SolveEnumeration<T>(component, options.enumeration_max, cap, options.stop)) {
    return Solved<T>{*std::move(counts), RecoveryMethod::kEnumeration};
  }
  return std::nullopt;
}

// Computes all exact counts. Returns false if some component exceeds the limits.
template <class T>
bool SolveExactly(const std::vector<Component>& components, const RecoveryOptions& options,
                  RecoveryProbability* recovery) {
  const std::uint32_t cap = std::min(recovery->units, options.failures_max);
  std::uint32_t free_units = recovery->units;
  for (const Component& component : components) free_units -= component.units;
  Counts<T> all{internal::Binomials<T>(free_units, cap), {}};
  all.dead.assign(all.alive.size(), T{0});
  recovery->method = RecoveryMethod::kProduct;
  for (std::size_t i = 0; i < components.size(); ++i) {
    if (Stopped(options.stop)) return true;
    auto solved = SolveComponent<T>(components[i], options, cap);
    if (!solved) return false;
    std::vector<T> total = solved->counts.alive;
    for (std::size_t k = 0; k < total.size(); ++k) total[k] += solved->counts.dead[k];
    std::vector<T> dead = internal::Multiply(all.dead, total, cap);
    const std::vector<T> newly = internal::Multiply(all.alive, solved->counts.dead, cap);
    for (std::size_t k = 0; k < dead.size(); ++k) dead[k] += newly[k];
    all.alive = internal::Multiply(all.alive, solved->counts.alive, cap);
    all.dead = std::move(dead);
    const bool first = i == 0;
    if (first) {
      recovery->method = solved->method;
    } else if (recovery->method != solved->method) {
      recovery->method = RecoveryMethod::kComponents;
    }
  }
  recovery->survived.resize(cap + std::size_t{1});
  recovery->lost.resize(cap + std::size_t{1});
  for (std::size_t k = 0; k <= cap; ++k) {
    const auto total =
        static_cast<long double>(all.alive[k]) + static_cast<long double>(all.dead[k]);
    recovery->survived[k] = static_cast<double>(static_cast<long double>(all.alive[k]) / total);
    recovery->lost[k] = static_cast<double>(static_cast<long double>(all.dead[k]) / total);
  }
  if constexpr (std::is_same_v<T, std::uint64_t>) recovery->survived_sets = std::move(all.alive);
  return true;
}

std::vector<UnitSet> SetsOf(const Placement& placement, const Cluster& cluster, std::uint32_t layer,
                            const std::vector<std::uint32_t>& unit_of_node, std::uint32_t units) {
  std::vector<UnitSet> sets(placement.ExpertsOf(layer), UnitSet(units));
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    const std::uint32_t node = cluster.devices[d].node;
    if (!cluster.nodes[node].alive) continue;
    for (const std::int32_t expert : placement.slots(layer, d)) {
      if (expert != kNoExpert) sets[static_cast<std::size_t>(expert)].Add(unit_of_node[node]);
    }
  }
  return sets;
}

// Numbers the live units consecutively in the order of nodes.
std::vector<std::uint32_t> UnitOfNode(const Cluster& cluster, FailureUnit unit,
                                      std::uint32_t* units) {
  const auto none = cluster.node_count();
  std::vector<std::uint32_t> unit_of_node(cluster.nodes.size(), none);
  std::vector<std::uint32_t> unit_of_rack(cluster.racks.size(), none);
  *units = 0;
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    if (!cluster.nodes[n].alive) continue;
    std::uint32_t& mine =
        unit == FailureUnit::kRack ? unit_of_rack[cluster.nodes[n].rack] : unit_of_node[n];
    if (mine == none) mine = (*units)++;
    unit_of_node[n] = mine;
  }
  return unit_of_node;
}

}  // namespace

std::uint32_t UnitSet::size() const {
  std::uint32_t count = 0;
  for (const std::uint64_t word : words_) count += static_cast<std::uint32_t>(std::popcount(word));
  return count;
}

bool UnitSet::Contains(const UnitSet& other) const {
  for (std::size_t w = 0; w < words_.size(); ++w) {
    if ((other.words_[w] & ~words_[w]) != 0) return false;
  }
  return true;
}

std::string_view Name(RecoveryMethod method) {
  switch (method) {
    case RecoveryMethod::kProduct:
      return "product";
    case RecoveryMethod::kIntervals:
      return "intervals";
    case RecoveryMethod::kInclusionExclusion:
      return "inclusion-exclusion";
    case RecoveryMethod::kFrontier:
      return "frontier";
    case RecoveryMethod::kEnumeration:
      return "enumeration";
    case RecoveryMethod::kComponents:
      return "components";
    case RecoveryMethod::kMonteCarlo:
      return "montecarlo";
  }
  return "unknown";
}

RecoveryProbability SolveRecovery(const std::vector<UnitSet>& sets, std::uint32_t units,
                                  const RecoveryOptions& options) {
  RecoveryProbability recovery;
  recovery.units = units;
  Component all;
  all.units = units;
  all.sets = Minimal(sets, units, options.stop);
  if (!all.sets.empty() && all.sets.front().empty()) {  // lost before any failure
    const std::size_t sizes = std::min(units, options.failures_max) + std::size_t{1};
    recovery.certain = -1;
    recovery.survived.assign(sizes, 0.0);
    recovery.lost.assign(sizes, 1.0);
    if (units <= kUnitsOfInteger) recovery.survived_sets.assign(sizes, 0);
    return recovery;
  }
  recovery.certain =
      all.sets.empty() ? units : static_cast<std::int64_t>(all.sets.front().size()) - 1;
  if (options.force == RecoveryMethod::kMonteCarlo) {
    internal::SolveMonteCarlo(all, options, &recovery);
    return recovery;
  }
  const std::vector<Component> components = Split(all.sets, units);
  const bool solved =
      units <= kUnitsOfInteger  ? SolveExactly<std::uint64_t>(components, options, &recovery)
      : units <= kUnitsOfDouble ? SolveExactly<double>(components, options, &recovery)
                                : SolveExactly<long double>(components, options, &recovery);
  if (!solved) internal::SolveMonteCarlo(all, options, &recovery);
  return recovery;
}

RecoveryProbability LayerRecovery(const Placement& placement, const Cluster& cluster,
                                  std::uint32_t layer, FailureUnit unit,
                                  const RecoveryOptions& options) {
  std::uint32_t units = 0;
  const std::vector<std::uint32_t> unit_of_node = UnitOfNode(cluster, unit, &units);
  return SolveRecovery(SetsOf(placement, cluster, layer, unit_of_node, units), units, options);
}

RecoveryProbability ModelRecovery(const Placement& placement, const Cluster& cluster,
                                  FailureUnit unit, const RecoveryOptions& options) {
  std::uint32_t units = 0;
  const std::vector<std::uint32_t> unit_of_node = UnitOfNode(cluster, unit, &units);
  std::vector<UnitSet> sets;
  sets.reserve(std::size_t{placement.layers} * placement.experts);
  for (std::uint32_t l = 0; l < placement.layers; ++l) {
    for (UnitSet& set : SetsOf(placement, cluster, l, unit_of_node, units)) {
      sets.push_back(std::move(set));
    }
  }
  return SolveRecovery(sets, units, options);
}

double SurvivalAt(const RecoveryProbability& recovery, double q) {
  if (q <= 0) return recovery.survived[0];
  if (q >= 1) return recovery.survived.size() > recovery.units ? recovery.survived.back() : 0;
  // Computes C(n, k) q^k (1-q)^(n-k) from one k to the next, in logarithms so that large n
  // does not underflow.
  const double n = recovery.units;
  double log_weight = n * std::log1p(-q);
  const double odds = std::log(q) - std::log1p(-q);
  double sum = 0;
  for (std::size_t k = 0; k < recovery.survived.size(); ++k) {
    sum += std::exp(log_weight) * recovery.survived[k];
    const auto at = static_cast<double>(k);
    if (at < n) log_weight += std::log((n - at) / (at + 1)) + odds;
  }
  return sum;
}

}  // namespace shardwright::placement
