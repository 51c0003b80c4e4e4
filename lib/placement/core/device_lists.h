// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "placement/core/types.h"

namespace shardwright::placement {

/// Which experts each device holds, listed layer by layer while nobody knows yet how many slots a
/// device needs. A strategy adds them one by one and makes a placement of them in the end.
class DeviceLists {
 public:
  /// Empty lists. \param devices  how many there are in the cluster, numbered as in it
  DeviceLists(std::uint32_t layers, std::uint32_t devices)
      : devices_(devices), lists_(std::size_t{layers} * devices), layers_(layers) {}

  /// Puts an expert at the end of a list. An expert that is added twice is there twice.
  /// \pre layer and device are below the numbers given to the constructor
  void Add(std::uint32_t layer, std::uint32_t device, std::uint32_t expert) {
    lists_[std::size_t{layer} * devices_ + device].push_back(static_cast<std::int32_t>(expert));
  }

  /// A placement with as many slots on a device as its fullest layer needs. Experts fill the first
  /// slots in the order in which they were added; the rest is kNoExpert.
  /// \param experts  of each layer of the model
  /// Local, pure.
  Placement ToPlacement(std::uint32_t experts) const;

 private:
  std::uint32_t devices_;
  std::vector<std::vector<std::int32_t>> lists_;  // [layer][device]
  std::uint32_t layers_;
};

/// The owner of each expert, a number below `devices`, where experts are cut into runs, one for
/// each device: as even as possible, longer ones first. With fewer experts than devices the last
/// devices own nothing.
/// \pre devices > 0
/// Local, pure.
std::vector<std::uint32_t> ContiguousOwners(std::uint32_t experts, std::uint32_t devices);

}  // namespace shardwright::placement
