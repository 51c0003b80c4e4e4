// SPDX-License-Identifier: Apache-2.0
#include "placement/verify/verify.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/exec/for_each.h"
#include "support/base/text.h"

namespace shardwright::placement {
namespace {

std::string UnitName(FailureUnit unit) { return unit == FailureUnit::kRack ? "rack" : "node"; }

/// Verifies the plan. A broken rule is an internal error, with any error code of the rule.
Status Prove(const StrategyResult& result, const TokenCounts& loads, const Cluster& cluster) {
  Rules rules;
  rules.cluster_slots = !result.owners.has_value();
  Status proved = Validate(result.placement, loads, cluster, rules);
  if (proved && result.owners) {
    rules.cluster_slots = true;
    proved = Validate(*result.owners, loads, cluster, rules);
  }
  if (proved) return {};
  return Fail(Errc::kInternal, "the plan breaks a rule: ", proved.error().message);
}

/// Computes the volumes of a layer's sparse collectives: from the owner to the other replicas.
SparseVolumes LayerVolumes(const StrategyResult& result, const Cluster& cluster,
                           std::uint32_t layer) {
  const std::uint32_t experts = result.placement.ExpertsOf(layer);
  std::vector<std::uint32_t> owner(experts, 0);
  std::vector<std::vector<std::uint32_t>> holders(experts);
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    for (const std::int32_t e : result.owners->slots(layer, d)) {
      if (e != kNoExpert) owner[static_cast<std::size_t>(e)] = d;
    }
    for (const std::int32_t e : result.placement.slots(layer, d)) {
      if (e != kNoExpert) holders[static_cast<std::size_t>(e)].push_back(d);
    }
  }
  for (std::uint32_t e = 0; e < experts; ++e) {
    std::vector<std::uint32_t>& held = holders[e];
    held.push_back(owner[e]);
    std::sort(held.begin(), held.end());
    held.erase(std::unique(held.begin(), held.end()), held.end());
  }
  return VolumesOf(owner, holders, cluster.device_count());
}

/// Raises the measured bounds to the bounds that a strategy has proved.
void RaiseBounds(const std::vector<LayerNotes>& notes, ModelMetrics* metrics) {
  double sum = 0;
  double layers = 0;
  for (std::size_t l = 0; l < metrics->layers.size(); ++l) {
    LayerMetrics& layer = metrics->layers[l];
    if (l < notes.size()) layer.bound = std::max(layer.bound, notes[l].bound);
    if (layer.tokens == 0) continue;
    sum += layer.bound;
    layers += 1;
  }
  if (layers > 0) metrics->bound_mean = sum / layers;
}

/// Checks that no replica of a pinned expert is on another node.
Status CheckPins(const Placement& placement, const Cluster& cluster, std::span<const Pin> pins) {
  for (std::uint32_t l = 0; !pins.empty() && l < placement.layers; ++l) {
    for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
      for (const std::int32_t held : placement.slots(l, d)) {
        if (held == kNoExpert) continue;
        for (const Pin& pin : pins) {
          if (!std::ranges::binary_search(pin.experts, static_cast<std::uint32_t>(held))) continue;
          if (std::ranges::binary_search(pin.nodes, cluster.devices[d].node)) continue;
          return Fail(Errc::kInternal, "expert ", held, " is on ", GpuName(cluster, d),
                      ", which its pin does not allow");
        }
      }
    }
  }
  return {};
}

}  // namespace

Result<VerifiedPlan> VerifyPlan(std::string_view strategy, StrategyResult result,
                                const TokenCounts& loads, const Cluster& cluster,
                                const Placement* current, const VerifyOptions& options) {
  SW_TRY(Prove(result, loads, cluster));
  SW_TRY(CheckPins(result.placement, cluster, options.pins));
  VerifiedPlan plan;
  plan.strategy = strategy;
  plan.metrics = Measure(result.placement, loads, cluster, options.stop);
  RaiseBounds(result.notes, &plan.metrics);
  // Copies for one iteration have no state: survival depends on the owners.
  const Placement& state = result.owners ? *result.owners : result.placement;
  RecoveryOptions recovery = options.recovery;
  recovery.stop = options.stop;
  plan.layer_recovery.resize(loads.layers);
  exec::ParallelFor(loads.layers, [&](std::uint32_t l) {
    if (Stopped(options.stop)) return;
    plan.layer_recovery[l] = LayerRecovery(state, cluster, l, options.unit, recovery);
  });
  SW_TRY(CheckStop(options.stop));
  for (std::uint32_t l = 0; result.owners && l < loads.layers; ++l) {
    SW_TRY(CheckStop(options.stop));
    plan.volumes.push_back(LayerVolumes(result, cluster, l));
  }
  plan.model_recovery = ModelRecovery(state, cluster, options.unit, recovery);
  SW_TRY(CheckStop(options.stop));
  if (current != nullptr) {
    MigrationOptions migration;
    migration.forward = options.forward;
    migration.stop = options.stop;
    SW_TRY_ASSIGN(plan.migration, PlanMigration(*current, state, cluster, migration));
  }
  plan.result = std::move(result);
  return plan;
}

std::int64_t LargestFaults(const TokenCounts& loads, const Cluster& cluster, FailureUnit unit) {
  const std::size_t units =
      unit == FailureUnit::kRack ? cluster.racks.size() : cluster.nodes.size();
  std::vector<std::uint64_t> slots(units, 0);
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    const Node& node = cluster.nodes[n];
    if (node.alive) slots[unit == FailureUnit::kRack ? node.rack : n] += cluster.node_slots(n);
  }
  // A unit counts each expert once. By Gale and Ryser, c copies then fit if their total does.
  std::uint64_t distinct = 0;
  for (const std::uint64_t count : slots) distinct += std::min<std::uint64_t>(count, loads.experts);
  return static_cast<std::int64_t>(distinct / loads.experts) - 1;
}

Status CheckFaults(std::uint64_t faults, const TokenCounts& loads, const Cluster& cluster,
                   FailureUnit unit) {
  const std::int64_t largest = LargestFaults(loads, cluster, unit);
  if (largest < 0) {
    return Fail(Errc::kInfeasible, loads.experts, " experts do not fit in ", cluster.live_slots(),
                " live slots");
  }
  if (faults <= static_cast<std::uint64_t>(largest)) return {};
  return Fail(Errc::kInfeasible, "no plan survives any ", Plural(faults, "failure"), ": ",
              faults + 1, " copies of ", loads.experts, " experts on distinct ", UnitName(unit),
              "s do not fit in ", cluster.live_slots(), " live slots; the largest --faults is ",
              largest);
}

Status CheckSurvives(const VerifiedPlan& plan, std::uint64_t faults, const TokenCounts& loads,
                     const Cluster& cluster, FailureUnit unit) {
  const std::int64_t certain = std::max<std::int64_t>(plan.model_recovery.certain, 0);
  if (plan.model_recovery.certain >= static_cast<std::int64_t>(faults)) return {};
  return Fail(Errc::kInfeasible, "strategy ", plan.strategy, ": its plan survives any ",
              Plural(static_cast<std::uint64_t>(certain), UnitName(unit) + " failure"),
              ", but --faults is ", faults,
              ": best and lazarus keep copies apart, for --faults of at most ",
              LargestFaults(loads, cluster, unit));
}

}  // namespace shardwright::placement
