// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/core/types.h"
#include "placement/recovery/recovery.h"
#include "placement/strategy/lazarus.h"

namespace shardwright::placement::internal {

/// The live failure units of a cluster: nodes or racks.
struct Units {
  std::vector<std::vector<std::uint32_t>> devices;  ///< by unit, live, ascending
  std::vector<std::uint64_t> slots;                 ///< by unit

  std::uint64_t slot_count() const;
};
Units UnitsOf(const Cluster& cluster, FailureUnit unit);

/// Number of replicas by unit and expert, and the set of units of every expert.
struct Holders {
  explicit Holders(const UnitPlan& plan, std::uint32_t expert_count)
      : count(plan.experts.size(), std::vector<std::uint32_t>(expert_count, 0)),
        sets(expert_count, UnitSet(static_cast<std::uint32_t>(plan.experts.size()))) {
    for (std::uint32_t u = 0; u < plan.experts.size(); ++u) {
      for (const std::uint32_t e : plan.experts[u]) {
        ++count[u][e];
        sets[e].Add(u);
      }
    }
  }

  /// Returns the units of `expert` after one replica moves from `from` to `to`.
  UnitSet Moved(std::uint32_t expert, std::uint32_t from, std::uint32_t to) const {
    UnitSet set = sets[expert];
    if (count[from][expert] == 1) set.Remove(from);
    set.Add(to);
    return set;
  }

  std::vector<std::vector<std::uint32_t>> count;  ///< [unit][expert]
  std::vector<UnitSet> sets;
};

/// Returns the largest copies_min for which a plan exists.
std::uint32_t LargestCopies(const Units& units, std::uint32_t experts);

/// Returns the copies_min to plan with: the requested one, or less if the options allow it.
/// \error kInfeasible  the request does not fit: names the largest that fits
Result<std::uint32_t> Threshold(const Units& units, std::uint32_t experts, const Options& options);

/// Deals each unit's experts to its devices, most tokens per replica first. Each goes to the least
/// loaded device with a free slot, preferably one without the expert; ties to the lower device.
void DealToDevices(const UnitPlan& plan, const Units& units, std::span<const std::uint64_t> tokens,
                   std::uint32_t layer, Placement* placement);

/// Returns the experts in ascending order of (tokens, id).
std::vector<std::uint32_t> AscendingLoad(std::span<const std::uint64_t> tokens);

}  // namespace shardwright::placement::internal
