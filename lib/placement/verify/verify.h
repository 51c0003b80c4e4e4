// SPDX-License-Identifier: Apache-2.0
// lib/placement/verify: verification and measurement of plans.
// VerifyPlan does not trust the notes of a strategy. It checks every plan against the rules
// and measures all plans in the same way: load of the GPUs, survival, moves. A plan that
// breaks a rule is never written.

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

/// A plan with its measures.
struct VerifiedPlan {
  std::string strategy;
  StrategyResult result;
  ModelMetrics metrics;
  std::vector<RecoveryProbability> layer_recovery;  ///< by layer
  RecoveryProbability model_recovery;
  std::optional<Migration> migration;  ///< from the old plan, if there was one
  /// Bytes copied by the sparse collectives of one iteration, by layer; empty for other strategies.
  std::vector<SparseVolumes> volumes;
};

/// Requirements of a plan, and options of its measurement.
struct VerifyOptions {
  FailureUnit unit = FailureUnit::kNode;
  RecoveryOptions recovery;
  bool forward = false;   ///< nodes may forward experts that they received
  std::vector<Pin> pins;  ///< that the plan must obey
  StopCheck stop = {};    ///< ends verification with kStopped
};

/// Verifies that a plan can be written, and measures it.
/// \param current  placement on the devices now, or null
/// \error kInternal  names the rule that the plan breaks, so that it must not be written; kStopped
/// Local; layers in parallel on the caller's task arena.
Result<VerifiedPlan> VerifyPlan(std::string_view strategy, StrategyResult result,
                                const TokenCounts& loads, const Cluster& cluster,
                                const Placement* current, const VerifyOptions& options);

/// Returns the largest number of failed units that some plan survives with certainty: the most
/// distinct units that can have a replica of every expert, minus one; -1 if the experts do not fit.
/// Local, pure.
std::int64_t LargestFaults(const TokenCounts& loads, const Cluster& cluster, FailureUnit unit);

/// Fails for a number of failures that no plan survives.
/// \error kInfeasible  names the largest number that a plan survives
/// Local, pure.
Status CheckFaults(std::uint64_t faults, const TokenCounts& loads, const Cluster& cluster,
                   FailureUnit unit);

/// Fails for a plan that survives fewer failures than requested.
/// \error kInfeasible  names the number that it survives, and the number that another plan could
/// Local, pure.
Status CheckSurvives(const VerifiedPlan& plan, std::uint64_t faults, const TokenCounts& loads,
                     const Cluster& cluster, FailureUnit unit);

}  // namespace shardwright::placement
