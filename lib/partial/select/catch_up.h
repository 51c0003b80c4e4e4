// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "partial/select/gradient_plan.h"
#include "partial/select/sizes.h"
#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

struct ExpertMap;
struct LevelState;

/// The checkpoint that policy gradient-log chooses for: of a run whose gradients are logged, so
/// that a state and the gradients since then make every expert that of the checkpoint.
struct ReplayPoint {
  std::uint64_t iteration = 0;
  std::uint64_t interval = 1;  ///< iterations since the checkpoint before
  /// The log has all gradients after this iteration; absent: it has no end that can be gone on with
  std::optional<std::uint64_t> logged_since = 0;
  std::uint64_t full_every = 500;  ///< no chain of gradients is longer
  /// Bytes of an iteration, of checkpoint and log together; 0: K experts of each layer.
  std::uint64_t budget_bytes = 0;
  const ModelBytes* model = nullptr;
};

/// [layer][expert]: the version that chains begin with. What is only in memory counts as long as it
/// is newer than all of storage, so that it may still come there, and only where gradients would
/// bring the stored version forward if it does not.
/// \param logged_since  as ReplayPoint
/// \pre both are of one shape
/// Pure.
Counts ChainStarts(const LevelState& snapshot, const LevelState& persist,
                   std::optional<std::uint64_t> logged_since = 0);

/// Decides for every expert between its state in the checkpoint and its gradients of the interval.
/// The state of an expert is taken if the log lacks gradients since `version`, or its chain would
/// be longer than `full_every`. Without a budget each layer's longest chains follow (ties: ring
/// order from the cursor) until it has k experts. With one it is also taken where it is not larger
/// than the gradients of the interval, and what is left of the budget goes to the longest chains of
/// all layers (ties: lower layer, lower id). What must be taken is, above the budget too.
/// \param version  [layer][expert], ChainStarts
/// \param cursor   [layer], LevelState::cursor
/// \error kUsage  iteration, interval or k is 0, an interval above the iteration, no model;
///        as PlanTransfers
/// Pure. Source: MoEtion Algorithm 3; docs/pec-planning.md section 9.4.
Result<TransferPlan> SelectReplay(const ExpertMap& map, const std::vector<std::uint64_t>& cursor,
                                  const Counts& version, std::uint32_t k, const ReplayPoint& point);

}  // namespace shardwright::partial
