// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "placement/migration/migration.h"
#include "support/base/checked.h"

namespace shardwright::placement {
namespace {

using Where = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;  // layer, expert, device

std::string DeviceName(const Cluster& cluster, std::uint32_t device) {
  const std::uint32_t node = cluster.devices[device].node;
  return cluster.nodes[node].name + "/gpu" + std::to_string(device - cluster.device_first(node));
}

// Returns the original device of each transfer: a forwarded copy has the first sender's bytes.
std::map<Where, std::uint32_t> Origins(const Migration& migration) {
  std::map<Where, std::uint32_t> sender;
  for (const Transfer& t : migration.transfers) sender[{t.layer, t.expert, t.to}] = t.from;
  std::map<Where, std::uint32_t> origin;
  for (const auto& [where, from] : sender) {
    const auto [layer, expert, to] = where;
    std::uint32_t device = from;
    for (auto at = sender.find({layer, expert, device}); at != sender.end();
         at = sender.find({layer, expert, device})) {
      device = at->second;
    }
    origin[where] = device;
  }
  return origin;
}

std::uint64_t SlotOf(const Placement& placement, std::uint32_t layer, std::uint32_t device,
                     std::uint32_t expert) {
  const auto slots = placement.slots(layer, device);
  const auto at = std::find(slots.begin(), slots.end(), static_cast<std::int32_t>(expert));
  return static_cast<std::uint64_t>(at - slots.begin());
}

// Builds both maps, transfer by transfer.
class Maps {
 public:
  Maps(const Placement& current, const TokenCounts& loads, const Cluster& cluster)
      : current_(current), loads_(loads), cluster_(cluster) {
    for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
      maps_.source.files.push_back(DeviceName(cluster, d));
      maps_.target.map.files.push_back(DeviceName(cluster, d));
      maps_.target.files.push_back(plan::TextFile(DeviceName(cluster, d), ""));
    }
  }

  void Add(const Where& to, std::uint32_t from) {
    const auto [layer, expert, device] = to;
    const std::string name =
        "layers." + std::to_string(loads_.layer_id[layer]) + ".experts." + std::to_string(expert);
    const std::string state = "from." + std::to_string(from);
    const auto [at, fresh] = tensor_.try_emplace(
        {layer, expert, from}, static_cast<std::uint32_t>(maps_.source.tensors.size()));
    const std::uint64_t slots = current_.slot_begin[from + 1] - current_.slot_begin[from];
    const std::uint64_t slot = layer * slots + SlotOf(current_, layer, from, expert);
    if (fresh) {
      AddTensor(name, state, from, slot * cluster_.expert_bytes, &maps_.source);
      maps_.source.tensors.back().fragments.push_back(
          {Whole(), {LastArray(maps_.source)}, layout::Role::kOwner});
      maps_.target.map.tensors.push_back({name, state, DType::kU8, Extents(), {}});
    }
    plan::OutputFile& file = maps_.target.files[device];
    AddMember(name, device, file.bytes, &maps_.target.map);
    const std::uint32_t array = LastArray(maps_.target.map);
    plan::Payload payload;
    payload.offset = file.bytes;
    payload.bytes = cluster_.expert_bytes;
    payload.array = array;
    file.payloads.push_back(std::move(payload));
    file.bytes += cluster_.expert_bytes;
    auto& fragments = maps_.target.map.tensors[at->second].fragments;
    fragments.push_back(
        {Whole(), {array}, fragments.empty() ? layout::Role::kOwner : layout::Role::kReplica});
  }

  MigrationMaps Take() { return std::move(maps_); }

 private:
  Shape Extents() const { return {cluster_.expert_bytes}; }
  layout::CutPtr Whole() const {
    return std::make_shared<const layout::Cut>(layout::Cut::Whole(Extents()));
  }
  static std::uint32_t LastArray(const layout::ShardMap& map) {
    return static_cast<std::uint32_t>(map.arrays.size() - 1);
  }

  void AddMember(const std::string& name, std::uint32_t file, std::uint64_t offset,
                 layout::ShardMap* map) const {
    const auto member = static_cast<std::uint32_t>(map->members.size());
    map->members.push_back({file, offset, cluster_.expert_bytes, std::nullopt, name});
    map->arrays.push_back({DType::kU8, {{member, 0, cluster_.expert_bytes}}});
  }

  void AddTensor(const std::string& name, const std::string& state, std::uint32_t file,
                 std::uint64_t offset, layout::ShardMap* map) const {
    AddMember(name, file, offset, map);
    map->tensors.push_back({name, state, DType::kU8, Extents(), {}});
  }

  const Placement& current_;
  const TokenCounts& loads_;
  const Cluster& cluster_;
  MigrationMaps maps_;
  std::map<Where, std::uint32_t> tensor_;  // layer, expert, sender
};

}  // namespace

Result<MigrationMaps> MapsOf(const Migration& migration, const Placement& current,
                             const Placement& next, const TokenCounts& loads,
                             const Cluster& cluster) {
  if (cluster.expert_bytes == 0) {
    return Fail(Errc::kBadInput, "cluster: expert_bytes is 0, so no expert can be copied");
  }
  SW_TRY(CheckedMul(cluster.expert_bytes,
                    CheckedMul(std::max(current.slot_count(), next.slot_count()), loads.layers)
                        .value_or(~std::uint64_t{0})));
  Maps maps(current, loads, cluster);
  for (const auto& [to, from] : Origins(migration)) maps.Add(to, from);
  return maps.Take();
}

}  // namespace shardwright::placement
