// SPDX-License-Identifier: Apache-2.0
// lib/placement/planning/everywhere: experts with a replica on every GPU, such as shared ones.
// They take one slot of every GPU and an equal share of their tokens. The other experts are
// planned as if neither these experts nor their slots existed.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "placement/core/types.h"
#include "support/base/result.h"

namespace shardwright::placement {

/// Input of planning without the experts that are on every GPU.
struct PlanRest {
  TokenCounts loads;
  Cluster cluster;
  std::optional<Placement> current;
  /// Number of replicas of removed experts that have to be copied to GPUs without one.
  std::uint64_t moves = 0;
  std::vector<std::uint32_t> names;  ///< of the remaining experts, ascending
};

/// Removes experts, and one slot of every GPU for each of them.
/// \param experts  ascending, distinct
/// \error kUsage  an expert that the token counts lack, or no expert remains; kInfeasible  a
///        GPU without a slot for another expert
/// Pure.
Result<PlanRest> WithoutEverywhere(const TokenCounts& loads, const Cluster& cluster,
                                   const Placement* current,
                                   std::span<const std::uint32_t> experts);

/// Returns the pins with the numbers of the remaining experts.
/// \error kUsage  an expert that is pinned and on every GPU
/// Pure.
Result<std::vector<Pin>> PinsOfRest(std::vector<Pin> pins, std::span<const std::uint32_t> experts);

/// Returns the router's group of each remaining expert, for Options::expert_group. Experts on every
/// GPU belong to no group, and the others keep the group that they have among all experts. Empty
/// if the groups keep equal sizes, or if `groups` divides only the number of remaining experts.
/// \param experts  number of all experts
/// Pure.
std::vector<std::uint32_t> GroupsOfRest(std::uint32_t experts, std::uint32_t groups,
                                        std::span<const std::uint32_t> rest);

/// Adds the experts that are on every GPU to a plan of the rest. Bounds are converted to those
/// of all experts, and the curve of moves is dropped.
/// \error kInfeasible  the strategy copies experts for an iteration
/// Pure.
Status AddEverywhere(const PlanRest& rest, const TokenCounts& loads, const Cluster& cluster,
                     const Placement* current, std::span<const std::uint32_t> experts,
                     StrategyResult* result);

}  // namespace shardwright::placement
