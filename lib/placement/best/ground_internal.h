// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "placement/core/types.h"
#include "placement/strategy/units.h"

namespace shardwright::placement::internal {

/// Data that the searches of all layers share: live devices with nodes, racks, units and slots.
struct SearchGround {
  SearchGround(const Cluster& cluster, FailureUnit failure_unit, std::uint32_t copies);

  std::vector<std::uint32_t> device;  ///< number in the cluster
  std::vector<std::uint32_t> node;    ///< by live device: numbered from 0
  std::vector<std::uint32_t> rack;
  std::vector<std::uint32_t> unit;
  std::vector<std::uint32_t> slots;
  std::vector<double> speed;  ///< by live device: relative, as RelativeSpeeds
  std::uint32_t nodes = 0;
  std::uint32_t racks = 0;
  std::uint32_t units = 0;
  std::uint32_t copies_min = 1;  ///< least number of units per expert
  StopCheck stop = {};           ///< stops every search
  /// [live device][expert]: 1 if a pin keeps the expert off the device; empty without pins
  std::vector<std::uint8_t> barred;
  std::uint32_t experts = 0;  ///< row length of `barred`

  bool pinned() const { return !barred.empty(); }
  bool Allows(std::uint32_t d, std::uint32_t expert) const {
    return barred.empty() || barred[std::size_t{d} * experts + expert] == 0;
  }
  std::uint32_t size() const { return static_cast<std::uint32_t>(device.size()); }
  double fastest() const { return *std::max_element(speed.begin(), speed.end()); }
  double slowest() const { return *std::min_element(speed.begin(), speed.end()); }
};

/// The tokens of one layer's experts in every window with tokens, scaled so that all windows have
/// the same total. The largest load over all windows is the measure of balance.
class WindowShares {
 public:
  WindowShares(const TokenCounts& loads, std::uint32_t layer);

  std::uint32_t count() const { return count_; }
  std::size_t experts() const { return experts_; }
  double total() const { return total_; }
  std::span<const double> tokens(std::uint32_t window) const {
    return std::span(tokens_).subspan(window * experts_, experts_);
  }
  /// Returns the largest load of a device. \param slots  as LayerSearch::slots
  double Peak(const SearchGround& ground, std::span<const std::int32_t> slots) const;

 private:
  std::size_t experts_;
  std::uint32_t count_ = 0;
  double total_ = 0;  ///< total of the first window
  std::vector<double> tokens_;
};

}  // namespace shardwright::placement::internal
