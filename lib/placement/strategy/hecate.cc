// SPDX-License-Identifier: Apache-2.0
#include "placement/strategy/hecate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

namespace shardwright::placement {
namespace {

__extension__ using Wide = unsigned __int128;

// Free slots for foreign experts while a layer is materialized.
class Spare {
 public:
  Spare(const LiveDevices& devices, std::vector<std::uint32_t> on_device, const StopCheck& stop)
      : devices_(devices),
        stop_(stop),
        on_device_(std::move(on_device)),
        on_node_(devices.nodes, 0),
        copies_(devices.nodes, 0) {
    for (std::uint32_t d = 0; d < devices.size(); ++d) on_node_[devices.node[d]] += on_device_[d];
  }

  std::uint64_t slots() const {
    return std::accumulate(on_node_.begin(), on_node_.end(), std::uint64_t{0});
  }

  // Copies an expert, now on the devices `holders`, to up to `count` other devices.
  std::uint64_t Copy(std::uint64_t count, std::vector<std::uint32_t>* holders) {
    std::fill(copies_.begin(), copies_.end(), 0U);
    for (const std::uint32_t d : *holders) ++copies_[devices_.node[d]];
    std::uint64_t done = 0;
    while (done < count && !Stopped(stop_)) {
      const std::uint32_t best = Best(*holders);
      if (best == devices_.size()) break;
      holders->push_back(best);
      --on_device_[best];
      --on_node_[devices_.node[best]];
      ++copies_[devices_.node[best]];
      ++done;
    }
    std::sort(holders->begin(), holders->end());
    return done;
  }

 private:
  // Prefers the node with fewest copies, then most free slots on node and device, then lowest id.
  std::uint32_t Best(const std::vector<std::uint32_t>& holders) const {
    std::uint32_t best = devices_.size();
    const auto key = [&](std::uint32_t d) {
      const std::uint32_t node = devices_.node[d];
      return std::tuple(copies_[node], ~on_node_[node], ~on_device_[d], d);
    };
    for (std::uint32_t d = 0; d < devices_.size(); ++d) {
      if (on_device_[d] == 0 || std::find(holders.begin(), holders.end(), d) != holders.end()) {
        continue;
      }
      if (best == devices_.size() || key(d) < key(best)) best = d;
    }
    return best;
  }

  const LiveDevices& devices_;
  const StopCheck& stop_;
  std::vector<std::uint32_t> on_device_;
  std::vector<std::uint64_t> on_node_;
  std::vector<std::uint32_t> copies_;  // of the current expert, by node
};

// Copies the `count` hottest experts in proportion to their tokens. If every device has room
// for all of them, every device gets all of them.
void CopyHottest(std::span<const std::uint64_t> tokens, std::uint32_t count, Spare places,
                 std::uint32_t devices, std::vector<std::vector<std::uint32_t>>* holders) {
  const std::vector<std::uint32_t> hot = HottestExperts(tokens, count);
  std::uint64_t slots = places.slots();
  std::uint64_t left = 0;
  for (const std::uint32_t e : hot) left += tokens[e];
  for (std::size_t i = 0; i < hot.size(); ++i) {
    const std::uint64_t mine = tokens[hot[i]];
    const std::uint64_t share =
        left > 0 ? static_cast<std::uint64_t>(Wide{slots} * mine / left) : slots / (hot.size() - i);
    slots -= places.Copy(std::min<std::uint64_t>(share, devices - 1), &(*holders)[hot[i]]);
    left -= mine;
  }
}

// Returns the seconds of a layer: the busiest device plus the traffic between nodes, with near
// replicas first and an even share of tokens on every device.
double LayerSeconds(const std::vector<std::vector<std::uint32_t>>& holders,
                    std::span<const std::uint64_t> tokens, const LiveDevices& devices,
                    const CalibrationCost& cost) {
  std::vector<double> load(devices.size(), 0);
  std::vector<std::uint32_t> width(devices.nodes, 0);
  for (const std::uint32_t node : devices.node) ++width[node];
  double crossing = 0;
  for (std::size_t e = 0; e < holders.size(); ++e) {
    const auto t = static_cast<double>(tokens[e]);
    std::uint32_t near = 0;
    std::uint32_t last = devices.nodes;
    for (const std::uint32_t d : holders[e]) {
      load[d] += t / static_cast<double>(holders[e].size());
      if (devices.node[d] != last) near += width[devices.node[d]];
      last = devices.node[d];
    }
    crossing += t * (devices.size() - near) / devices.size();
  }
  const double busiest = *std::max_element(load.begin(), load.end());
  const double traffic =
      cost.bytes_per_s > 0 ? crossing * cost.bytes_per_token / cost.bytes_per_s : 0;
  return busiest * cost.seconds_per_token + traffic;
}

}  // namespace

std::uint32_t OverlapDegree(double nonmoe_seconds, double bytes_per_s, std::uint64_t expert_bytes) {
  if (!(nonmoe_seconds > 0) || !(bytes_per_s > 0) || expert_bytes == 0) return 0;
  const double degree =
      std::floor(nonmoe_seconds * bytes_per_s / static_cast<double>(expert_bytes));
  constexpr double kMost = std::numeric_limits<std::uint32_t>::max();
  return static_cast<std::uint32_t>(std::min(degree, kMost));
}

LiveDevices::LiveDevices(const Cluster& cluster) {
  std::uint32_t last = cluster.node_count();
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    if (cluster.devices[d].node != last) ++nodes;
    last = cluster.devices[d].node;
    device.push_back(d);
    node.push_back(nodes - 1);
    slots.push_back(cluster.devices[d].slots);
  }
}

std::uint32_t LiveDevices::LeastSlots() const {
  return slots.empty() ? ~0U : *std::min_element(slots.begin(), slots.end());
}

std::vector<std::uint32_t> HottestExperts(std::span<const std::uint64_t> tokens,
                                          std::uint32_t count) {
  std::vector<std::uint32_t> order(tokens.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return tokens[a] > tokens[b]; });
  order.resize(std::min<std::size_t>(count, order.size()));
  return order;
}

std::vector<std::vector<std::uint32_t>> Materialize(std::span<const std::uint32_t> owner,
                                                    std::span<const std::uint64_t> tokens,
                                                    const LiveDevices& devices,
                                                    std::uint32_t overlap,
                                                    std::span<const std::uint32_t> spare,
                                                    const StopCheck& stop) {
  const auto experts = static_cast<std::uint32_t>(owner.size());
  const std::uint32_t t = std::min(overlap, experts);
  std::vector<std::vector<std::uint32_t>> holders(experts);
  for (std::uint32_t e = 0; e < experts; ++e) holders[e] = {owner[e]};
  std::vector<std::uint32_t> places(spare.begin(), spare.end());
  for (std::uint32_t& place : places) place = std::min(place, t);
  CopyHottest(tokens, t, Spare(devices, std::move(places), stop), devices.size(), &holders);
  return holders;
}

SparseVolumes VolumesOf(std::span<const std::uint32_t> owner,
                        const std::vector<std::vector<std::uint32_t>>& holders,
                        std::uint32_t device_count) {
  SparseVolumes volumes;
  volumes.in.assign(device_count, 0);
  volumes.out.assign(device_count, 0);
  for (std::size_t e = 0; e < owner.size(); ++e) {
    const auto count = static_cast<double>(holders[e].size());
    if (holders[e].size() > 1) ++volumes.bound;
    volumes.all_reduce += 2 * (count - 1) / count;
    for (const std::uint32_t d : holders[e]) {
      if (d == owner[e]) continue;
      ++volumes.in[d];
      ++volumes.out[owner[e]];
    }
  }
  volumes.copied_share = static_cast<double>(volumes.bound) / static_cast<double>(owner.size());
  return volumes;
}

Calibrated Calibrate(std::span<const std::uint32_t> owner,
                     const std::vector<std::vector<std::uint32_t>>& planned,
                     std::span<const std::uint64_t> true_tokens, const LiveDevices& devices,
                     std::uint32_t overlap, std::span<const std::uint32_t> spare,
                     const CalibrationCost& cost) {
  // Slots that the planned copies leave free.
  std::vector<std::uint32_t> free(spare.begin(), spare.end());
  for (std::size_t e = 0; e < planned.size(); ++e) {
    for (const std::uint32_t d : planned[e]) {
      if (d != owner[e] && free[d] > 0) --free[d];
    }
  }
  auto again = planned;
  const auto experts = static_cast<std::uint32_t>(planned.size());
  CopyHottest(true_tokens, std::min(overlap, experts), Spare(devices, std::move(free), {}),
              devices.size(), &again);
  std::vector<std::uint64_t> extra(devices.size(), 0);  // additional bytes to receive by device
  for (std::size_t e = 0; e < again.size(); ++e) {
    for (const std::uint32_t d : again[e]) {
      if (!std::binary_search(planned[e].begin(), planned[e].end(), d)) {
        extra[d] += cost.expert_bytes;
      }
    }
  }
  const std::uint64_t most = *std::max_element(extra.begin(), extra.end());
  const double copying = cost.bytes_per_s > 0 ? static_cast<double>(most) / cost.bytes_per_s : 0;
  const double before = LayerSeconds(planned, true_tokens, devices, cost);
  if (LayerSeconds(again, true_tokens, devices, cost) + copying < before) {
    return {std::move(again), true};
  }
  return {planned, false};
}

}  // namespace shardwright::placement
