// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "placement/core/random.h"
#include "placement/core/types.h"

namespace shardwright::placement {

inline std::uint32_t Between(Random* random, std::uint32_t least, std::uint32_t most) {
  return least + static_cast<std::uint32_t>(random->Below(std::uint64_t{most} - least + 1));
}

/// TokenCounts of one kind: equal, few values (many ties), skewed, huge, or most of them on a few
/// experts.
inline std::vector<std::uint64_t> RandomTokens(Random* random, std::uint32_t count) {
  std::vector<std::uint64_t> tokens(count);
  const std::uint64_t kind = random->Below(6);
  for (auto& t : tokens) {
    const double u = random->Unit();
    t = kind == 0   ? 7
        : kind == 1 ? random->Below(3)
        : kind == 2 ? random->Below(100)
        : kind == 3 ? static_cast<std::uint64_t>(u * u * u * u * 1e4)
        : kind == 4 ? random->Below(std::uint64_t{1} << 40)
        : u < 0.6   ? 0
        : u < 0.8   ? 1
                    : 1'000'000;
  }
  return tokens;
}

inline TokenCounts RandomLoads(Random* random, std::uint32_t layers, std::uint32_t experts) {
  TokenCounts loads;
  loads.layers = layers;
  loads.experts = experts;
  for (std::uint32_t l = 0; l < layers; ++l) {
    const auto tokens = RandomTokens(random, experts);
    loads.tokens.insert(loads.tokens.end(), tokens.begin(), tokens.end());
    loads.layer_id.push_back(l);
  }
  return loads;
}

/// One to four nodes of one to three GPUs, sometimes of unequal slots, at most one node dead.
inline Cluster RandomCluster(Random* random) {
  const std::uint32_t nodes = Between(random, 1, 4);
  Cluster cluster = UniformCluster(nodes, Between(random, 1, 3), Between(random, 1, 4));
  if (random->Below(4) == 0) {
    for (Device& device : cluster.devices) device.slots = Between(random, 0, 4);
  }
  if (nodes > 1 && random->Below(4) == 0) cluster.nodes[random->Below(nodes)].alive = false;
  if (cluster.live_slots() == 0) return RandomCluster(random);
  cluster.expert_bytes = 3;
  return cluster;
}

/// Any replicas on live devices, each expert at least once where the slots allow it.
inline Placement RandomPlacement(Random* random, const TokenCounts& loads, const Cluster& cluster) {
  Placement placement = EmptyPlacement(loads, cluster);
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    std::vector<std::int32_t*> slots;
    for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
      if (!cluster.alive(d)) continue;
      for (std::int32_t& slot : placement.slots(l, d)) slots.push_back(&slot);
    }
    for (std::size_t i = slots.size(); i > 1; --i) std::swap(slots[i - 1], slots[random->Below(i)]);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const auto any = static_cast<std::int32_t>(random->Below(loads.experts + std::uint64_t{1}));
      *slots[i] = i < loads.experts ? static_cast<std::int32_t>(i) : any - 1;
    }
  }
  return placement;
}

}  // namespace shardwright::placement
