// SPDX-License-Identifier: Apache-2.0
// lib/placement/verify: what a plan is worth.
// What a strategy says of its plan counts for nothing. VerifyPlan proves every plan against the
// rules and measures it in the same way, whoever made it: loads of GPUs, survival, moves. A plan
// that breaks a rule is never written.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "placement/core/metrics.h"
#include "placement/core/types.h"
#include "placement/migration/migration.h"
#include "placement/recovery/recovery.h"
#include "placement/strategy/hecate.h"
#include "support/base/result.h"

namespace shardwright::placement {

/// A plan and what is known of it.
struct VerifiedPlan {
  std::string strategy;
  StrategyResult result;
  ModelMetrics metrics;
  std::vector<RecoveryProbability> layer_recovery;  ///< by layer
  RecoveryProbability model_recovery;
  std::optional<Migration> migration;  ///< from the old plan, if there was one
  /// What the copies of one iteration carry, by layer; empty for strategies without such copies.
  std::vector<SparseVolumes> volumes;
};

/// What is asked of a plan, and how it is looked at.
struct VerifyOptions {
  FailureUnit unit = FailureUnit::kNode;
  RecoveryOptions recovery;
  bool forward = false;  ///< nodes may send on what they received
  StopCheck stop = {};   ///< ends judging with kStopped
};

/// Proves that a plan can be written, and measures it.
/// \param current  what lies on the devices now, or null
/// \error kInternal  names the rule that the plan breaks: no such plan may be written; kStopped
/// Local; layers in parallel on the caller's task arena.
Result<VerifiedPlan> VerifyPlan(std::string_view strategy, StrategyResult result,
                                const TokenCounts& loads, const Cluster& cluster,
                                const Placement* current, const VerifyOptions& options);

/// Failures of that many units that some plan could survive with certainty: the most distinct units
/// that every expert can live on, less one; -1 if the experts do not even fit once.
/// Local, pure.
std::int64_t LargestFaults(const TokenCounts& loads, const Cluster& cluster, FailureUnit unit);

/// Refuses a number of failures that no plan survives.
/// \error kInfeasible  says the largest that one does
/// Local, pure.
Status CheckFaults(std::uint64_t faults, const TokenCounts& loads, const Cluster& cluster,
                   FailureUnit unit);

/// Refuses a plan that survives fewer failures than asked.
/// \error kInfeasible  says how many it survives, and how many another plan could
/// Local, pure.
Status CheckSurvives(const VerifiedPlan& plan, std::uint64_t faults, const TokenCounts& loads,
                     const Cluster& cluster, FailureUnit unit);

}  // namespace shardwright::placement
