// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "placement/core/device_lists.h"
#include "placement/strategy/hecate.h"
#include "placement/strategy/lazarus.h"
#include "placement/strategy/strategies.h"
#include "placement/strategy/units.h"
#include "support/base/text.h"

namespace shardwright::placement::internal {
namespace {

Error TooNarrow(std::string_view name, std::uint32_t experts, std::uint32_t devices,
                std::uint32_t slots) {
  return {Errc::kInfeasible, std::string(name) + ": " + std::to_string(experts) + " experts over " +
                                 std::to_string(devices) + " gpus do not fit in " +
                                 std::to_string(slots) + " slots each"};
}

// Returns the size of the expert-parallel group: the largest that divides the experts evenly and
// allows the requested number of copies; 0 if none fits.
std::uint32_t GroupSize(std::uint32_t experts, std::uint32_t devices, std::uint32_t slots,
                        std::uint32_t copies_min) {
  for (std::uint32_t size = std::min(experts, devices); size > 0; --size) {
    if (experts % size == 0 && experts / size <= slots && devices / size >= copies_min) return size;
  }
  return 0;
}

// Returns the requested size of the expert-parallel group.
Result<std::uint32_t> FixedGroupSize(std::uint32_t size, std::uint32_t experts,
                                     std::uint32_t devices, std::uint32_t slots) {
  if (devices < size) {
    return Fail(Errc::kInfeasible, "vanilla: ", Plural(devices, "gpu"),
                ", but expert parallelism needs ", size);
  }
  if (experts % size == 0 && experts / size <= slots) return size;
  return tl::unexpected(TooNarrow("vanilla", experts, size, slots));
}

// Deals replicas to units with free slots, in order: either the next unit for each replica, or one
// unit until it is full.
UnitPlan Deal(std::span<const std::uint32_t> counts, std::span<const std::uint64_t> slots,
              bool next_for_each) {
  UnitPlan plan;
  plan.experts.resize(slots.size());
  std::size_t unit = 0;
  for (std::uint32_t e = 0; e < counts.size(); ++e) {
    for (std::uint32_t i = 0; i < counts[e]; ++i) {
      while (plan.experts[unit].size() == slots[unit]) unit = (unit + 1) % slots.size();
      plan.experts[unit].push_back(e);
      if (next_for_each) unit = (unit + 1) % slots.size();
    }
  }
  return plan;
}

Result<StrategyResult> DealByUnits(const TokenCounts& loads, const Cluster& cluster,
                                   const Options& options, bool next_for_each) {
  const Units units = UnitsOf(cluster, options.failure_unit);
  SW_TRY_ASSIGN(const std::uint32_t copies, Threshold(units, loads.experts, options));
  StrategyResult result;
  result.placement = EmptyPlacement(loads, cluster);
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    SW_TRY(CheckStop(options.stop));
    const auto tokens = loads.layer(l);
    const auto counts = ReplicaCounts(tokens, units.slot_count(), copies);
    DealToDevices(Deal(counts, units.slots, next_for_each), units, tokens, l, &result.placement);
    result.notes.push_back({false, copies});
  }
  return result;
}

// Returns the owners of one layer now, or nothing unless every expert is on one live device.
std::vector<std::uint32_t> SingleOwners(const Placement& current, std::uint32_t layer,
                                        const LiveDevices& devices) {
  std::vector<std::uint32_t> owner(current.experts, devices.size());
  for (std::uint32_t i = 0; i < devices.size(); ++i) {
    for (const std::int32_t e : current.slots(layer, devices.device[i])) {
      if (e == kNoExpert) continue;
      if (owner[static_cast<std::size_t>(e)] != devices.size()) return {};
      owner[static_cast<std::size_t>(e)] = i;
    }
  }
  const bool all = std::find(owner.begin(), owner.end(), devices.size()) == owner.end();
  return all ? owner : std::vector<std::uint32_t>{};
}

std::uint64_t Busiest(std::span<const std::uint32_t> owner, std::span<const std::uint64_t> tokens,
                      std::uint32_t devices) {
  std::vector<std::uint64_t> load(devices, 0);
  for (std::size_t e = 0; e < owner.size(); ++e) load[owner[e]] += tokens[e];
  return *std::max_element(load.begin(), load.end());
}

// Moves experts by descending load to the least loaded device with a free slot; ties to the owner.
std::vector<std::uint32_t> Exchanged(std::span<const std::uint64_t> tokens,
                                     const std::vector<std::uint32_t>& owner, std::uint32_t devices,
                                     const StopCheck& stop) {
  std::vector<std::uint32_t> room(devices, 0);
  for (const std::uint32_t d : owner) ++room[d];
  std::vector<std::uint64_t> load(devices, 0);
  std::vector<std::uint32_t> next(owner.size());
  for (const std::uint32_t e : HottestExperts(tokens, static_cast<std::uint32_t>(tokens.size()))) {
    if (Stopped(stop)) return owner;
    std::uint32_t best = devices;
    for (std::uint32_t d = 0; d < devices; ++d) {
      if (room[d] == 0) continue;
      if (best == devices || load[d] < load[best] || (load[d] == load[best] && d == owner[e])) {
        best = d;
      }
    }
    next[e] = best;
    --room[best];
    load[best] += tokens[e];
  }
  return next;
}

}  // namespace

Result<StrategyResult> DraftSpread(const TokenCounts& loads, const Cluster& cluster,
                                   const Placement* /*current*/, const Options& options) {
  return DealByUnits(loads, cluster, options, true);
}

Result<StrategyResult> DraftCompact(const TokenCounts& loads, const Cluster& cluster,
                                    const Placement* /*current*/, const Options& options) {
  return DealByUnits(loads, cluster, options, false);
}

Result<StrategyResult> DraftVanilla(const TokenCounts& loads, const Cluster& cluster,
                                    const Placement* /*current*/, const Options& options) {
  const LiveDevices devices(cluster);
  const std::uint32_t slots = devices.LeastSlots();
  StrategyResult result;
  result.placement = EmptyPlacement(loads, cluster);
  std::uint32_t size = GroupSize(loads.experts, devices.size(), slots, options.copies_min);
  if (options.expert_parallel > 0) {
    SW_TRY_ASSIGN(size,
                  FixedGroupSize(options.expert_parallel, loads.experts, devices.size(), slots));
  }
  if (size == 0 && options.copies_may_fall) {
    size = GroupSize(loads.experts, devices.size(), slots, 1);
  }
  const std::uint32_t run = size == 0 ? 0 : loads.experts / size;
  if (size == 0 && (options.copies_min <= 1 || options.copies_may_fall) &&
      slots >= (loads.experts + devices.size() - 1) / devices.size()) {
    const auto owner = ContiguousOwners(loads.experts, devices.size());
    for (std::uint32_t l = 0; l < loads.layers; ++l) {
      SW_TRY(CheckStop(options.stop));
      std::vector<std::uint32_t> used(devices.size(), 0);
      for (std::uint32_t e = 0; e < loads.experts; ++e) {
        const std::uint32_t d = owner[e];
        result.placement.slots(l, devices.device[d])[used[d]++] = static_cast<std::int32_t>(e);
      }
    }
    result.warnings.push_back("vanilla: experts do not divide evenly over the gpus");
  } else if (size == 0) {
    return tl::unexpected(TooNarrow("vanilla", loads.experts, devices.size(), slots));
  }
  for (std::uint32_t l = 0; l < loads.layers && size > 0; ++l) {
    SW_TRY(CheckStop(options.stop));
    for (std::uint32_t i = 0; i < devices.size() / size * size; ++i) {
      const auto mine = result.placement.slots(l, devices.device[i]);
      for (std::uint32_t k = 0; k < run; ++k) {
        mine[k] = static_cast<std::int32_t>(i % size * run + k);
      }
    }
  }
  result.notes.assign(loads.layers, {false, size == 0 ? 1 : devices.size() / size});
  return result;
}

Result<StrategyResult> DraftSmartMoe(const TokenCounts& loads, const Cluster& cluster,
                                     const Placement* current, const Options& options) {
  const LiveDevices devices(cluster);
  const auto contiguous = ContiguousOwners(loads.experts, devices.size());
  StrategyResult result;
  result.placement = EmptyPlacement(loads, cluster);
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    SW_TRY(CheckStop(options.stop));
    const auto tokens = loads.layer(l);
    std::vector<std::uint32_t> owner =
        current != nullptr ? SingleOwners(*current, l, devices) : std::vector<std::uint32_t>{};
    if (owner.empty()) owner = contiguous;
    std::vector<std::uint32_t> next = Exchanged(tokens, owner, devices.size(), options.stop);
    SW_TRY(CheckStop(options.stop));
    if (Busiest(next, tokens, devices.size()) < Busiest(owner, tokens, devices.size())) {
      owner = std::move(next);
    }
    std::vector<std::uint32_t> used(devices.size(), 0);
    for (std::uint32_t e = 0; e < loads.experts; ++e) {
      const std::uint32_t d = owner[e];
      const auto slots = result.placement.slots(l, devices.device[d]);
      if (used[d] == slots.size()) {
        return tl::unexpected(TooNarrow("smartmoe", loads.experts, devices.size(),
                                        static_cast<std::uint32_t>(slots.size())));
      }
      slots[used[d]++] = static_cast<std::int32_t>(e);
    }
  }
  result.notes.assign(loads.layers, {false, 1});
  return result;
}

Result<StrategyResult> DraftFasterMoe(const TokenCounts& loads, const Cluster& cluster,
                                      const Placement* /*current*/, const Options& options) {
  const LiveDevices devices(cluster);
  const std::uint32_t count = devices.size();
  const auto owner = ContiguousOwners(loads.experts, count);
  const std::uint32_t slots = devices.LeastSlots();
  if ((loads.experts + count - 1) / count > slots) {
    return tl::unexpected(TooNarrow("fastermoe", loads.experts, count, slots));
  }
  DeviceLists owned(loads.layers, cluster.device_count());
  DeviceLists held(loads.layers, cluster.device_count());
  const double per_token = loads.per_iteration() * FlopSeconds(options.model);
  const double per_received = loads.per_iteration() * 4 * options.model.hidden *
                              options.model.value_bytes / options.model.network_bytes_per_s;
  const double per_shadow =
      options.model.shadow_kappa * ExpertBytes(options.model) / options.model.network_bytes_per_s;
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    SW_TRY(CheckStop(options.stop));
    const auto tokens = loads.layer(l);
    std::vector<double> load(count, 0);  // load of experts that are not shadowed
    for (std::uint32_t e = 0; e < loads.experts; ++e) {
      load[owner[e]] += static_cast<double>(tokens[e]);
    }
    const auto hottest = HottestExperts(tokens, loads.experts);
    std::uint32_t best = 0;
    double best_seconds = 0;
    double everywhere = 0;  // tokens per device of shadowed experts
    for (std::uint32_t shadows = 0; shadows <= loads.experts; ++shadows) {
      SW_TRY(CheckStop(options.stop));
      const double most = *std::max_element(load.begin(), load.end());
      const double seconds = per_token * (most + everywhere) +
                             per_received * most * (count - 1) / count + per_shadow * shadows;
      if (shadows == 0 || seconds < best_seconds) {
        best = shadows;
        best_seconds = seconds;
      }
      if (shadows == loads.experts) break;
      const std::uint32_t e = hottest[shadows];
      load[owner[e]] -= static_cast<double>(tokens[e]);
      everywhere += static_cast<double>(tokens[e]) / count;
    }
    std::vector<bool> shadowed(loads.experts, false);
    for (std::uint32_t i = 0; i < best; ++i) shadowed[hottest[i]] = true;
    for (std::uint32_t e = 0; e < loads.experts; ++e) {
      owned.Add(l, devices.device[owner[e]], e);
      for (std::uint32_t d = 0; d < count; ++d) {
        if (shadowed[e] || d == owner[e]) held.Add(l, devices.device[d], e);
      }
    }
  }
  StrategyResult result;
  result.placement = held.ToPlacement(loads.experts);
  result.owners = owned.ToPlacement(loads.experts);
  result.notes.assign(loads.layers, {false, 1});
  return result;
}

double FlopSeconds(const Options::Model& model) {
  return 3 * 4 * model.inner_ratio * model.hidden * model.hidden / model.flops;
}

double ExpertBytes(const Options::Model& model) {
  return 2 * model.inner_ratio * model.hidden * model.hidden * model.value_bytes;
}

}  // namespace shardwright::placement::internal
