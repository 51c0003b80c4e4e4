// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "placement/core/types.h"

namespace shardwright::placement::internal {

// All of these work on a placement of one layer.

/// EPLB's global policy for any numbers of slots on devices [first, last): replicas go to the
/// hottest of `experts`, at most one per live device; then heaviest first to the lightest device
/// with a free slot, one without the expert if there is one.
/// \pre the live slots hold all the experts; the devices are empty
void PackEvenly(std::span<const std::uint64_t> tokens, std::span<const std::uint32_t> experts,
                const Cluster& cluster, std::uint32_t first, std::uint32_t last,
                Placement* placement);

/// Swaps away second replicas of an expert on a device of [first, last), without raising the
/// largest load where that is possible, else raising it least.
void RemoveDuplicates(std::span<const std::uint64_t> tokens, const Cluster& cluster,
                      std::uint32_t first, std::uint32_t last, Placement* placement);

/// How even a layer is: tokens of the busiest device, even split over replicas, and replicas on a
/// device that has the expert already.
struct Evenness {
  std::uint32_t duplicates = 0;
  double peak = 0;
};
Evenness EvennessOf(std::span<const std::uint64_t> tokens, const Placement& placement);

}  // namespace shardwright::placement::internal
