// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace shardwright::placement::internal {

/// The loads of devices, in ascending order. Equal loads are in the order of their devices.
class LoadOrder {
 public:
  using DeviceLoad = std::pair<double, std::uint32_t>;  ///< load and device

  /// Replaces the loads of all devices. \param loads  by device
  void Assign(std::vector<double> loads);
  /// Changes the loads of some devices. \pre no device occurs twice
  void Change(std::span<const DeviceLoad> changed);

  double operator[](std::uint32_t d) const { return load_[d]; }
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
