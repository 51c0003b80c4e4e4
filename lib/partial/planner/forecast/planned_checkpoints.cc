// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/planned_checkpoints.h"

#include <algorithm>
#include <string>
#include <utility>

#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

Status Check(const CheckpointPlanInput& input) {
  if (input.checkpoints == 0)
    return Fail(Errc::kUsage, "expected at least one checkpoint to plan, found none");
  std::uint64_t cells = input.saved.ranks.dp;
  const std::uint64_t split_above = input.saved.options.split_above;
  for (const std::uint64_t bytes : input.saved.nonexpert_bytes) {
    const bool whole = split_above == 0 || bytes <= split_above;
    SW_TRY_ASSIGN(cells, CheckedAdd(cells, whole ? 1 : CeilDiv(bytes, split_above)));
  }
  for (const std::uint32_t experts : input.saved.map.experts()) cells += experts;
  SW_TRY_ASSIGN(cells, CheckedMul(cells, input.checkpoints));
  if (cells > kPlanCells) {
    return Fail(Errc::kLimit, "a plan of ", input.checkpoints, " checkpoints has ", cells,
                " ranks, experts and pieces of modules: expected at most ", kPlanCells);
  }
  return {};
}

bool SameExperts(Selection a, Selection b) {
  for (Selection* selection : {&a, &b}) {
    for (auto& layer : *selection) std::sort(layer.begin(), layer.end());
  }
  return a == b;
}

Result<ShareComparison> Compare(SavedModel model, const Selection& selection) {
  ShareComparison shares;
  SW_TRY_ASSIGN(shares.unshared, UnsharedBytes(model, selection));
  shares.unshared_bottleneck = *std::max_element(shares.unshared.begin(), shares.unshared.end());
  model.options.adaptive = false;
  SW_TRY_ASSIGN(shares.equal, PlanSave(model, selection));
  model.options.adaptive = true;
  SW_TRY_ASSIGN(shares.adaptive, PlanSave(model, selection));
  return shares;
}

Result<PlannedLevel> PlanLevel(const CheckpointPlanInput& input, Selection selection) {
  PlannedLevel level;
  SW_TRY_ASSIGN(level.size, SizeOfCheckpoint(input.model, selection, input.keep));
  SW_TRY_ASSIGN(level.shares, Compare(input.saved, selection));
  level.selection = std::move(selection);
  return level;
}

}  // namespace

Result<std::vector<PlannedCheckpoint>> PlanCheckpoints(const CheckpointPlanInput& input,
                                                       const StopCheck& stop) {
  SW_TRY(Check(input));
  LevelState snapshot = input.snapshot;
  LevelState persist = input.persist;
  SelectionOptions options = input.options;
  options.replay.model = &input.model;
  std::vector<PlannedCheckpoint> list;
  for (std::uint64_t t = 0; t < input.checkpoints; ++t) {
    SW_TRY(CheckStop(stop));
    if (t > 0 && !input.between.empty()) {
      SW_TRY(CountTokens(&snapshot, input.between));
      SW_TRY(CountTokens(&persist, input.between));
    }
    const std::uint64_t step = options.policy == Policy::kReplay ? input.interval : 1;
    SW_TRY_ASSIGN(const std::uint64_t since, CheckedMul(t + 1, step));
    SW_TRY_ASSIGN(const std::uint64_t iteration, CheckedAdd(input.iteration, since));
    options.replay.iteration = iteration;
    options.replay.interval = step;
    SW_TRY_ASSIGN(TwoLevelSelection chosen,
                  SelectTwoLevels(input.saved.map, snapshot, persist, options));
    PlannedCheckpoint& one = list.emplace_back();
    one.unsaved = Unsaved(persist);
    if (input.counted) {
      SW_TRY_ASSIGN(one.risk, RiskOf(one.unsaved, chosen.persist));
    }
    SW_TRY(CompleteSave(&snapshot, BeginSave(snapshot, chosen.snapshot, iteration)));
    SW_TRY(CompleteSave(&persist, BeginSave(persist, chosen.persist, iteration)));
    if (!SameExperts(chosen.persist, chosen.snapshot)) {
      SW_TRY_ASSIGN(one.persist, PlanLevel(input, std::move(chosen.persist)));
    }
    SW_TRY_ASSIGN(one.snapshot, PlanLevel(input, std::move(chosen.snapshot)));
  }
  return list;
}

}  // namespace shardwright::partial
