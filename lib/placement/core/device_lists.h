// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "placement/core/types.h"

namespace shardwright::placement {

/// Lists the experts of each device, layer by layer. A strategy that does not know yet how many
/// slots a device needs adds experts one by one and turns the lists into a placement at the end.
class DeviceLists {
 public:
  /// Makes empty lists. \param devices  number of devices in the cluster, numbered as there
  DeviceLists(std::uint32_t layers, std::uint32_t devices)
      : devices_(devices), lists_(std::size_t{layers} * devices), layers_(layers) {}

  /// Appends an expert to a list. An expert that is added twice appears twice.
  /// \pre layer and device are below the numbers given to the constructor
  void Add(std::uint32_t layer, std::uint32_t device, std::uint32_t expert) {
    lists_[std::size_t{layer} * devices_ + device].push_back(static_cast<std::int32_t>(expert));
  }

  /// Returns a placement in which a device has as many slots as its longest layer list. Experts
  /// fill the first slots in the order in which they were added, and the other slots are kNoExpert.
  /// \param experts  number of experts in each layer of the model
  /// Local, pure.
  Placement ToPlacement(std::uint32_t experts) const;

 private:
  std::uint32_t devices_;
  std::vector<std::vector<std::int32_t>> lists_;  // [layer][device]
  std::uint32_t layers_;
};

/// Returns the owner of each expert, a number below `devices`. Each device owns one run of
/// consecutive experts. Run lengths differ by at most one, and the first devices get the longer
/// runs. With fewer experts than devices the last devices own nothing.
/// \pre devices > 0
/// Local, pure.
std::vector<std::uint32_t> ContiguousOwners(std::uint32_t experts, std::uint32_t devices);

/// Replicas of an expert on one GPU.
struct Held {
  std::uint32_t device = 0;
  std::uint32_t replicas = 0;
};

/// Returns the live GPUs with replicas, ascending, for each expert of a layer.
/// \pre placement fits the cluster
/// Pure.
std::vector<std::vector<Held>> HeldReplicas(const Placement& placement, const Cluster& cluster,
                                            std::uint32_t layer);

}  // namespace shardwright::placement
