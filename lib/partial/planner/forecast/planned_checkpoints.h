// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "partial/select/lost_tokens.h"
#include "partial/select/selection.h"
#include "partial/select/sharding/saved_model.h"
#include "partial/select/sharding/sharding.h"
#include "partial/select/sizes.h"
#include "support/base/result.h"
#include "support/base/stop.h"

namespace shardwright::partial {

/// Limit for the ranks, experts and module pieces of a plan, added up over its checkpoints.
inline constexpr std::uint64_t kPlanCells = std::uint64_t{1} << 22;

/// Input for planning the next checkpoints of a run.
struct CheckpointPlanInput {
  ModelBytes model;
  Keep keep;
  SavedModel saved;  ///< the same model with its division over ranks
  LevelState snapshot;
  LevelState persist;
  SelectionOptions options;
  std::uint64_t checkpoints = 1;
  std::uint64_t iteration = 0;  ///< of the newest checkpoint; planned ones are newer
  std::uint64_t interval = 1;   ///< kReplay: iterations between checkpoints
  /// [layer][expert]: tokens routed before every planned checkpoint except
  /// the first: the levels already include its tokens. Empty: unknown.
  Counts between;
  bool counted = false;  ///< true if tokens are known, for the risk
};

/// Division of a checkpoint over ranks, by several methods.
struct ShareComparison {
  SavePlan adaptive;
  SavePlan equal;                       ///< with a non-expert cut that ignores the expert bytes
  std::vector<std::uint64_t> unshared;  ///< [rank]
  std::uint64_t unshared_bottleneck = 0;
};

/// One level of a planned checkpoint.
struct PlannedLevel {
  Selection selection;
  CheckpointSize size;
  ShareComparison shares;
};

struct PlannedCheckpoint {
  PlannedLevel snapshot;
  std::optional<PlannedLevel> persist;  ///< absent: equal to the snapshot
  std::optional<TokensAtRisk> risk;     ///< in storage after it; absent: tokens are unknown
  Counts unsaved;                       ///< [layer][expert]: tokens not in storage before it

  const PlannedLevel& stored() const { return persist ? *persist : snapshot; }
};

/// Plans consecutive checkpoints, each complete before the next:
/// experts of both levels, bytes, and the division over ranks.
/// \error kUsage  no checkpoints; kLimit  above kPlanCells; as
///        SelectTwoLevels, SizeOfCheckpoint and PlanSave; kStopped
/// Pure but for `stop`. Source: docs/pec-planning.md sections 1, 4 to 7, 9.
Result<std::vector<PlannedCheckpoint>> PlanCheckpoints(const CheckpointPlanInput& input,
                                                       const StopCheck& stop = {});

}  // namespace shardwright::partial
