// SPDX-License-Identifier: Apache-2.0
// lib/placement/planning/everywhere: experts that every GPU holds, such as shared ones.
// They take a slot of every GPU and the same share of their tokens, so that the other experts can
// be planned as if neither they nor those slots existed.

#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "placement/core/types.h"
#include "support/base/result.h"

namespace shardwright::placement {

/// What is left to plan without the experts that every GPU holds.
struct PlanRest {
  TokenCounts loads;
  Cluster cluster;
  std::optional<Placement> current;
  /// Replicas of the experts left out that live GPUs lack in the current placement.
  std::uint64_t moves = 0;
};

/// Leaves experts out, and a slot of every GPU for each of them.
/// \param experts  ascending, distinct
/// \error kUsage  an expert that the loads do not have, or none that is left; kInfeasible  a GPU
///        without a slot for another expert
/// Pure.
Result<PlanRest> WithoutEverywhere(const TokenCounts& loads, const Cluster& cluster,
                                   const Placement* current,
                                   std::span<const std::uint32_t> experts);

/// Puts the experts that every GPU holds into a plan of the rest. Bounds become those of all
/// experts, and the curve of moves is dropped.
/// \error kInfeasible  a strategy that copies experts for an iteration
/// Pure.
Status AddEverywhere(const PlanRest& rest, const TokenCounts& loads, const Cluster& cluster,
                     const Placement* current, std::span<const std::uint32_t> experts,
                     StrategyResult* result);

}  // namespace shardwright::placement
