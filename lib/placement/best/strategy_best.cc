// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <utility>

#include "engine/exec/for_each.h"
#include "placement/best/grouped_internal.h"
#include "placement/best/layer_plan_internal.h"
#include "placement/best/moves_internal.h"
#include "placement/best/pins_internal.h"
#include "placement/migration/migration.h"
#include "placement/strategy/strategies.h"
#include "support/base/text.h"
#include "token_counts/window.h"

namespace shardwright::placement::internal {
namespace {

// Prefers fewer moves among plans with a balance this close to the best one.
constexpr double kWorthStaying = 1.01;
constexpr std::size_t kCurvePoints = 32;

bool WantsRecovery(const Options& options) {
  return options.objective.value_or(Objective::kBalance) != Objective::kBalance;
}

/// Writes one layer's choice into a placement.
void Take(const LayerChoice& choice, const SearchGround& ground, std::uint32_t layer,
          Placement* placement) {
  auto from = choice.slots.begin();
  for (std::uint32_t d = 0; d < ground.size(); ++d) {
    const auto to = placement->slots(layer, ground.device[d]);
    std::fill(std::copy_n(from, ground.slots[d], to.begin()), to.end(), kNoExpert);
    from += ground.slots[d];
  }
}

/// Warns about layers that do not reach the requested balance.
void WarnOfTarget(const TokenCounts& loads, const Options& options, StrategyResult* result) {
  std::vector<std::uint64_t> missed;
  double worst = 1;
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    const double best = result->choices[l].back().imbalance;
    if (best <= options.target_imbalance) continue;
    missed.push_back(loads.layer_id[l]);
    worst = std::max(worst, best);
  }
  if (missed.empty()) return;
  result->warnings.push_back(StrCat("the target balance was not reached in layers ",
                                    token_counts::Ranges(missed), ": the worst balance is ",
                                    Fixed(worst, 3), "; more slots per gpu would lower it"));
}

/// Renames nodes and their devices to match the current placement.
Result<StrategyResult> FinishGrouped(StrategyResult draft, const Cluster& cluster,
                                     const Placement& current, const Options& options) {
  if (options.moves_max || options.target_imbalance > 0) {
    return Fail(Errc::kUsage,
                "--max-moves and --target-balance cannot be combined with expert groups that stay "
                "on a node: add --policy global, or leave them out");
  }
  const std::vector<double> speeds = RelativeSpeeds(cluster);
  if (std::all_of(speeds.begin(), speeds.end(), [](double speed) { return speed == 1; })) {
    draft.placement = Relabel(current, draft.placement, cluster, NodeMap::kPerLayer,
                              options.failure_unit, options.stop);
  } else {
    KeepSlots(current, cluster, &draft.placement);
  }
  SW_TRY(CheckStop(options.stop));
  return draft;
}

}  // namespace

Result<StrategyResult> DraftBest(const TokenCounts& loads, const Cluster& cluster,
                                 const Placement* current, const Options& options) {
  if (WantsRecovery(options)) {
    if (options.pins.empty()) return DraftLazarus(loads, cluster, current, options);
    return Fail(Errc::kInfeasible, "--pin requires --objective balance");
  }
  SW_TRY_ASSIGN(const bool grouped, StaysGrouped(loads, cluster, options));
  if (grouped) {
    if (options.pins.empty()) return DraftGrouped(loads, cluster, options);
    return Fail(Errc::kUsage,
                "--pin cannot be combined with expert groups that stay on a node: add "
                "--policy global, or leave it out");
  }
  const Units units = UnitsOf(cluster, options.failure_unit);
  SW_TRY_ASSIGN(const std::uint32_t copies, Threshold(units, loads.experts, options));
  SearchGround ground(cluster, options.failure_unit, copies);
  ground.stop = options.stop;
  SW_TRY(ApplyPins(options, loads, cluster, &ground));
  // Fails here if the pins leave no placement. All layers have the same experts and slots.
  std::vector<std::int32_t> pinned;
  if (ground.pinned()) {
    SW_TRY_ASSIGN(pinned, PinnedStart(ground, options, nullptr, 0));
  }
  StrategyResult result;
  result.placement = EmptyPlacement(loads, cluster);
  result.notes.assign(loads.layers, {false, copies});
  if (current != nullptr) result.choices.resize(loads.layers);
  exec::ParallelFor(loads.layers, [&](std::uint32_t l) {
    if (Stopped(options.stop)) return;
    const LayerPlan plan(loads, l, cluster, units, ground, ground.pinned() ? &pinned : nullptr,
                         current, options);
    double even = 1;
    std::vector<LayerChoice> choices = plan.Run(&result.notes[l], &even);
    const double target =
        options.target_imbalance > 0 ? options.target_imbalance : even * kWorthStaying;
    Take(choices[FewestMoves(choices, target)], ground, l, &result.placement);
    if (current != nullptr) result.choices[l] = std::move(choices);
  });
  SW_TRY(CheckStop(options.stop));
  return result;
}

Result<StrategyResult> FinishBest(StrategyResult draft, const TokenCounts& loads,
                                  const Cluster& cluster, const Placement* current,
                                  const Options& options) {
  if (WantsRecovery(options)) {
    return FinishByNodes(std::move(draft), loads, cluster, current, options);
  }
  if (current == nullptr) return draft;
  SW_TRY_ASSIGN(const bool grouped, StaysGrouped(loads, cluster, options));
  if (grouped) return FinishGrouped(std::move(draft), cluster, *current, options);
  if (options.moves_max) {
    SW_TRY_ASSIGN(const auto chosen, WithinMoves(draft.choices, *options.moves_max));
    const SearchGround ground(cluster, options.failure_unit, 1);
    for (std::uint32_t l = 0; l < loads.layers; ++l) {
      Take(draft.choices[l][chosen[l]], ground, l, &draft.placement);
    }
  }
  if (options.target_imbalance > 0) WarnOfTarget(loads, options, &draft);
  std::vector<bool> counted;
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    const auto tokens = loads.layer(l);
    counted.push_back(std::any_of(tokens.begin(), tokens.end(), [](auto t) { return t > 0; }));
  }
  draft.moves_curve = CurveOf(draft.choices, counted, kCurvePoints);
  draft.choices.clear();
  KeepSlots(*current, cluster, &draft.placement);
  return draft;
}

}  // namespace shardwright::placement::internal
