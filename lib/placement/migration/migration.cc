// SPDX-License-Identifier: Apache-2.0
#include "placement/migration/migration.h"

#include <algorithm>
#include <string>
#include <utility>

#include "placement/core/device_lists.h"
#include "placement/migration/rounds_internal.h"
#include "support/base/checked.h"

namespace shardwright::placement {
namespace {

// An expert that devices of a node need but do not have in the current placement.
struct Need {
  std::uint32_t layer = 0;
  std::uint32_t expert = 0;
  std::uint32_t node = 0;
  std::uint32_t first = 0;  // devices of the node that need it: [first, last) of `devices`
  std::uint32_t last = 0;
  std::uint32_t owners = 0;  // live nodes that have it now
};

bool Has(std::span<const std::int32_t> slots, std::uint32_t expert) {
  return std::find(slots.begin(), slots.end(), static_cast<std::int32_t>(expert)) != slots.end();
}

class Planner {
 public:
  Planner(const Placement& current, const Placement& next, const Cluster& cluster)
      : current_(current),
        next_(next),
        cluster_(cluster),
        node_out_(cluster.node_count(), 0),
        node_in_(cluster.node_count(), 0),
        device_out_(cluster.device_count(), 0) {}

  Status Run(const StopCheck& stop, Migration* migration) {
    holders_.reserve(current_.layers);
    for (std::uint32_t l = 0; l < current_.layers; ++l) {
      SW_TRY(CheckStop(stop));
      holders_.push_back(HeldReplicas(current_, cluster_, l));
      FindNeeds(l, migration);
    }
    // Serves rare experts first, since they have the fewest senders to choose from.
    std::sort(needs_.begin(), needs_.end(), [](const Need& a, const Need& b) {
      return std::tie(a.owners, a.layer, a.expert, a.node) <
             std::tie(b.owners, b.layer, b.expert, b.node);
    });
    for (const Need& need : needs_) {
      SW_TRY(CheckStop(stop));
      Serve(need, migration);
    }
    return {};
  }

 private:
  std::uint32_t node(std::uint32_t device) const { return cluster_.devices[device].node; }

  std::uint32_t OwnerNodes(std::uint32_t layer, std::uint32_t expert) const {
    std::uint32_t count = 0;
    std::uint32_t last = cluster_.node_count();
    for (const Held& held : holders_[layer][expert]) {
      count += node(held.device) != last ? 1 : 0;
      last = node(held.device);
    }
    return count;
  }

  void FindNeeds(std::uint32_t layer, Migration* migration) {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> wanted;  // expert, device
    for (std::uint32_t d = 0; d < next_.device_count(); ++d) {
      if (!cluster_.alive(d)) continue;
      const auto slots = next_.slots(layer, d);
      for (std::size_t i = 0; i < slots.size(); ++i) {
        const std::int32_t e = slots[i];
        const auto end = slots.begin() + static_cast<std::ptrdiff_t>(i);
        if (e == kNoExpert || std::find(slots.begin(), end, e) != end) continue;
        const auto expert = static_cast<std::uint32_t>(e);
        if (!Has(current_.slots(layer, d), expert)) wanted.emplace_back(expert, d);
      }
    }
    std::sort(wanted.begin(), wanted.end());
    std::uint32_t lost = next_.experts;
    for (std::size_t i = 0; i < wanted.size();) {
      const std::uint32_t expert = wanted[i].first;
      Need need{layer, expert, node(wanted[i].second), 0, 0, OwnerNodes(layer, expert)};
      need.first = static_cast<std::uint32_t>(devices_.size());
      for (; i < wanted.size() && wanted[i].first == expert && node(wanted[i].second) == need.node;
           ++i) {
        devices_.push_back(wanted[i].second);
      }
      need.last = static_cast<std::uint32_t>(devices_.size());
      if (need.owners > 0) {
        needs_.push_back(need);
      } else if (lost != expert) {
        lost = expert;
        migration->lost.push_back({layer, expert});
      }
    }
  }

  // Serves the first device from the least loaded sender, inside the node if there is one, and
  // the node's other devices from inside the node.
  void Serve(const Need& need, Migration* migration) {
    std::vector<std::uint32_t> inside;
    for (const Held& held : holders_[need.layer][need.expert]) {
      if (node(held.device) == need.node) inside.push_back(held.device);
    }
    for (std::uint32_t i = need.first; i < need.last; ++i) {
      const std::uint32_t to = devices_[i];
      const bool outside = inside.empty();
      const std::uint32_t from = outside ? BestOwner(need) : LeastOut(inside);
      if (outside) {
        ++node_out_[node(from)];
        ++node_in_[need.node];
      }
      ++device_out_[from];
      inside.push_back(to);
      migration->transfers.push_back({need.layer, need.expert, from, to, 0, ReachOf(from, to)});
    }
  }

  std::uint32_t LeastOut(const std::vector<std::uint32_t>& devices) const {
    return *std::min_element(devices.begin(), devices.end(), [&](std::uint32_t a, std::uint32_t b) {
      return std::tie(device_out_[a], a) < std::tie(device_out_[b], b);
    });
  }

  std::uint32_t BestOwner(const Need& need) const {
    const auto& holders = holders_[need.layer][need.expert];
    const std::uint32_t rack = cluster_.nodes[need.node].rack;
    const auto key = [&](const Held& held) {
      const std::uint32_t from = node(held.device);
      return std::tuple(node_out_[from], cluster_.nodes[from].rack != rack, from,
                        device_out_[held.device], held.device);
    };
    return std::ranges::min_element(holders, {}, key)->device;
  }

  Reach ReachOf(std::uint32_t from, std::uint32_t to) const {
    if (node(from) == node(to)) return Reach::kNode;
    const bool near = cluster_.nodes[node(from)].rack == cluster_.nodes[node(to)].rack;
    return near ? Reach::kRack : Reach::kCluster;
  }

  const Placement& current_;
  const Placement& next_;
  const Cluster& cluster_;
  std::vector<std::vector<std::vector<Held>>> holders_;  // [layer][expert]
  std::vector<Need> needs_;
  std::vector<std::uint32_t> devices_;
  std::vector<std::uint64_t> node_out_, node_in_, device_out_;  // transfers so far
};

double BytesPerSecond(const Cluster& cluster, Reach reach) {
  switch (reach) {
    case Reach::kNode:
      return cluster.device_bytes_per_s;
    case Reach::kRack:
      return cluster.node_bytes_per_s;
    case Reach::kCluster:
      return cluster.rack_bytes_per_s;
  }
  return 0;
}

// Adds the times of the rounds, each that of its slowest transfer; 0 if a bandwidth is unknown.
double Seconds(const Migration& migration, const Cluster& cluster) {
  std::vector<double> longest(migration.rounds, 0);
  for (const Transfer& transfer : migration.transfers) {
    const double rate = BytesPerSecond(cluster, transfer.reach);
    if (rate <= 0) return 0;
    longest[transfer.round] =
        std::max(longest[transfer.round], static_cast<double>(cluster.expert_bytes) / rate);
  }
  double sum = 0;
  for (const double round : longest) sum += round;
  return sum;
}

Status CountBytes(const Cluster& cluster, Migration* migration) {
  // There are fewer transfers than slots over all layers, which are limited, so only the
  // product can overflow.
  SW_TRY(CheckedMul(migration->transfers.size(), cluster.expert_bytes));
  migration->node_in_bytes.assign(cluster.node_count(), 0);
  migration->node_out_bytes.assign(cluster.node_count(), 0);
  for (const Transfer& transfer : migration->transfers) {
    migration->bytes += cluster.expert_bytes;
    if (transfer.reach == Reach::kNode) continue;
    ++migration->inter_node_transfers;
    migration->inter_node_bytes += cluster.expert_bytes;
    if (transfer.reach == Reach::kCluster) migration->inter_rack_bytes += cluster.expert_bytes;
    migration->node_out_bytes[cluster.devices[transfer.from].node] += cluster.expert_bytes;
    migration->node_in_bytes[cluster.devices[transfer.to].node] += cluster.expert_bytes;
  }
  return {};
}

}  // namespace

Result<Migration> PlanMigration(const Placement& current, const Placement& next,
                                const Cluster& cluster, const MigrationOptions& options) {
  if (current.layers != next.layers || current.experts != next.experts ||
      current.layer_experts != next.layer_experts ||
      current.device_count() != next.device_count() ||
      next.device_count() != cluster.device_count()) {
    return Fail(Errc::kMismatch, "migration: ", next.layers, " layers of ", next.experts,
                " experts on ", next.device_count(), " gpus expected, found ", current.layers,
                " of ", current.experts, " on ", current.device_count());
  }
  Migration migration;
  SW_TRY(Planner(current, next, cluster).Run(options.stop, &migration));
  if (options.forward) {
    internal::ForwardInRounds(current, cluster, options.stop, &migration);
  } else {
    internal::ColorRounds(cluster, options.stop, &migration);
  }
  SW_TRY(CheckStop(options.stop));
  std::sort(migration.transfers.begin(), migration.transfers.end(),
            [](const Transfer& a, const Transfer& b) {
              return std::tie(a.round, a.from, a.to, a.layer, a.expert) <
                     std::tie(b.round, b.from, b.to, b.layer, b.expert);
            });
  SW_TRY(CountBytes(cluster, &migration));
  migration.seconds = Seconds(migration, cluster);
  return migration;
}

}  // namespace shardwright::placement
