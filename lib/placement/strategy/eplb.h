// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/core/types.h"

namespace shardwright::placement {

/// Sizes of an EPLB plan.
struct EplbShape {
  std::uint32_t slots = 0;
  std::uint32_t groups = 1;  ///< groups of experts
  std::uint32_t nodes = 1;
  std::uint32_t gpus = 1;
};

/// Returns the replicas per expert: one each, then always one more for the expert with the largest
/// load per replica, ties to the lowest id. This minimizes the largest load per replica.
/// \param count_max  largest count of an expert; slots that no expert may take stay empty
/// \pre slots >= weights.size()
/// Local. Source: EPLB, replicate_experts; weights in single precision as there.
std::vector<std::uint32_t> EplbCounts(std::span<const float> weights, std::uint32_t slots,
                                      std::uint32_t count_max = ~0U);

/// Returns the expert of every slot of one layer, bit for bit as in the published algorithm.
/// \pre slots are a multiple of gpus, gpus of nodes; with the hierarchical policy experts are a
///      multiple of groups, groups and slots of nodes, and every node has a slot for its experts
/// Local. Source: EPLB, rebalance_experts.
std::vector<std::int32_t> EplbLayer(std::span<const std::uint64_t> tokens, const EplbShape& shape,
                                    bool hierarchical);

}  // namespace shardwright::placement
