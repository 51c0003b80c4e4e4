// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "placement/recovery/recovery.h"

namespace shardwright::placement::internal {

/// Failure sets of some units, counted by size k (capped): those that are survived and those that
/// are not. T is std::uint64_t where it holds every count, else a floating type; all sums have
/// positive terms only, so nothing cancels.
template <class T>
struct Counts {
  std::vector<T> alive;
  std::vector<T> dead;
};

/// Row n of Pascal's triangle, up to `cap`.
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

/// Units of a component, renumbered 0 .. units-1, and the sets over them; no set contains another.
struct Component {
  std::uint32_t units = 0;
  std::vector<std::vector<std::uint32_t>> sets;  ///< ascending units
};

/// An order of the units in which every set is a run, if there is one: order[i] is the i-th unit.
/// \pre the sets hang together and no set contains another
std::optional<std::vector<std::uint32_t>> RunOrder(const Component& component);

/// \pre every set is a run in `order`
template <class T>
Counts<T> SolveIntervals(const Component& component, const std::vector<std::uint32_t>& order,
                         std::uint32_t cap);

/// Nothing if more than `states_max` states would be needed.
template <class T>
std::optional<Counts<T>> SolveFrontier(const Component& component, std::uint64_t states_max,
                                       std::uint32_t cap, const StopCheck& stop);

/// \pre at most 20 sets. T = std::uint64_t is exact by wrapping around.
template <class T>
Counts<T> SolveInclusionExclusion(const Component& component, std::uint32_t cap);

/// Nothing if a size has more than `sets_max` failure sets, or with more than 64 units.
template <class T>
std::optional<Counts<T>> SolveEnumeration(const Component& component, std::uint64_t sets_max,
                                          std::uint32_t cap, const StopCheck& stop);

/// Failure sets of k units that contain one of the sets, by looking at all of them.
/// \pre k <= units <= 64
std::uint64_t CountLost(const Component& component, std::uint32_t k, const StopCheck& stop);

/// Estimates for all k of the whole problem; small k by enumeration.
void SolveMonteCarlo(const Component& all, const RecoveryOptions& options,
                     RecoveryProbability* recovery);

}  // namespace shardwright::placement::internal
