// SPDX-License-Identifier: Apache-2.0
#include "placement/best/ground_internal.h"

#include <numeric>

namespace shardwright::placement::internal {

SearchGround::SearchGround(const Cluster& cluster, FailureUnit failure_unit, std::uint32_t copies)
    : copies_min(copies) {
  std::vector<std::uint32_t> node_name(cluster.nodes.size(), ~0U);
  std::vector<std::uint32_t> rack_name(cluster.racks.size(), ~0U);
  const std::vector<double> speeds = RelativeSpeeds(cluster);
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (!cluster.holds(d)) continue;
    const std::uint32_t n = cluster.devices[d].node;
    const std::uint32_t r = cluster.nodes[n].rack;
    if (node_name[n] == ~0U) node_name[n] = nodes++;
    if (rack_name[r] == ~0U) rack_name[r] = racks++;
    device.push_back(d);
    node.push_back(node_name[n]);
    rack.push_back(rack_name[r]);
    unit.push_back(failure_unit == FailureUnit::kRack ? rack_name[r] : node_name[n]);
    slots.push_back(cluster.devices[d].slots);
    speed.push_back(speeds[d]);
  }
  units = failure_unit == FailureUnit::kRack ? racks : nodes;
}

WindowShares::WindowShares(const TokenCounts& loads, std::uint32_t layer)
    : experts_(loads.experts) {
  for (std::size_t w = 0; w < loads.window_count(); ++w) {
    const auto counts = loads.layer(layer, w);
    const auto all = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
    if (all == 0 && (w + 1 < loads.window_count() || count_ > 0)) continue;
    if (count_++ == 0) total_ = static_cast<double>(all);
    const double scale = all == 0 ? 1 : total_ / static_cast<double>(all);
    for (const std::uint64_t tokens : counts) {
      tokens_.push_back(static_cast<double>(tokens) * scale);
    }
  }
}

double WindowShares::Peak(const SearchGround& ground, std::span<const std::int32_t> slots) const {
  std::vector<std::uint32_t> replicas(experts_, 0);
  for (const std::int32_t e : slots) {
    if (e != kNoExpert) ++replicas[static_cast<std::size_t>(e)];
  }
  double peak = 0;
  for (std::uint32_t w = 0; w < count_; ++w) {
    std::size_t slot = 0;
    for (std::uint32_t d = 0; d < ground.size(); ++d) {
      double load = 0;
      for (const std::size_t end = slot + ground.slots[d]; slot < end; ++slot) {
        if (slots[slot] == kNoExpert) continue;
        const auto e = static_cast<std::size_t>(slots[slot]);
        load += tokens(w)[e] / replicas[e];
      }
      peak = std::max(peak, load / ground.speed[d]);
    }
  }
  return peak;
}

}  // namespace shardwright::placement::internal
