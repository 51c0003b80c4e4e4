// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace shardwright::placement::internal {

/// Stores the load of each device, and the devices in ascending order of load. Ties go to the
/// device with the lower number.
class LoadOrder {
 public:
  using DeviceLoad = std::pair<double, std::uint32_t>;  ///< load and device

  /// Replaces all device loads. \param loads  by device
  void Assign(std::vector<double> loads);
  /// Changes the load of some devices. \pre no device occurs twice
  void Change(std::span<const DeviceLoad> changed);

  double operator[](std::uint32_t d) const { return load_[d]; }
  /// Returns all devices in their order.
  std::span<const DeviceLoad> ascending() const { return order_; }
  /// Returns the largest load, 0 without devices.
  double peak() const { return order_.empty() ? 0 : order_.back().first; }

 private:
  void Move(const DeviceLoad& to);
  void Merge(std::span<const DeviceLoad> changed);

  std::vector<double> load_;
  std::vector<DeviceLoad> order_;
  std::vector<DeviceLoad> sorted_, merged_;  // buffers of Merge
  std::vector<std::uint8_t> leaves_;         // [device]: 1 if its place in the order changes
};

}  // namespace shardwright::placement::internal
