// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "partial/planner/forecast/planned_checkpoints.h"
#include "partial/planner/job.h"
#include "partial/select/budget.h"
#include "support/base/result.h"
#include "support/base/stop.h"

namespace shardwright::partial {

/// Budget of one level of memory, host memory or other nodes, from its bandwidth.
struct LevelBudget {
  std::uint64_t bandwidth = 0;   ///< bytes per second of a rank
  double iteration_s = 0;        ///< seconds per iteration
  std::uint64_t ranks = 1;       ///< ranks that share the level's data
  std::uint64_t rank_bytes = 0;  ///< B of MoEtion: bytes that a rank moves in an iteration
  std::uint64_t bytes = 0;       ///< of all ranks
  ExpertBudget budget;           ///< experts that fit into `bytes`
  /// Largest bytes of one rank in the first planned checkpoint, with whole experts per rank.
  std::uint64_t bottleneck_bytes = 0;

  /// Returns the seconds in which the rank with the most bytes moves them.
  double seconds() const;
  /// Returns the seconds by which `seconds` exceeds the iteration.
  double stall_s() const;
};

/// Experts that are sent to other nodes in each planned checkpoint.
struct RemoteLevel {
  LevelBudget level;
  std::uint64_t copies = 1;           ///< that each worker sends
  std::vector<BudgetSelection> sent;  ///< by checkpoint: a subset of its local experts
};

/// Budgets of both levels.
struct LevelBudgets {
  LevelBudget local;
  std::optional<RemoteLevel> remote;  ///< absent: without a network bandwidth
};

/// Computes B_local and the experts that a local copy holds. All ranks of the job that save copy at
/// the same time. A local copy contains all non-expert modules. Leaves bottleneck_bytes 0.
/// \param bandwidth  bytes per second from the device of a rank to host memory
/// \error kUsage  as BytesPerIteration, for all ranks; as BudgetOf
/// Pure. Source: MoEtion section 4.2; docs/pec-planning.md section 9.1.
Result<LevelBudget> LocalBudget(const Job& job, std::uint64_t bandwidth, double iteration_s);

/// Input for the remote level of a plan.
struct RemoteInput {
  std::uint64_t bandwidth = 0;  ///< bytes per second from a rank to other nodes
  double iteration_s = 0;
  std::uint64_t copies = 1;  ///< number of nodes that receive each part
  std::uint32_t zero_stage = 0;
  BudgetSpread spread = BudgetSpread::kLayers;
  LevelState state;             ///< versions on other nodes, and tokens since then
  Counts between;               ///< as CheckpointPlanInput::between
  std::uint64_t iteration = 0;  ///< as CheckpointPlanInput::iteration
};

/// Computes B_remote and selects which experts of each local copy are sent to other nodes. As for
/// CopyBytes, data that peers on other nodes hold is not sent, so the non-expert part may
/// take no bytes. If no expert has to be sent, all of them fit.
/// \param local  the planned checkpoints; the remote experts are a subset of their snapshots
/// \error kUsage  as BytesPerIteration, for all ranks; as CopyBytes and SelectFrom; kStopped
/// Pure but for `stop`. Source: MoEtion section 4.2, Algorithm 1; docs/pec-planning.md section 9.1.
Result<RemoteLevel> PlanRemote(const Job& job, RemoteInput input,
                               const std::vector<PlannedCheckpoint>& local,
                               const StopCheck& stop = {});

}  // namespace shardwright::partial
