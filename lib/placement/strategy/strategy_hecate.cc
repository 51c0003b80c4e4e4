// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <optional>

#include "placement/core/device_lists.h"
#include "placement/strategy/hecate.h"
#include "placement/strategy/strategies.h"
#include "support/base/checked.h"

namespace shardwright::placement::internal {
namespace {

// Returns the owners now: the first live device with the expert in `current`, if every expert has
// one and devices have enough slots. A plan of another strategy may have more replicas.
std::vector<std::vector<std::uint32_t>> OwnersOf(const TokenCounts& loads,
                                                 const LiveDevices& devices,
                                                 const Placement* current) {
  const auto contiguous = ContiguousOwners(loads.experts, devices.size());
  std::vector<std::vector<std::uint32_t>> owner(loads.layers, contiguous);
  if (current == nullptr) return owner;
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    std::vector<std::uint32_t> found(loads.experts, devices.size());
    for (std::uint32_t i = devices.size(); i-- > 0;) {
      for (const std::int32_t e : current->slots(l, devices.device[i])) {
        if (e != kNoExpert) found[static_cast<std::size_t>(e)] = i;
      }
    }
    std::vector<std::uint32_t> owned(devices.size() + std::size_t{1}, 0);  // last: without device
    for (const std::uint32_t i : found) ++owned[i];
    const bool fits = std::equal(devices.slots.begin(), devices.slots.end(), owned.begin(),
                                 std::greater_equal<>());
    if (fits && owned.back() == 0) owner[l] = std::move(found);
  }
  return owner;
}

// Returns the slots that a layer's owners leave free, or the number from the options.
std::vector<std::uint32_t> SpareOf(const std::vector<std::uint32_t>& owner,
                                   const LiveDevices& devices,
                                   const std::optional<std::uint32_t>& spare) {
  if (spare) return std::vector(devices.size(), *spare);
  std::vector<std::uint32_t> left = devices.slots;
  for (const std::uint32_t d : owner) --left[d];  // no device owns more experts than it has slots
  return left;
}

// Returns the bandwidth that limits copies: between nodes if there are several nodes.
double CopyBytesPerSecond(const Cluster& cluster, const LiveDevices& devices) {
  const double inside = cluster.device_bytes_per_s;
  const double outside = cluster.node_bytes_per_s;
  if (devices.nodes == 1) return inside;
  return outside > 0 ? outside : inside;
}

}  // namespace

Result<StrategyResult> DraftEmpty(const TokenCounts& loads, const Cluster& cluster,
                                  const Placement* /*current*/, const Options& /*options*/) {
  StrategyResult result;
  result.placement = EmptyPlacement(loads, cluster);
  result.notes.assign(loads.layers, {});
  return result;
}

Result<StrategyResult> FinishHecate(StrategyResult draft, const TokenCounts& loads,
                                    const Cluster& cluster, const Placement* current,
                                    const Options& options) {
  const LiveDevices devices(cluster);
  const auto own = static_cast<std::uint32_t>(CeilDiv(loads.experts, devices.size()));
  const std::uint32_t slots = devices.LeastSlots();
  if (own > slots) {
    return Fail(Errc::kInfeasible, "hecate: ", own, " owned experts per gpu do not fit in ", slots,
                " slots");
  }
  std::uint32_t overlap = loads.experts;
  if (options.hecate.overlap) {
    overlap = *options.hecate.overlap;
  } else if (options.hecate.nonmoe_seconds > 0) {
    overlap = OverlapDegree(options.hecate.nonmoe_seconds, CopyBytesPerSecond(cluster, devices),
                            cluster.param_bytes);
  }
  auto owner = OwnersOf(loads, devices, current);
  if (options.hecate.reshard) owner = ShardOwners(loads, devices, overlap, options.stop);
  DeviceLists owned(loads.layers, cluster.device_count());
  DeviceLists held(loads.layers, cluster.device_count());
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    SW_TRY(CheckStop(options.stop));
    const auto spare = SpareOf(owner[l], devices, options.hecate.spare);
    const auto holders =
        Materialize(owner[l], loads.layer(l), devices, overlap, spare, options.stop);
    for (std::uint32_t e = 0; e < loads.experts; ++e) {
      owned.Add(l, devices.device[owner[l][e]], e);
      for (const std::uint32_t d : holders[e]) held.Add(l, devices.device[d], e);
    }
    draft.notes[l].copies_min = 1;
  }
  SW_TRY(CheckStop(options.stop));
  draft.placement = held.ToPlacement(loads.experts);
  draft.owners = owned.ToPlacement(loads.experts);
  return draft;
}

}  // namespace shardwright::placement::internal
