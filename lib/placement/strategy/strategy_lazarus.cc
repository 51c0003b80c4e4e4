// SPDX-License-Identifier: Apache-2.0
#include "placement/strategy/lazarus.h"

#include "engine/exec/for_each.h"
#include "placement/migration/migration.h"
#include "placement/strategy/strategies.h"
#include "placement/strategy/units.h"

namespace shardwright::placement::internal {

Result<StrategyResult> DraftLazarus(const TokenCounts& loads, const Cluster& cluster,
                                    const Placement* /*current*/, const Options& options) {
  const Units units = UnitsOf(cluster, options.failure_unit);
  SW_TRY_ASSIGN(const std::uint32_t copies, Threshold(units, loads.experts, options));
  StrategyResult result;
  result.placement = EmptyPlacement(loads, cluster);
  result.notes.resize(loads.layers);
  const auto unit_count = static_cast<std::uint32_t>(units.slots.size());
  const Objective objective = options.objective.value_or(Objective::kRecovery);
  exec::ParallelFor(loads.layers, [&](std::uint32_t l) {
    if (Stopped(options.stop)) return;
    const auto tokens = loads.layer(l);
    std::vector<std::uint32_t> counts = ReplicaCounts(tokens, units.slot_count(), copies);
    if (options.distinct) CapCounts(tokens, unit_count, &counts);
    UnitPlan plan = RecoveryPlan(tokens, counts, units.slots, copies, options.stop);
    if (objective != Objective::kRecovery) {
      const double loss = objective == Objective::kMixed ? options.recovery_loss : 1;
      BalanceUnits(tokens, copies, loss, &plan, options.stop);
    }
    if (Stopped(options.stop)) return;
    DealToDevices(plan, units, tokens, l, &result.placement);
    result.notes[l] = {plan.cut, copies};
  });
  SW_TRY(CheckStop(options.stop));
  return result;
}

Result<StrategyResult> FinishByNodes(StrategyResult draft, const TokenCounts& /*loads*/,
                                     const Cluster& cluster, const Placement* current,
                                     const Options& options) {
  if (current != nullptr) {
    draft.placement = Relabel(*current, draft.placement, cluster, options.node_map,
                              options.failure_unit, options.stop);
    SW_TRY(CheckStop(options.stop));
  }
  return draft;
}

Result<StrategyResult> FinishAsDrafted(StrategyResult draft, const TokenCounts& /*loads*/,
                                       const Cluster& /*cluster*/, const Placement* /*current*/,
                                       const Options& /*options*/) {
  return draft;
}

Result<StrategyResult> FinishInSlots(StrategyResult draft, const TokenCounts& /*loads*/,
                                     const Cluster& cluster, const Placement* current,
                                     const Options& /*options*/) {
  if (current != nullptr) KeepSlots(*current, cluster, &draft.placement);
  return draft;
}

}  // namespace shardwright::placement::internal
