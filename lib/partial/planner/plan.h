// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "partial/planner/agent_bandwidths.h"
#include "partial/planner/forecast/bubbles.h"
#include "partial/planner/forecast/planned_checkpoints.h"
#include "partial/planner/job.h"
#include "partial/planner/level_budgets.h"
#include "partial/select/budget.h"
#include "partial/select/dynamic_k.h"
#include "partial/select/gradient_plan.h"
#include "partial/select/sharding/replica_placement.h"
#include "support/base/result.h"
#include "support/base/sink.h"

namespace shardwright::partial {

/// The checkpoints to plan; the fields correspond to flags of pec-save plan.
struct PlanRequest {
  JobRequest job;
  Policy policy = Policy::kSequential;
  std::uint64_t k = 1;
  std::optional<std::uint64_t> k_persist;  ///< absent: k
  std::optional<std::uint64_t> max_age;
  std::uint64_t budget_bytes = 0;  ///< 0: k experts per layer on average
  /// Bytes per second from the device of a rank to host memory. With job.iteration_s it gives the
  /// budget in place of budget_bytes; 0: it does not.
  std::uint64_t host_bandwidth = 0;
  std::uint64_t network_bandwidth = 0;  ///< of a rank to other nodes; 0: plan no remote level
  /// Measured bandwidths, divided among the ranks: the host bandwidth in place of host_bandwidth,
  /// and the network bandwidth if network_bandwidth is 0.
  std::optional<AgentBandwidths> agent;
  std::string tokens;  ///< token log; empty: use the counts of the store
  std::uint64_t checkpoints = 1;
  std::uint64_t zero_stage = 0;
  std::uint64_t split_above = 0;          ///< split modules above this many bytes; 0: never
  std::vector<std::uint32_t> dead_ranks;  ///< ranks that save nothing
  std::uint64_t interval = 1;             ///< iterations between checkpoints
  std::optional<std::uint64_t> copies;    ///< number of copies of each worker's part of a snapshot
  std::uint64_t pipeline_stages = 1;      ///< with dp workers each
  std::uint64_t copy_bandwidth = 0;       ///< bytes per second and worker; 0: omit times
  bool gradients = false;                 ///< send gradients instead of state where possible
  std::uint64_t full_every = 500;         ///< maximum number of consecutive gradients
  /// Bytes per iteration, uses GradientRule::kLeast; 0: use MoEtion's rule.
  std::uint64_t gradient_budget = 0;
  std::optional<std::uint64_t> micro_batches;  ///< absent: omit bubbles
  double forward_s = 0;                        ///< per micro-batch
  double backward_s = 0;
  std::uint64_t chunks = 1;  ///< interleaved model chunks per stage
  std::optional<std::uint64_t>
      capacity;                        ///< tokens of an expert in an iteration; absent: no increase
  std::uint64_t lost_tokens = 0;       ///< lost tokens that an expert makes up for
  std::optional<double> retrieval_s;   ///< absent: omit the work that a failure wastes
  std::optional<double> checkpoint_s;  ///< absent: from the largest share of a snapshot
  std::optional<double> dynamic_limit;  ///< PLT of the whole run; absent: constant K
  bool dynamic_predicts = false;
  std::uint64_t iterations = 100'000;  ///< length of the whole run, for dynamic K
  std::optional<double> lost_share;    ///< as Job::LostShare
};

/// Experts that a budget selects for the first checkpoint, by both budget policies.
struct BudgetAnswer {
  std::uint64_t stall_bytes = 0;
  BudgetSelection layers;
  BudgetSelection global;
  std::string record;  ///< of the policy of the plan
};

/// Copies of a snapshot in the memory of other nodes.
struct CopiesAnswer {
  WorkerGrid grid;
  ReplicaPlan plan;
  std::vector<std::uint64_t> sends;     ///< [worker]: bytes of all its copies
  std::vector<std::uint64_t> receives;  ///< [worker]
  std::uint64_t all_bytes = 0;          ///< total of all workers
  double longest_s = 0;                 ///< seconds of the worker that sends or receives most
};

/// Size of the gradient log that accompanies checkpoints of policy gradient-log.
struct LogAnswer {
  std::uint64_t bytes = 0;       ///< per iteration
  std::uint64_t rank_bytes = 0;  ///< equal share of a rank
  /// Bytes of checkpoint and gradients per interval; a full checkpoint is in answer.full.
  std::uint64_t interval_bytes = 0;
  std::uint64_t window = 0;  ///< iterations until every expert has been saved once
  /// Longest interval at which full checkpoints write at least as many bytes.
  std::uint64_t pays_up_to = 0;
};

/// Bytes to send for the experts of a checkpoint.
struct GradientAnswer {
  TransferPlan plan;
  std::uint64_t state_bytes = 0;  ///< without gradients
  std::uint64_t window = 0;       ///< iterations until every expert was sent in full once

  std::uint64_t bytes() const { return plan.gradient_bytes + plan.full_bytes; }
};

/// Part of the largest share of a snapshot that fits into pipeline bubbles.
struct BubblesAnswer {
  std::vector<BubbleTimes> stage;
  std::uint32_t rank = 0;
  std::vector<std::string> names;
  std::vector<std::uint64_t> bytes;
  BubblePlan snapshot;
  std::optional<BubblePlan> copies;  ///< for the worker that sends most
};

/// Extra capacity of experts after a recovery.
struct ExtraCapacityAnswer {
  std::uint64_t least = 0;       ///< ceil(lost / (capacity / 10))
  std::uint64_t extra = 0;       ///< whole tokens per iteration
  std::uint64_t iterations = 0;  ///< with extra tokens
};

struct WastedAnswer {
  double checkpoint_s = 0;
  double wasted_s = 0;
};

struct DynamicKAnswer {
  DynamicK state;
  std::optional<std::vector<KLevel>> levels;
};

/// Result of planning.
struct PlanAnswer {
  PlanRequest request;
  Job job;
  SelectionOptions options;
  CheckpointSize full;
  std::vector<PlannedCheckpoint> checkpoints;
  std::string selection_record;
  std::optional<bool> uneven;           ///< eq 9; absent: does not apply
  std::optional<std::uint32_t> phases;  ///< number of different share plans; absent as `uneven`
  std::optional<BudgetAnswer> budget;
  std::optional<LevelBudgets> levels;  ///< with a host bandwidth
  std::optional<LogAnswer> log;        ///< for Policy::kReplay
  std::optional<CopiesAnswer> copies;
  std::vector<GradientAnswer> gradients;
  std::optional<BubblesAnswer> bubbles;
  std::optional<ExtraCapacityAnswer> extra_capacity;
  std::optional<WastedAnswer> wasted;
  std::optional<DynamicKAnswer> dynamic_k;

  /// Returns the experts that a checkpoint sends to other nodes: those of the remote level, or
  /// without one the whole snapshot.
  /// \pre t < checkpoints.size()
  const Selection& SentExperts(std::size_t t) const {
    return levels && levels->remote ? levels->remote->sent[t].selected
                                    : checkpoints[t].snapshot.selection;
  }
};

/// Plans the next checkpoints of a store or of given sizes, with the requested extra sections.
/// \error kUsage  a policy that needs unknown tokens, tokens that end before the
///        store; kLimit  too many workers for the placement of copies; kStopped;
///        as ReadJob, PlanCheckpoints and the functions for the requested sections
/// Local. Source: docs/pec-planning.md sections 1 to 12.
Result<PlanAnswer> PlanCheckpoints(const PlanRequest& request, Sink& sink);

/// Makes the `result` of the JSON report (docs/pec-planning.md section 12).
/// \error as the records of partial/planner/forecast/records.h
/// Pure.
Result<nlohmann::json> PlanJson(const PlanAnswer& answer);

/// Formats the answer as text: a table for each section
/// with data. Long tables show only their largest rows.
/// Pure.
std::string PlanText(const PlanAnswer& answer);

}  // namespace shardwright::partial
