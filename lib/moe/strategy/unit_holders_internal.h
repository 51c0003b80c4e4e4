#pragma once

#include <cstdint>
#include <vector>

#include "moe/recovery/recovery.h"
#include "moe/strategy/lazarus.h"

namespace shardwright::moe::internal {

/// Replicas per unit and expert, with the units of every expert.
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

  /// The units of `expert` after one replica went from `from` to `to`.
  UnitSet Moved(std::uint32_t expert, std::uint32_t from, std::uint32_t to) const {
    UnitSet set = sets[expert];
    if (count[from][expert] == 1) set.Remove(from);
    set.Add(to);
    return set;
  }

  std::vector<std::vector<std::uint32_t>> count;  ///< [unit][expert]
  std::vector<UnitSet> sets;
};

}  // namespace shardwright::moe::internal
