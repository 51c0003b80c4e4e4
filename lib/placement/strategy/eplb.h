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
  std::uint32_t groups = 1;  ///< of experts
  std::uint32_t nodes = 1;
  std::uint32_t gpus = 1;
};

/// Replicas per expert: one each, then always one more to the expert with the largest load per
/// replica, ties to the lowest id. This minimizes the largest load per replica.
/// \param count_max  no expert gets more; slots that nobody may take stay empty
/// \pre slots >= tokens.size()
/// Local. Source: EPLB, replicate_experts; weights in single precision as there.
std::vector<std::uint32_t> EplbCounts(std::span<const float> weights, std::uint32_t slots,
                                      std::uint32_t count_max = ~0U);

/// The expert of every slot of one layer, as the published algorithm gives it, bit for bit.
/// \pre slots are a multiple of gpus, gpus of nodes; with the hierarchical policy experts are a
///      multiple of groups, groups and slots of nodes, and every node has a slot for its experts
/// Local. Source: EPLB, rebalance_experts.
std::vector<std::int32_t> EplbLayer(std::span<const std::uint64_t> tokens, const EplbShape& shape,
                                    bool hierarchical);

}  // namespace shardwright::placement
