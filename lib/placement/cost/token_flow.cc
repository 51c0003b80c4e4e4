// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "placement/core/device_lists.h"
#include "placement/cost/traffic.h"

namespace shardwright::placement {
namespace {

/// Adds up the flow of a layer, expert by expert. Tokens that do not stay on their GPU, or with
/// kTopology on their node, form a pool, which is divided among the GPUs with the expert. Nodes
/// and GPUs without the expert all send the same amounts, which are added once at the end. An
/// expert then takes time in proportion to its replicas.
class FlowBuilder {
 public:
  FlowBuilder(const Cluster& cluster, DispatchMethod method)
      : cluster_(cluster),
        method_(method),
        devices_(cluster.live_devices()),
        node_devices_(cluster.node_count(), 0),
        rack_devices_(cluster.racks.size(), 0),
        node_common_(cluster.node_count(), 0),
        rack_kept_(cluster.racks.size(), 0),
        rack_share_(cluster.racks.size(), 0),
        flow_{std::vector<double>(cluster.device_count(), 0), LinkTraffic(cluster)} {
    for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
      if (!cluster.holds(d)) continue;
      const std::uint32_t node = cluster.devices[d].node;
      node_devices_[node] += 1;
      rack_devices_[cluster.nodes[node].rack] += 1;
    }
  }

  /// Adds the tokens of an expert.
  /// \pre there is at least one replica
  void Add(double tokens, const std::vector<Held>& held) {
    each_ = tokens / devices_;
    common_ += each_;
    pool_ = 0;
    nodes_.clear();
    if (method_ == DispatchMethod::kProportional) {
      ShareInProportion(tokens, held);
    } else {
      ShareByTopology(tokens, held);
    }
    CrossNodes();
    CrossRacks();
  }

  /// Returns the flow of all experts.
  TokenFlow Finish() {
    LinkTraffic& traffic = flow_.traffic;
    for (std::uint32_t n = 0; n < node_devices_.size(); ++n) {
      traffic.node_out[n] = Rounded(traffic.node_out[n] + node_devices_[n] * common_);
    }
    for (std::uint32_t r = 0; r < rack_devices_.size(); ++r) {
      traffic.rack_out[r] = Rounded(traffic.rack_out[r] + rack_devices_[r] * common_);
    }
    for (std::uint32_t d = 0; d < cluster_.device_count(); ++d) {
      const double common = cluster_.holds(d) ? node_common_[cluster_.devices[d].node] : 0;
      traffic.gpu_out[d] = Rounded(traffic.gpu_out[d] + common);
    }
    return std::move(flow_);
  }

 private:
  /// A node with the expert.
  struct OnNode {
    std::uint32_t node = 0;
    double over = 0;   ///< tokens of its GPUs in the pool
    double share = 0;  ///< share of the pool that its GPUs take
  };

  /// Removes the rounding errors of totals that are 0.
  double Rounded(double tokens) const { return tokens > common_ * devices_ * 1e-12 ? tokens : 0; }

  double Supply(std::uint32_t device) const { return cluster_.holds(device) ? each_ : 0; }

  void ShareInProportion(double tokens, const std::vector<Held>& held) {
    double replicas = 0;
    for (const Held& one : held) replicas += one.replicas;
    std::vector<double> over(held.size());
    std::vector<double> share(held.size());
    pool_ = tokens;
    for (std::size_t i = 0; i < held.size(); ++i) {
      const double capacity = tokens * held[i].replicas / replicas;
      const double kept = std::min(capacity, Supply(held[i].device));
      flow_.tokens[held[i].device] += capacity;
      over[i] = Supply(held[i].device) - kept;
      share[i] = capacity - kept;
      pool_ -= kept;
    }
    // All tokens of the pool fit in the free capacity.
    if (pool_ <= tokens * 1e-12) pool_ = 0;
    for (double& one : share) one = pool_ > 0 ? one / pool_ : 0;
    for (std::size_t first = 0; first < held.size();) {
      const std::uint32_t node = cluster_.devices[held[first].device].node;
      std::size_t end = first;
      OnNode on{node, node_devices_[node] * each_, 0};
      for (; end < held.size() && cluster_.devices[held[end].device].node == node; ++end) {
        on.share += share[end];
        on.over += over[end] - Supply(held[end].device);
      }
      // GPUs without the expert have all their tokens in the pool.
      node_common_[node] += each_ * on.share;
      for (; first < end; ++first) {
        const std::uint32_t d = held[first].device;
        flow_.traffic.gpu_out[d] += over[first] * (on.share - share[first]) - Supply(d) * on.share;
        flow_.traffic.gpu_in[d] += (on.over - over[first]) * share[first];
      }
      nodes_.push_back(on);
    }
  }

  void ShareByTopology(double tokens, const std::vector<Held>& held) {
    const auto holders = static_cast<double>(held.size());
    pool_ = tokens;
    for (std::size_t first = 0; first < held.size();) {
      const std::uint32_t node = cluster_.devices[held[first].device].node;
      std::size_t end = first;
      double own = 0;
      for (; end < held.size() && cluster_.devices[held[end].device].node == node; ++end) {
        own += Supply(held[end].device);
      }
      const auto count = static_cast<double>(end - first);
      const double all = node_devices_[node] * each_;
      const double near = (all - own) / count;
      pool_ -= all;
      node_common_[node] += each_;
      for (; first < end; ++first) {
        const std::uint32_t d = held[first].device;
        flow_.tokens[d] += Supply(d) + near;
        flow_.traffic.gpu_out[d] -= Supply(d);
        flow_.traffic.gpu_in[d] += near;
      }
      nodes_.push_back({node, 0, count / holders});
    }
    if (pool_ <= tokens * 1e-12) pool_ = 0;
    for (const Held& one : held) flow_.tokens[one.device] += pool_ / holders;
  }

  void CrossNodes() {
    LinkTraffic& traffic = flow_.traffic;
    for (const OnNode& on : nodes_) {
      traffic.node_out[on.node] += on.over * (1 - on.share) - node_devices_[on.node] * each_;
      traffic.node_in[on.node] += (pool_ - on.over) * on.share;
    }
  }

  void CrossRacks() {
    LinkTraffic& traffic = flow_.traffic;
    racks_.clear();
    for (const OnNode& on : nodes_) {
      const std::uint32_t rack = cluster_.nodes[on.node].rack;
      racks_.push_back(rack);
      rack_kept_[rack] += node_devices_[on.node] * each_ - on.over;
      rack_share_[rack] += on.share;
    }
    std::sort(racks_.begin(), racks_.end());
    racks_.erase(std::unique(racks_.begin(), racks_.end()), racks_.end());
    for (const std::uint32_t rack : racks_) {
      const double all = rack_devices_[rack] * each_;
      const double over = all - rack_kept_[rack];
      traffic.rack_out[rack] += over * (1 - rack_share_[rack]) - all;
      traffic.rack_in[rack] += (pool_ - over) * rack_share_[rack];
      rack_kept_[rack] = rack_share_[rack] = 0;
    }
  }

  const Cluster& cluster_;
  const DispatchMethod method_;
  const double devices_;              // that have tokens
  std::vector<double> node_devices_;  // by node: devices that have tokens
  std::vector<double> rack_devices_;  // by rack: the same
  std::vector<double> node_common_;   // by node: tokens that each of its devices sends inside it
  std::vector<double> rack_kept_;     // of the current expert
  std::vector<double> rack_share_;    // of the current expert
  std::vector<OnNode> nodes_;         // of the current expert
  std::vector<std::uint32_t> racks_;  // of the current expert
  double each_ = 0;                   // tokens of a device for the current expert
  double pool_ = 0;                   // tokens in the pool of the current expert
  double common_ = 0;                 // tokens that a device sends to other nodes without experts
  TokenFlow flow_;
};

}  // namespace

TokenFlow FlowOf(const Placement& placement, std::span<const std::uint64_t> tokens,
                 const Cluster& cluster, std::uint32_t layer, DispatchMethod method) {
  FlowBuilder builder(cluster, method);
  const auto holders = HeldReplicas(placement, cluster, layer);
  for (std::size_t e = 0; e < holders.size(); ++e) {
    if (holders[e].empty() || tokens[e] == 0) continue;
    builder.Add(static_cast<double>(tokens[e]), holders[e]);
  }
  return builder.Finish();
}

}  // namespace shardwright::placement
