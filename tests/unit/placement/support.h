// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <utility>
#include <vector>

#include "placement/core/types.h"
#include "placement/recovery/recovery.h"
#include "placement/strategy/lazarus.h"

namespace shardwright::placement {

/// Tokens per layer and expert of a run of the project's own trainer, of 12 layers and 32 experts.
inline std::filesystem::path OwnTrace() {
  return std::filesystem::path(SW_SOURCE_DIR) / "tests/data/deepspeed/routing_12x32/tokens.jsonl";
}

/// Returns the folder of published inputs, which the project does not carry; empty if not present.
inline std::vector<std::filesystem::path> SharedFolders() {
  const char* given = std::getenv("SHARDWRIGHT_SHARED");
  const std::filesystem::path shared = given != nullptr
                                           ? std::filesystem::path(given)
                                           : std::filesystem::path(SW_SOURCE_DIR) / ".." / "shared";
  if (!std::filesystem::is_directory(shared / "fixtures")) return {};
  return {shared};
}

inline TokenCounts LoadsOf(std::uint32_t experts, std::vector<std::uint64_t> tokens) {
  TokenCounts loads;
  loads.experts = experts;
  loads.layers = static_cast<std::uint32_t>(tokens.size()) / experts;
  loads.tokens = std::move(tokens);
  for (std::uint32_t l = 0; l < loads.layers; ++l) loads.layer_id.push_back(l);
  return loads;
}

/// Layers 3 and 5 with three experts.
inline TokenCounts TwoLayers() {
  TokenCounts loads = LoadsOf(3, {10, 20, 30, 5, 5, 50});
  loads.layer_id = {3, 5};
  loads.iteration = 7;
  return loads;
}

/// Returns a placement with the experts of all slots, layer after layer.
inline Placement Placed(const TokenCounts& loads, const Cluster& cluster,
                        std::vector<std::int32_t> slots) {
  Placement placement = EmptyPlacement(loads, cluster);
  EXPECT_EQ(placement.slot_expert.size(), slots.size());
  placement.slot_expert = std::move(slots);
  return placement;
}

/// Units of every expert of a plan.
inline std::vector<UnitSet> SetsOf(const UnitPlan& plan, std::size_t experts) {
  const auto units = static_cast<std::uint32_t>(plan.experts.size());
  std::vector<UnitSet> sets(experts, UnitSet(units));
  for (std::uint32_t u = 0; u < units; ++u) {
    for (const std::uint32_t e : plan.experts[u]) sets[e].Add(u);
  }
  return sets;
}

/// Survived failure sets of a plan by size.
inline std::vector<std::uint64_t> SurvivedSets(const UnitPlan& plan, std::size_t experts) {
  return SolveRecovery(SetsOf(plan, experts), static_cast<std::uint32_t>(plan.experts.size()))
      .survived_sets;
}

}  // namespace shardwright::placement
