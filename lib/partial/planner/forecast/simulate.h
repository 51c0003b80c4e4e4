// SPDX-License-Identifier: Apache-2.0
// lib/partial/planner/forecast: cost of checkpoint policies, predicted before a run. Simulate
// simulates a trace of token counts with faults. auto_config.h chooses K and the interval,
// baselines.h describes full checkpoints of other systems, planned_checkpoints.h plans the
// contents of the next checkpoints, replay_costs.h predicts the cost of a gradient log.
// overhead.h, bubbles.h and extra_capacity.h have the formulas of the papers. This folder
// reads and writes no checkpoints. Source: docs/pec-planning.md.

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
  std::vector<std::uint32_t> nodes;  ///< nodes that lose their memory; none: a software fault
};

/// Generates faults from a seed: each iteration of [first, last] ends with a fault
/// with probability `rate`. With probability `node_share` the fault destroys the
/// memory of one node (all equally likely). The result is the same on every machine.
/// \error kUsage  a probability outside [0, 1], no nodes, first > last
/// Pure.
Result<std::vector<SimulatedFault>> MakeFaults(double rate, std::uint64_t first, std::uint64_t last,
                                               std::uint32_t nodes, double node_share,
                                               std::uint64_t seed);

/// A way to take checkpoints, to be simulated.
struct SimulatedPolicy {
  Policy policy = Policy::kSequential;
  std::uint32_t k_snapshot = 1;
  std::uint32_t k_persist = 1;           ///< budget policies take k_persist * M experts in total
  std::optional<std::uint64_t> max_age;  ///< load-aware
  /// Dynamic K: PLT limit of the run. K starts at k_snapshot and
  /// doubles at both levels after faults; k_persist is ignored.
  std::optional<double> dynamic_limit = std::nullopt;
  /// With kReplay: rule that decides at every checkpoint, for every expert, between its
  /// state and its gradients since the previous checkpoint, in the type of the weights; K is
  /// ignored. Such rows are only computed. Absent: the agent's behaviour (docs/lossless.md).
  std::optional<GradientRule> rule = std::nullopt;
  std::uint64_t budget_bytes = 0;  ///< kReplay without a rule: as ReplayPoint
};

/// Returns every policy that may lose tokens with K = 1, 2, 4,
/// ... up to N (one level: k_snapshot = k_persist), and `full`.
std::vector<SimulatedPolicy> AllPolicies(std::uint32_t experts);

/// Input of a simulation. Times of 0 omit the results that depend on them.
struct SimulationInput {
  std::vector<Counts> tokens;  ///< [iteration - 1][layer][expert]: routed tokens
  ExpertMap map;
  SaveRanks ranks;
  std::uint32_t ranks_per_node = 1;  ///< consecutive data-parallel ranks
  ModelBytes model;                  ///< with an expert table that fits the map
  Keep keep;
  std::uint64_t interval = 1;          ///< I: checkpoints after iterations I, 2I, ...
  std::vector<SimulatedFault> faults;  ///< ascending iteration
  /// True: the first checkpoint saves all experts, so that every expert has a version.
  bool first_full = true;
  std::uint64_t split_above = 0;    ///< as ShardModules
  double snapshot_bytes_per_s = 0;  ///< per rank
  double forward_backward_s = 0;
  double iteration_s = 0;
  double restart_s = 0;
  double storage_bytes_per_s = 0;     ///< per rank, for a log of gradients
  double replay_elems_per_s = 0;      ///< per rank
  std::uint64_t full_every = 500;     ///< as GradientOptions and ReplayPoint
  std::uint64_t gradient_budget = 0;  ///< as GradientOptions, for kLeast
};

/// Returns the token counts of a trace, one table per iteration. Takes records
/// in their order as iterations 1, 2, ..., regardless of their numbers.
/// \error kLimit, kBadInput  as ValidateExperts
/// Pure.
Result<std::vector<Counts>> CountsOfTrace(const token_counts::TokenTrace& trace);

/// Tokens at risk right after a checkpoint.
struct RiskPoint {
  std::uint64_t step = 0;       ///< iterations run so far, including repeated ones
  std::uint64_t iteration = 0;  ///< of the checkpoint
  double fraction = 0;
};

/// Number K of experts per snapshot, and the iteration from which a simulated run used it.
struct KPoint {
  std::uint64_t step = 0;       ///< as RiskPoint; 0: from the start
  std::uint64_t iteration = 0;  ///< last iteration before the fault
  std::uint32_t k = 0;
};

/// Course of dynamic K.
struct DynamicRun {
  DynamicK state;         ///< at the end of the run
  std::vector<KPoint> k;  ///< ascending step and K
  /// Faults that the budget still covers at the end, if each costs
  /// what even routing makes it cost; absent as in FaultsCovered.
  std::optional<std::uint64_t> faults_covered;
};

/// Saves and faults of a run, with enough data to recompute the lost tokens.
struct SimulatedRun {
  struct Checkpoint {
    std::uint64_t iteration = 0;
    Selection memory;
    Selection storage;
  };
  struct Fault {
    std::uint64_t iteration = 0;
    Selection lost;                    ///< experts that lost their memory copies
    std::uint64_t resume = 0;          ///< X
    std::vector<std::uint64_t> layer;  ///< [layer]: lost tokens
  };
  std::vector<Checkpoint> checkpoints;  ///< in the order of the run
  std::vector<Fault> faults;            ///< in the order of the run
};

/// Result of one policy.
struct SimulationRow {
  SimulatedPolicy policy;
  std::uint64_t checkpoints = 0;       ///< including those before faults
  std::uint64_t snapshot_bytes = 0;    ///< of all checkpoints together
  std::uint64_t persist_bytes = 0;     ///< of all checkpoints together
  std::uint64_t bottleneck_bytes = 0;  ///< largest share of a rank in a partial persist
  std::uint64_t bound_bytes = 0;       ///< lower bound for that checkpoint
  LossSummary loss;                    ///< PLT, MLT; against the counts of the trace
  double risk_mean = 0;                ///< tokens at risk at a persist, as a fraction
  double risk_max = 0;
  std::uint64_t replayed_iterations = 0;  ///< repeated after faults
  double stall_s = 0;                     ///< O_save of the slowest partial snapshot
  double overhead_s = 0;                  ///< eq 3: stalls, restarts, repeated iterations
  std::uint64_t log_bytes = 0;            ///< gradients of the whole run
  double log_stall_s = 0;                 ///< in the logged iteration with the longest stall
  /// With gradients: the longest time, in iterations, until every expert's state was saved.
  std::uint64_t window = 0;
  /// Largest size of snapshots in memory on all nodes: a state, blobs of the two
  /// older buffers that differ from it, and the gradients of two iterations.
  std::uint64_t memory_bytes = 0;
  /// The longest restart: after a fault right before the next checkpoint
  /// that destroys all memory. Absent for rows that are only computed.
  std::optional<double> recovery_s;
  std::vector<RiskPoint> risk;        ///< by persist, including those before faults
  std::optional<DynamicRun> dynamic;  ///< if dynamic_limit is set
  SimulatedRun run;
};

/// Simulates one policy on the trace: counts tokens, takes checkpoints (durable
/// immediately), and returns to the newest one at each fault. Experts are restored from
/// memory, or from storage if the node that saved them is lost. Before the first checkpoint,
/// training returns to iteration 0 and nothing counts as lost. Repeated iterations route the
/// same tokens, and their faults do not recur. Dynamic K is charged with each fault's share
/// of the tokens of the whole run. With kReplay, gradients logged since the first checkpoint
/// replay older experts to the newest one, so nothing is lost. Gradients of the experts of
/// the next checkpoint are not logged, except in the interval after a fault, and except at a
/// fault that leaves the agents running, which then log their buffered gradients.
/// \error kUsage  no tokens, an interval of 0, faults that descend or are
///        outside the run, kReplay without a full first checkpoint, a
///        rule for another policy; kMismatch  a map or a model of other
///        experts; kStopped; as SelectTwoLevels, PlanSave, MakeDynamicK
/// Pure but for `stop`. Source: docs/pec-planning.md sections 2 to 7 and 8.2.
Result<SimulationRow> Simulate(const SimulationInput& input, const SimulatedPolicy& policy,
                               const StopCheck& stop = {});

/// Simulates each policy and returns one row for each.
/// \error as Simulate, with the policy's name unless it is kStopped
/// Pure but for `stop`.
Result<std::vector<SimulationRow>> SimulateAll(const SimulationInput& input,
                                               std::span<const SimulatedPolicy> policies,
                                               const StopCheck& stop = {});

}  // namespace shardwright::partial
