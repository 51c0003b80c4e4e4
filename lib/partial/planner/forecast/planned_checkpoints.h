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

/// Ranks, experts and pieces of modules that a plan may have, those of all its checkpoints.
inline constexpr std::uint64_t kPlanCells = std::uint64_t{1} << 22;

/// What the next checkpoints of a run are planned from.
struct CheckpointPlanInput {
  ModelBytes model;
  Keep keep;
  SavedModel saved;  ///< the same model as its ranks share it
  LevelState snapshot;
  LevelState persist;
  SelectionOptions options;
  std::uint64_t checkpoints = 1;
  std::uint64_t iteration = 0;  ///< of the newest checkpoint; those planned are newer
  std::uint64_t interval = 1;   ///< kReplay: iterations between checkpoints
  /// [layer][expert]: routed before every planned checkpoint but the first, whose tokens the levels
  /// have counted; empty: not known.
  Counts between;
  bool counted = false;  ///< whether tokens are known: for the risk
};

/// How the ranks share a checkpoint.
struct ShareComparison {
  SavePlan adaptive;
  SavePlan equal;                       ///< the non-expert part is cut without a look at experts
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
  std::optional<PlannedLevel> persist;  ///< absent: as the snapshot
  std::optional<TokensAtRisk> risk;     ///< of storage after it; absent: tokens are not known
  Counts unsaved;                       ///< [layer][expert]: tokens that storage lacks before it

  const PlannedLevel& stored() const { return persist ? *persist : snapshot; }
};

/// Plans of checkpoints that follow each other, each complete before the next: experts of both
/// levels, bytes, and who saves what.
/// \error kUsage  no checkpoints; kLimit  more numbers than kPlanCells; as SelectTwoLevels,
///        SizeOfCheckpoint and PlanSave; kStopped
/// Pure but for `stop`. Source: docs/pec-planning.md sections 1, 4 to 7, 9.
Result<std::vector<PlannedCheckpoint>> PlanCheckpoints(const CheckpointPlanInput& input,
                                                       const StopCheck& stop = {});

}  // namespace shardwright::partial
