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

/// A checkpoint that policy gradient-log selects experts for, in a run that logs gradients:
/// an older state plus the gradients since then reproduces every expert at the checkpoint.
struct ReplayPoint {
  std::uint64_t iteration = 0;
  std::uint64_t interval = 1;  ///< since the previous checkpoint
  /// The log is complete after this iteration; absent: no part of it can be continued.
  std::optional<std::uint64_t> logged_since = 0;
  std::uint64_t full_every = 500;  ///< maximum length of a gradient chain
  /// Bytes per iteration for checkpoint and log together; 0: save K experts per layer.
  std::uint64_t budget_bytes = 0;
  const ModelBytes* model = nullptr;
};

/// Returns [layer][expert]: the version at which a gradient chain starts. Versions that
/// are only in memory count if they are newer than everything in storage, so that they
/// may still be stored, and if gradients could replay the stored version otherwise.
/// \param logged_since  as ReplayPoint
/// \pre both states have the same shape
/// Pure.
Counts ChainStarts(const LevelState& snapshot, const LevelState& persist,
                   std::optional<std::uint64_t> logged_since = 0);

/// Decides for every expert between its state in the checkpoint and its gradients of the
/// interval. Saves the state if the log lacks gradients since `version`, or if the chain would
/// exceed `full_every`. Without a budget, each layer's longest chains are added (ties: ring
/// order from the cursor) until it has k experts. With a budget, states that are not larger than
/// the interval's gradients are added, then the longest chains of all layers while the budget
/// lasts (ties: lower layer, lower id). The two conditions above apply even beyond the budget.
/// \param version  [layer][expert], ChainStarts
/// \param cursor   [layer], LevelState::cursor
/// \error kUsage  iteration, interval or k is 0, interval
///        greater than iteration, no model; as PlanTransfers
/// Pure. Source: MoEtion Algorithm 3; docs/pec-planning.md section 9.4.
Result<TransferPlan> SelectReplay(const ExpertMap& map, const std::vector<std::uint64_t>& cursor,
                                  const Counts& version, std::uint32_t k, const ReplayPoint& point);

}  // namespace shardwright::partial
