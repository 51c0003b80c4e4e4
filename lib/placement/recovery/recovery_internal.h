// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "placement/recovery/recovery.h"

namespace shardwright::placement::internal {

/// Numbers of failure sets of some units by size k (capped), survived and not survived. T is
/// std::uint64_t if it can store every count, otherwise a floating type. All additions have
/// positive terms only, so nothing cancels.
template <class T>
struct Counts {
  std::vector<T> alive;
  std::vector<T> dead;
};

/// Returns row n of Pascal's triangle, up to `cap`.
template <class T>
std::vector<T> Binomials(std::uint32_t n, std::uint32_t cap) {
  std::vector<T> row(std::min(n, cap) + std::size_t{1}, T{0});
  row[0] = 1;
  for (std::uint32_t i = 1; i <= n; ++i) {
    for (std::uint32_t k = std::min(i, static_cast<std::uint32_t>(row.size() - 1)); k > 0; --k) {
      row[k] += row[k - 1];
    }
  }
  return row;
}

template <class T>
std::vector<T> Multiply(const std::vector<T>& a, const std::vector<T>& b, std::uint32_t cap) {
  std::vector<T> product(std::min<std::size_t>(a.size() + b.size() - 1, std::size_t{cap} + 1),
                         T{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == T{0}) continue;
    for (std::size_t j = 0; j < b.size() && i + j < product.size(); ++j) {
      product[i + j] += a[i] * b[j];
    }
  }
  return product;
}

/// Units of a component, renumbered 0 .. units-1, and its sets. No set contains another.
struct Component {
  std::uint32_t units = 0;
  std::vector<std::vector<std::uint32_t>> sets;  ///< ascending units
};

/// Returns an order of the units in which every set is a run, if one exists: unit i is order[i].
/// \pre the sets are connected and no set contains another
std::optional<std::vector<std::uint32_t>> RunOrder(const Component& component);

/// \pre every set is a run in `order`
template <class T>
Counts<T> SolveIntervals(const Component& component, const std::vector<std::uint32_t>& order,
                         std::uint32_t cap);

/// Counts failure sets by size. Returns nothing if it needs more than `states_max` states.
template <class T>
std::optional<Counts<T>> SolveFrontier(const Component& component, std::uint64_t states_max,
                                       std::uint32_t cap, const StopCheck& stop);

/// \pre at most 20 sets. T = std::uint64_t wraps around and gives exact counts.
template <class T>
Counts<T> SolveInclusionExclusion(const Component& component, std::uint32_t cap);

/// Returns nothing for more than 64 units or more than `sets_max` failure sets of one size.
template <class T>
std::optional<Counts<T>> SolveEnumeration(const Component& component, std::uint64_t sets_max,
                                          std::uint32_t cap, const StopCheck& stop);

/// Counts the failure sets of k units that contain one of the sets, by testing all of them.
/// \pre k <= units <= 64
std::uint64_t CountLost(const Component& component, std::uint32_t k, const StopCheck& stop);

/// Estimates the probabilities for all k of the whole problem; uses enumeration for small k.
void SolveMonteCarlo(const Component& all, const RecoveryOptions& options,
                     RecoveryProbability* recovery);

}  // namespace shardwright::placement::internal
