// SPDX-License-Identifier: Apache-2.0
#include "placement/core/device_lists.h"

#include <algorithm>

namespace shardwright::placement {

Placement DeviceLists::ToPlacement(std::uint32_t experts) const {
  Placement placement;
  placement.layers = layers_;
  placement.experts = experts;
  placement.slot_begin.assign(1, 0);
  for (std::uint32_t d = 0; d < devices_; ++d) {
    std::size_t widest = 0;
    for (std::uint32_t l = 0; l < layers_; ++l) {
      widest = std::max(widest, lists_[std::size_t{l} * devices_ + d].size());
    }
    placement.slot_begin.push_back(placement.slot_begin.back() +
                                   static_cast<std::uint32_t>(widest));
  }
  placement.slot_expert.assign(std::size_t{layers_} * placement.slot_count(), kNoExpert);
  for (std::uint32_t l = 0; l < layers_; ++l) {
    for (std::uint32_t d = 0; d < devices_; ++d) {
      const auto& list = lists_[std::size_t{l} * devices_ + d];
      std::copy(list.begin(), list.end(), placement.slots(l, d).begin());
    }
  }
  return placement;
}

std::vector<std::uint32_t> ContiguousOwners(std::uint32_t experts, std::uint32_t devices) {
  const std::uint32_t base = experts / devices;
  const std::uint32_t more = experts % devices;  // devices with one additional expert
  std::vector<std::uint32_t> owner;
  owner.reserve(experts);
  for (std::uint32_t d = 0; d < devices; ++d) {
    owner.insert(owner.end(), base + (d < more ? 1 : 0), d);
  }
  return owner;
}

std::vector<std::vector<Held>> HeldReplicas(const Placement& placement, const Cluster& cluster,
                                            std::uint32_t layer) {
  std::vector<std::vector<Held>> holders(placement.ExpertsOf(layer));
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    for (const std::int32_t e : placement.slots(layer, d)) {
      if (e == kNoExpert) continue;
      std::vector<Held>& held = holders[static_cast<std::size_t>(e)];
      if (held.empty() || held.back().device != d) held.push_back({d, 0});
      ++held.back().replicas;
    }
  }
  return holders;
}

}  // namespace shardwright::placement
