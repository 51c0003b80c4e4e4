// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "placement/core/types.h"

namespace shardwright::placement::internal {

// All functions of this file work on a placement of one layer.

/// EPLB's global policy for any number of slots per device, on devices [first, last). Gives
/// replicas to the hottest of `experts`, at most one per live device, then places them, heaviest
/// first, on the lightest device with a free slot, preferably one without the expert.
/// \pre the live slots suffice for all the experts; the devices are empty
void PackEvenly(std::span<const std::uint64_t> tokens, std::span<const std::uint32_t> experts,
                const Cluster& cluster, std::uint32_t first, std::uint32_t last,
                Placement* placement);

/// Swaps away second replicas of an expert on a device of [first, last). Prefers swaps that do
/// not raise the largest load, otherwise raises it as little as possible.
void RemoveDuplicates(std::span<const std::uint64_t> tokens, const Cluster& cluster,
                      std::uint32_t first, std::uint32_t last, Placement* placement);

/// Measures of the balance of a layer: tokens of the busiest device with an even split over
/// replicas, and replicas on a device that already has the expert.
struct Evenness {
  std::uint32_t duplicates = 0;
  double peak = 0;
};
Evenness EvennessOf(std::span<const std::uint64_t> tokens, const Placement& placement);

}  // namespace shardwright::placement::internal
