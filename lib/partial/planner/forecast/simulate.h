// SPDX-License-Identifier: Apache-2.0
// lib/partial/planner/forecast: what a way to take checkpoints would cost, told beforehand.
// Simulate plays a trace of loads with faults; auto_config.h chooses K and the interval;
// planned_checkpoints.h says what the next checkpoints will save; replay_costs.h what a log of
// gradients costs; overhead.h, bubbles.h, gradient_plan.h and extra_capacity.h are the formulas of
// the papers. No checkpoint is read or written here. Source: docs/pec-planning.md.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "partial/planner/forecast/replay_costs.h"
#include "partial/select/dynamic_k.h"
#include "partial/select/gradient_plan.h"
#include "partial/select/lost_tokens.h"
#include "partial/select/selection.h"
#include "partial/select/sharding/sharding.h"
#include "partial/select/sizes.h"
#include "partial/select/types.h"
#include "support/base/result.h"
#include "support/base/stop.h"
#include "token_counts/trace.h"

namespace shardwright::partial {

/// A fault after an iteration has ended.
struct SimulatedFault {
  std::uint64_t iteration = 0;
  std::vector<std::uint32_t> nodes;  ///< whose memory is gone; none: a software fault
};

/// Faults from a rate and a seed: each iteration of [first, last] ends with one with probability
/// `rate`. A fault takes the memory of one node (all equally likely) with probability `node_share`,
/// otherwise that of none. Same input, same faults, on every machine.
/// \error kUsage  a probability that is not in [0, 1], no nodes, first > last
/// Pure.
Result<std::vector<SimulatedFault>> MakeFaults(double rate, std::uint64_t first, std::uint64_t last,
                                               std::uint32_t nodes, double node_share,
                                               std::uint64_t seed);

/// A way to take checkpoints that is tried.
struct SimulatedPolicy {
  Policy policy = Policy::kSequential;
  std::uint32_t k_snapshot = 1;
  std::uint32_t k_persist = 1;           ///< budget policies take k_persist * M experts in total
  std::optional<std::uint64_t> max_age;  ///< load-aware
  /// Dynamic K: the PLT that the run may lose. K starts at k_snapshot and doubles at both levels
  /// after faults; k_persist is not looked at.
  std::optional<double> dynamic_limit = std::nullopt;
  /// With kReplay: at every checkpoint this rule decides for every expert between its gradients
  /// since the checkpoint before, in the type of the weights, and its state; K is not looked at. It
  /// is computed only. Absent: what an agent does (docs/lossless.md).
  std::optional<GradientRule> rule = std::nullopt;
  std::uint64_t budget_bytes = 0;  ///< kReplay without a rule: as ReplayPoint
};

/// Every policy that may lose tokens with K = 1, 2, 4, ... up to N (one level: k_snapshot =
/// k_persist), and `full`.
std::vector<SimulatedPolicy> AllPolicies(std::uint32_t experts);

/// The run. Times of 0 leave out what depends on them.
struct SimulationInput {
  std::vector<Counts> tokens;  ///< [iteration - 1][layer][expert]: what the run routes
  ExpertMap map;
  SaveRanks ranks;
  std::uint32_t ranks_per_node = 1;  ///< consecutive data-parallel ranks
  ModelBytes model;                  ///< its expert table fits the map
  Keep keep;
  std::uint64_t interval = 1;          ///< I: checkpoints after iterations I, 2I, ...
  std::vector<SimulatedFault> faults;  ///< ascending iteration
  /// The first checkpoint saves all experts, so that every expert has a version.
  bool first_full = true;
  std::uint64_t split_above = 0;    ///< as ShardModules
  double snapshot_bytes_per_s = 0;  ///< of a rank
  double forward_backward_s = 0;
  double iteration_s = 0;
  double restart_s = 0;
  double storage_bytes_per_s = 0;     ///< of a rank, for a log of gradients
  double replay_elems_per_s = 0;      ///< of a rank
  std::uint64_t full_every = 500;     ///< as GradientOptions and ReplayPoint
  std::uint64_t gradient_budget = 0;  ///< as GradientOptions, for kLeast
};

/// The token counts of a trace, one table per iteration. Records are taken in their order as
/// iterations 1, 2, ..., whatever their numbers.
/// \error kLimit, kBadInput  as ValidateExperts
/// Pure.
Result<std::vector<Counts>> CountsOfTrace(const token_counts::TokenTrace& trace);

/// Tokens at risk right after a checkpoint.
struct RiskPoint {
  std::uint64_t step = 0;       ///< iterations run so far, those run again included
  std::uint64_t iteration = 0;  ///< of the checkpoint
  double fraction = 0;
};

/// A K and the point from which it was used.
struct KPoint {
  std::uint64_t step = 0;       ///< as RiskPoint; 0: from the start
  std::uint64_t iteration = 0;  ///< after which the fault came
  std::uint32_t k = 0;
};

/// How dynamic K went.
struct DynamicRun {
  DynamicK state;         ///< at the end of the run
  std::vector<KPoint> k;  ///< ascending step and K
  /// Faults that the budget still covers at the end, each costing what even routing makes it cost;
  /// absent as FaultsCovered.
  std::optional<std::uint64_t> faults_covered;
};

/// What was saved, and what each fault cost. Enough to count the lost tokens again.
struct SimulatedRun {
  struct Checkpoint {
    std::uint64_t iteration = 0;
    Selection memory;
    Selection storage;
  };
  struct Fault {
    std::uint64_t iteration = 0;
    Selection lost;                    ///< experts whose memory copies are gone
    std::uint64_t resume = 0;          ///< X
    std::vector<std::uint64_t> layer;  ///< [layer]: tokens that it loses
  };
  std::vector<Checkpoint> checkpoints;  ///< in the order of the run
  std::vector<Fault> faults;            ///< in the order of the run
};

/// What one policy did in the run.
struct SimulationRow {
  SimulatedPolicy policy;
  std::uint64_t checkpoints = 0;       ///< taken, those before faults included
  std::uint64_t snapshot_bytes = 0;    ///< of all checkpoints together
  std::uint64_t persist_bytes = 0;     ///< of all checkpoints together
  std::uint64_t bottleneck_bytes = 0;  ///< the largest share of a rank in a partial persist
  std::uint64_t bound_bytes = 0;       ///< least possible for that checkpoint
  LossSummary loss;                    ///< PLT, MLT; against the counts of the trace
  double risk_mean = 0;                ///< tokens at risk at a persist, as a fraction
  double risk_max = 0;
  std::uint64_t replayed_iterations = 0;  ///< run again after faults
  double stall_s = 0;                     ///< O_save of the slowest partial snapshot
  double overhead_s = 0;                  ///< eq 3: stalls, restarts, iterations run again
  std::uint64_t log_bytes = 0;            ///< of gradients, of the whole run
  double log_stall_s = 0;                 ///< of the longest iteration that was logged
  /// With gradients: iterations in which every expert's state was saved once, the longest such.
  std::uint64_t window = 0;
  /// Most that snapshots in memory hold, all nodes together: a state, what the two older of three
  /// buffers have beside it, and the gradients of two iterations.
  std::uint64_t memory_bytes = 0;
  /// The longest restart: a fault right before the next checkpoint that takes all memory. Absent
  /// for what is computed only.
  std::optional<double> recovery_s;
  std::vector<RiskPoint> risk;        ///< by persist, those before faults included
  std::optional<DynamicRun> dynamic;  ///< with dynamic_limit
  SimulatedRun run;
};

/// Runs one policy over the trace: counts tokens, takes checkpoints (durable at once), and at each
/// fault goes back to the newest one. Experts come from memory, or from storage where the node that
/// saved them is lost. Before the first checkpoint training goes back to iteration 0: nothing
/// counts as lost. Iterations that are run again route the same tokens, and their faults do not
/// come back. Dynamic K is told each fault's share of the tokens of the whole run. With kReplay
/// older experts are brought to the newest checkpoint by gradients, which were logged since the
/// first one: nothing is lost. Gradients of the experts that the next checkpoint will have are not
/// logged, but for the interval after a fault, and where a fault leaves the agents: then they log
/// what they had held back.
/// \error kUsage  no tokens, an interval of 0, faults that descend or lie outside the run, kReplay
///        without a full first checkpoint, a rule for another policy;
///        kMismatch  a map or a model of other experts; kStopped; as SelectTwoLevels, PlanSave,
///        MakeDynamicK
/// Pure but for `stop`. Source: docs/pec-planning.md sections 2 to 7 and 8.2.
Result<SimulationRow> Simulate(const SimulationInput& input, const SimulatedPolicy& policy,
                               const StopCheck& stop = {});

/// One row for each policy.
/// \error as Simulate, with the policy's name unless it is kStopped
/// Pure but for `stop`.
Result<std::vector<SimulationRow>> SimulateAll(const SimulationInput& input,
                                               std::span<const SimulatedPolicy> policies,
                                               const StopCheck& stop = {});

}  // namespace shardwright::partial
