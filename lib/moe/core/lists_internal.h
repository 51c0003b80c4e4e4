#pragma once

#include <cstdint>
#include <vector>

#include "moe/core/types.h"

namespace shardwright::moe::internal {

/// Experts of devices while their number is not known yet.
class DeviceLists {
 public:
  DeviceLists(std::uint32_t layers, std::uint32_t devices)
      : devices_(devices), lists_(std::size_t{layers} * devices), layers_(layers) {}

  void Add(std::uint32_t layer, std::uint32_t device, std::uint32_t expert) {
    lists_[std::size_t{layer} * devices_ + device].push_back(static_cast<std::int32_t>(expert));
  }

  /// A placement with as many slots on a device as its fullest layer needs.
  Placement ToPlacement(std::uint32_t experts) const;

 private:
  std::uint32_t devices_;
  std::vector<std::vector<std::int32_t>> lists_;  // [layer][device]
  std::uint32_t layers_;
};

/// Owner of every expert when experts are cut into runs, one for each of `devices`: as even as
/// possible, longer ones first. With fewer experts than devices the last devices own nothing.
std::vector<std::uint32_t> ContiguousOwners(std::uint32_t experts, std::uint32_t devices);

}  // namespace shardwright::moe::internal
