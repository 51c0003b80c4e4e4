// SPDX-License-Identifier: Apache-2.0
#include "placement/core/types.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"

namespace shardwright::placement {
namespace {

std::string ExpertName(const TokenCounts& loads, std::uint32_t layer, std::int64_t expert) {
  return "layer " + std::to_string(loads.layer_id[layer]) + " expert " + std::to_string(expert);
}

Status Shapes(const Placement& placement, const TokenCounts& loads, const Cluster& cluster) {
  const auto differ = [](std::string_view what, std::uint64_t found, std::uint64_t expected) {
    return Fail(Errc::kMismatch, "placement: ", expected, " ", what, " expected, found ", found);
  };
  if (placement.layers != loads.layers) return differ("layers", placement.layers, loads.layers);
  if (placement.experts != loads.experts) {
    return differ("experts", placement.experts, loads.experts);
  }
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    if (placement.ExpertsOf(l) == loads.ExpertsOf(l)) continue;
    return differ(StrCat("experts in layer ", loads.layer_id[l]), placement.ExpertsOf(l),
                  loads.ExpertsOf(l));
  }
  if (placement.device_count() != cluster.device_count()) {
    return differ("gpus", placement.device_count(), cluster.device_count());
  }
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    if (placement.slot_begin[d] > placement.slot_begin[d + 1]) {
      return Fail(Errc::kBadInput, "placement: slots of gpu ", d, " run backward");
    }
  }
  const std::size_t cells = std::size_t{placement.layers} * placement.slot_count();
  if (placement.slot_expert.size() != cells || placement.slot_begin.front() != 0) {
    return differ("slots over all layers", placement.slot_expert.size(), cells);
  }
  return {};
}

Status OnDevice(const Placement& placement, const TokenCounts& loads, const Cluster& cluster,
                const Rules& rules, std::uint32_t layer, std::uint32_t device) {
  const std::span<const std::int32_t> slots = placement.slots(layer, device);
  std::uint64_t used = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::int32_t expert = slots[i];
    if (expert == kNoExpert) continue;
    ++used;
    if (expert < 0 || static_cast<std::uint32_t>(expert) >= loads.ExpertsOf(layer)) {
      return Fail(Errc::kBadInput, ExpertName(loads, layer, expert), ": no such expert, there are ",
                  loads.ExpertsOf(layer));
    }
    if (rules.no_device_duplicates &&
        std::find(slots.begin(), slots.begin() + static_cast<std::ptrdiff_t>(i), expert) !=
            slots.begin() + static_cast<std::ptrdiff_t>(i)) {
      return Fail(Errc::kInfeasible, ExpertName(loads, layer, expert), ": has two replicas on ",
                  GpuName(cluster, device));
    }
  }
  if (used != 0 && rules.copies_min > 0 && !cluster.alive(device)) {
    return Fail(Errc::kBadInput, GpuName(cluster, device), ": holds experts of layer ",
                loads.layer_id[layer], " but is dead");
  }
  if (rules.cluster_slots && used > cluster.devices[device].slots) {
    return Fail(Errc::kBadInput, GpuName(cluster, device), ": ", used, " experts of layer ",
                loads.layer_id[layer], ", room for ", cluster.devices[device].slots);
  }
  return {};
}

// Verifies the number of distinct live nodes per expert. Copies on one node count once.
Status Copies(const Placement& placement, const TokenCounts& loads, const Cluster& cluster,
              const Rules& rules, std::uint32_t layer) {
  const std::uint32_t experts = loads.ExpertsOf(layer);
  std::vector<std::uint32_t> count(experts, 0);
  std::vector<std::uint32_t> last(experts, cluster.node_count());
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    const std::uint32_t node = cluster.devices[d].node;
    if (!cluster.alive(d)) continue;
    for (const std::int32_t expert : placement.slots(layer, d)) {
      if (expert == kNoExpert || last[static_cast<std::size_t>(expert)] == node) continue;
      last[static_cast<std::size_t>(expert)] = node;
      ++count[static_cast<std::size_t>(expert)];
    }
  }
  const std::uint32_t needed = std::max(rules.copies_min, rules.all_experts ? 1U : 0U);
  for (std::uint32_t e = 0; e < experts; ++e) {
    if (count[e] < needed) {
      return Fail(Errc::kInfeasible, ExpertName(loads, layer, e), ": on ", count[e],
                  " live nodes, ", needed, " needed");
    }
  }
  return {};
}

}  // namespace

std::string GpuName(const Cluster& cluster, std::uint32_t device) {
  const std::uint32_t node = cluster.devices[device].node;
  return "node \"" + cluster.nodes[node].name + "\" gpu " +
         std::to_string(device - cluster.device_first(node));
}

std::uint32_t Cluster::device_first(std::uint32_t node) const {
  const auto at = std::lower_bound(devices.begin(), devices.end(), node,
                                   [](const Device& d, std::uint32_t n) { return d.node < n; });
  return static_cast<std::uint32_t>(at - devices.begin());
}

std::uint64_t Cluster::node_slots(std::uint32_t node) const {
  std::uint64_t slots = 0;
  for (std::uint32_t d = device_first(node); d < devices.size() && devices[d].node == node; ++d) {
    slots += devices[d].slots;
  }
  return slots;
}

std::uint64_t Cluster::live_slots() const {
  std::uint64_t slots = 0;
  for (const Device& device : devices) slots += nodes[device.node].alive ? device.slots : 0;
  return slots;
}

std::uint32_t Cluster::live_nodes() const {
  return static_cast<std::uint32_t>(
      std::count_if(nodes.begin(), nodes.end(), [](const Node& n) { return n.alive; }));
}

std::vector<double> RelativeSpeeds(const Cluster& cluster) {
  double sum = 0;
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (cluster.holds(d)) sum += cluster.devices[d].speed;
  }
  const double live = cluster.live_devices();
  std::vector<double> speeds;
  speeds.reserve(cluster.devices.size());
  // Multiplies first, so that equal speeds give exactly 1.
  for (const Device& device : cluster.devices) {
    speeds.push_back(sum > 0 ? device.speed * live / sum : 1);
  }
  return speeds;
}

std::uint32_t Cluster::live_devices() const {
  std::uint32_t count = 0;
  for (std::uint32_t d = 0; d < device_count(); ++d) count += holds(d) ? 1 : 0;
  return count;
}

Cluster UniformCluster(std::uint32_t nodes, std::uint32_t devices_per_node,
                       std::uint32_t slots_per_device) {
  Cluster cluster;
  cluster.racks = {"rack0"};
  for (std::uint32_t n = 0; n < nodes; ++n) {
    cluster.nodes.push_back({"node" + std::to_string(n), 0, true});
    for (std::uint32_t d = 0; d < devices_per_node; ++d) {
      cluster.devices.push_back({n, slots_per_device});
    }
  }
  return cluster;
}

Status Validate(const Cluster& cluster) {
  if (cluster.nodes.empty() || cluster.devices.empty()) {
    return Fail(Errc::kBadInput, "cluster: has no gpus");
  }
  if (cluster.nodes.size() > limits::kMoeNodes) {
    return Fail(Errc::kLimit, "cluster: ", cluster.nodes.size(), " nodes, at most ",
                limits::kMoeNodes);
  }
  if (cluster.devices.size() > limits::kMoeDevices) {
    return Fail(Errc::kLimit, "cluster: ", cluster.devices.size(), " gpus, at most ",
                limits::kMoeDevices);
  }
  for (const Node& node : cluster.nodes) {
    if (node.rack >= cluster.racks.size()) {
      return Fail(Errc::kBadInput, "node \"", node.name, "\": rack ", node.rack,
                  " does not exist, there are ", cluster.racks.size());
    }
  }
  std::uint64_t slots = 0;
  for (std::size_t d = 0; d < cluster.devices.size(); ++d) {
    const Device& device = cluster.devices[d];
    if (device.node >= cluster.nodes.size()) {
      return Fail(Errc::kBadInput, "gpu ", d, ": node ", device.node, " does not exist, there are ",
                  cluster.nodes.size());
    }
    if (d > 0 && device.node < cluster.devices[d - 1].node) {
      return Fail(Errc::kBadInput, "gpu ", d, ": belongs to node ", device.node,
                  ", but follows a gpu of node ", cluster.devices[d - 1].node);
    }
    slots += device.slots;
    if (slots > limits::kMoeSlots) {
      return Fail(Errc::kLimit, "cluster: more than ", limits::kMoeSlots, " slots per layer");
    }
  }
  if (cluster.live_slots() == 0) {
    return Fail(Errc::kInfeasible, "cluster: no live gpu has a slot");
  }
  return {};
}

Status Validate(const TokenCounts& loads, const Cluster& cluster) {
  SW_TRY(Validate(loads));
  SW_TRY(Validate(cluster));
  std::uint64_t slots = 0;
  for (const Device& device : cluster.devices) slots += device.slots;
  if (slots * loads.layers > limits::kMoeCells) {
    return Fail(Errc::kLimit, slots, " slots in each of ", loads.layers, " layers, at most ",
                limits::kMoeCells, " over all layers");
  }
  if (cluster.live_slots() < loads.experts) {
    return Fail(Errc::kInfeasible, loads.experts, " experts do not fit in ", cluster.live_slots(),
                " live slots");
  }
  return {};
}

Placement EmptyPlacement(const TokenCounts& loads, const Cluster& cluster) {
  Placement placement;
  placement.layers = loads.layers;
  placement.experts = loads.experts;
  placement.layer_experts = loads.layer_experts;
  placement.slot_begin.reserve(cluster.devices.size() + 1);
  placement.slot_begin.push_back(0);
  for (const Device& device : cluster.devices) {
    placement.slot_begin.push_back(placement.slot_begin.back() + device.slots);
  }
  placement.slot_expert.assign(std::size_t{loads.layers} * placement.slot_count(), kNoExpert);
  return placement;
}

Status Validate(std::span<const Pin> pins, const TokenCounts& loads, const Cluster& cluster) {
  for (const Pin& pin : pins) {
    for (std::uint32_t l = 0; l < loads.layers; ++l) {
      if (pin.experts.back() < loads.ExpertsOf(l)) continue;
      return Fail(Errc::kUsage, "--pin: expert ", pin.experts.back(), " does not exist, ",
                  loads.layer_experts.empty() ? std::string("the layers have ")
                                              : StrCat("layer ", loads.layer_id[l], " has "),
                  loads.ExpertsOf(l), " experts");
    }
    if (pin.nodes.back() >= cluster.node_count()) {
      return Fail(Errc::kUsage, "--pin: node ", pin.nodes.back(),
                  " does not exist, the cluster has ", Plural(cluster.node_count(), "node"));
    }
  }
  return {};
}

Status Validate(const Placement& placement, const TokenCounts& loads, const Cluster& cluster,
                const Rules& rules) {
  SW_TRY(Shapes(placement, loads, cluster));
  for (std::uint32_t l = 0; l < placement.layers; ++l) {
    for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
      SW_TRY(OnDevice(placement, loads, cluster, rules, l, d));
    }
    SW_TRY(Copies(placement, loads, cluster, rules, l));
  }
  return {};
}

TokenCounts LayersOf(const TokenCounts& loads, std::span<const std::uint32_t> layers) {
  TokenCounts part;
  part.layers = static_cast<std::uint32_t>(layers.size());
  part.experts = loads.ExpertsOf(layers.front());
  part.iteration = loads.iteration;
  part.records = loads.records;
  part.iterations = loads.iterations;
  part.unit = loads.unit;
  part.windows.resize(loads.windows.size());
  const auto append = [](std::span<const std::uint64_t> row, std::vector<std::uint64_t>* to) {
    to->insert(to->end(), row.begin(), row.end());
  };
  for (const std::uint32_t l : layers) {
    part.layer_id.push_back(loads.layer_id[l]);
    append(loads.layer(l), &part.tokens);
    for (std::size_t w = 0; w < part.windows.size(); ++w) {
      append(loads.layer(l, w), &part.windows[w]);
    }
  }
  return part;
}

Placement LayersOf(const Placement& placement, std::span<const std::uint32_t> layers) {
  Placement part;
  part.layers = static_cast<std::uint32_t>(layers.size());
  part.experts = placement.ExpertsOf(layers.front());
  part.slot_begin = placement.slot_begin;
  part.slot_expert.reserve(layers.size() * placement.slot_count());
  for (const std::uint32_t l : layers) {
    const auto slots = placement.layer(l);
    part.slot_expert.insert(part.slot_expert.end(), slots.begin(), slots.end());
  }
  return part;
}

namespace {

std::vector<std::uint32_t> Range(std::uint32_t first, std::uint32_t last) {
  std::vector<std::uint32_t> layers(last - first);
  std::iota(layers.begin(), layers.end(), first);
  return layers;
}

}  // namespace

TokenCounts LayersOf(const TokenCounts& loads, std::uint32_t first, std::uint32_t last) {
  return LayersOf(loads, Range(first, last));
}

Placement LayersOf(const Placement& placement, std::uint32_t first, std::uint32_t last) {
  return LayersOf(placement, Range(first, last));
}

namespace {

// Joins parts. A part may have slots for its own layers only, so each device gets the widest part.
Placement Together(const std::vector<const Placement*>& parts) {
  Placement whole;
  whole.experts = parts.front()->experts;
  whole.slot_begin.assign(1, 0);
  for (std::uint32_t d = 0; d < parts.front()->device_count(); ++d) {
    std::uint32_t widest = 0;
    for (const Placement* part : parts) {
      widest = std::max(widest, part->slot_begin[d + 1] - part->slot_begin[d]);
    }
    whole.slot_begin.push_back(whole.slot_begin.back() + widest);
  }
  for (const Placement* part : parts) whole.layers += part->layers;
  whole.slot_expert.assign(std::size_t{whole.layers} * whole.slot_count(), kNoExpert);
  std::uint32_t layer = 0;
  for (const Placement* part : parts) {
    for (std::uint32_t l = 0; l < part->layers; ++l, ++layer) {
      for (std::uint32_t d = 0; d < whole.device_count(); ++d) {
        const auto slots = part->slots(l, d);
        std::copy(slots.begin(), slots.end(), whole.slots(layer, d).begin());
      }
    }
  }
  return whole;
}

}  // namespace

StrategyResult Join(std::vector<StrategyResult> parts) {
  StrategyResult whole;
  std::vector<const Placement*> placements;
  std::vector<const Placement*> owners;
  for (StrategyResult& part : parts) {
    placements.push_back(&part.placement);
    if (part.owners) owners.push_back(&*part.owners);
    whole.notes.insert(whole.notes.end(), part.notes.begin(), part.notes.end());
    std::move(part.choices.begin(), part.choices.end(), std::back_inserter(whole.choices));
    for (std::string& warning : part.warnings) {
      if (std::find(whole.warnings.begin(), whole.warnings.end(), warning) ==
          whole.warnings.end()) {
        whole.warnings.push_back(std::move(warning));
      }
    }
  }
  whole.placement = Together(placements);
  if (owners.size() == parts.size()) whole.owners = Together(owners);
  return whole;
}

}  // namespace shardwright::placement
