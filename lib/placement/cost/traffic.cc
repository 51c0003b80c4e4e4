// SPDX-License-Identifier: Apache-2.0
#include "placement/cost/traffic.h"

#include <algorithm>

#include "placement/core/device_lists.h"

namespace shardwright::placement {

LinkTraffic::LinkTraffic(const Cluster& cluster)
    : gpu_in(cluster.device_count(), 0),
      gpu_out(cluster.device_count(), 0),
      node_in(cluster.node_count(), 0),
      node_out(cluster.node_count(), 0),
      rack_in(cluster.racks.size(), 0),
      rack_out(cluster.racks.size(), 0) {}

double LinkTraffic::Seconds(const Cluster& cluster, double unit_bytes) const {
  double longest = 0;
  const auto add = [&](const std::vector<double>& amounts, double bytes_per_s) {
    if (bytes_per_s <= 0 || amounts.empty()) return;
    const double most = *std::max_element(amounts.begin(), amounts.end());
    longest = std::max(longest, most * unit_bytes / bytes_per_s);
  };
  add(gpu_in, cluster.device_bytes_per_s);
  add(gpu_out, cluster.device_bytes_per_s);
  add(node_in, cluster.node_bytes_per_s);
  add(node_out, cluster.node_bytes_per_s);
  add(rack_in, cluster.rack_bytes_per_s);
  add(rack_out, cluster.rack_bytes_per_s);
  return longest;
}

namespace {

/// Returns the distinct groups (nodes or racks) of GPUs, in ascending order.
template <class GroupOf>
std::vector<std::uint32_t> GroupsOf(const std::vector<std::uint32_t>& devices,
                                    const GroupOf& group_of) {
  std::vector<std::uint32_t> groups;
  groups.reserve(devices.size());
  for (const std::uint32_t d : devices) groups.push_back(group_of(d));
  std::sort(groups.begin(), groups.end());
  groups.erase(std::unique(groups.begin(), groups.end()), groups.end());
  return groups;
}

/// The GPUs with a replica of one expert, by the links between them.
class Group {
 public:
  /// \param devices  ascending, distinct, not empty
  Group(std::vector<std::uint32_t> devices, const Cluster& cluster)
      : devices_(std::move(devices)), cluster_(cluster) {}

  /// Passes one unit from `owner`, a device of the group, to all others along chains.
  void AddChains(std::uint32_t owner, LinkTraffic* traffic) const {
    const std::uint32_t owner_node = cluster_.devices[owner].node;
    AddChain(Racks(), cluster_.nodes[owner_node].rack, &traffic->rack_in, &traffic->rack_out);
    AddChain(Nodes(), owner_node, &traffic->node_in, &traffic->node_out);
    ForEachNode([&](const std::vector<std::uint32_t>& on_node) {
      const bool owned = cluster_.devices[on_node.front()].node == owner_node;
      AddChain(on_node, owned ? owner : on_node.front(), &traffic->gpu_in, &traffic->gpu_out);
    });
  }

  /// Adds up one unit among all members along rings.
  void AddRings(LinkTraffic* traffic) const {
    AddRing(Racks(), &traffic->rack_in, &traffic->rack_out);
    AddRing(Nodes(), &traffic->node_in, &traffic->node_out);
    ForEachNode([&](const std::vector<std::uint32_t>& on_node) {
      AddRing(on_node, &traffic->gpu_in, &traffic->gpu_out);
    });
  }

 private:
  std::vector<std::uint32_t> Nodes() const {
    return GroupsOf(devices_, [&](std::uint32_t d) { return cluster_.devices[d].node; });
  }
  std::vector<std::uint32_t> Racks() const {
    return GroupsOf(devices_,
                    [&](std::uint32_t d) { return cluster_.nodes[cluster_.devices[d].node].rack; });
  }

  template <class Act>
  void ForEachNode(const Act& act) const {
    std::vector<std::uint32_t> on_node;
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      on_node.push_back(devices_[i]);
      const bool last = i + 1 == devices_.size() || cluster_.devices[devices_[i + 1]].node !=
                                                        cluster_.devices[devices_[i]].node;
      if (!last) continue;
      act(on_node);
      on_node.clear();
    }
  }

  /// Every member but `first` receives one unit, and every member but the last one sends it on.
  static void AddChain(const std::vector<std::uint32_t>& members, std::uint32_t first,
                       std::vector<double>* in, std::vector<double>* out) {
    if (members.size() < 2) return;
    const std::uint32_t last =
        members.back() == first ? members[members.size() - 2] : members.back();
    for (const std::uint32_t member : members) {
      if (member != first) (*in)[member] += 1;
      if (member != last) (*out)[member] += 1;
    }
  }

  static void AddRing(const std::vector<std::uint32_t>& members, std::vector<double>* in,
                      std::vector<double>* out) {
    const auto count = static_cast<double>(members.size());
    for (const std::uint32_t member : members) {
      (*in)[member] += 2 * (count - 1) / count;
      (*out)[member] += 2 * (count - 1) / count;
    }
  }

  const std::vector<std::uint32_t> devices_;
  const Cluster& cluster_;
};

std::vector<std::uint32_t> DevicesOf(const std::vector<Held>& held) {
  std::vector<std::uint32_t> devices;
  devices.reserve(held.size());
  for (const Held& one : held) devices.push_back(one.device);
  return devices;
}

}  // namespace

LinkTraffic GatherTraffic(const Placement& placement, const Placement& owners,
                          const Cluster& cluster, std::uint32_t layer) {
  LinkTraffic traffic(cluster);
  const auto holders = HeldReplicas(placement, cluster, layer);
  const auto owned = HeldReplicas(owners, cluster, layer);
  for (std::size_t e = 0; e < holders.size(); ++e) {
    if (owned[e].empty()) continue;
    const std::uint32_t owner = owned[e].front().device;
    std::vector<std::uint32_t> devices = DevicesOf(holders[e]);
    const auto at = std::lower_bound(devices.begin(), devices.end(), owner);
    if (at == devices.end() || *at != owner) devices.insert(at, owner);
    Group(std::move(devices), cluster).AddChains(owner, &traffic);
  }
  return traffic;
}

LinkTraffic AllReduceTraffic(const Placement& placement, const Cluster& cluster,
                             std::uint32_t layer) {
  LinkTraffic traffic(cluster);
  for (const std::vector<Held>& held : HeldReplicas(placement, cluster, layer)) {
    if (held.size() > 1) Group(DevicesOf(held), cluster).AddRings(&traffic);
  }
  return traffic;
}

}  // namespace shardwright::placement
