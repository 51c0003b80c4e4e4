// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "partial/planner/forecast/bubbles.h"
#include "partial/planner/forecast/planned_checkpoints.h"
#include "partial/planner/job.h"
#include "partial/select/budget.h"
#include "partial/select/dynamic_k.h"
#include "partial/select/gradient_plan.h"
#include "partial/select/sharding/replica_placement.h"
#include "support/base/result.h"
#include "support/base/sink.h"

namespace shardwright::partial {

/// The checkpoints that are planned; the fields are the flags of pec-save plan.
struct PlanRequest {
  JobRequest job;
  Policy policy = Policy::kSequential;
  std::uint64_t k = 1;
  std::optional<std::uint64_t> k_persist;  ///< absent: k
  std::optional<std::uint64_t> max_age;
  std::uint64_t budget_bytes = 0;  ///< 0: k experts per layer on average
  std::string tokens;              ///< file of loads; empty: what the store has counted
  std::uint64_t checkpoints = 1;
  std::uint64_t zero_stage = 0;
  std::uint64_t split_above = 0;          ///< bytes of a module; 0: never
  std::vector<std::uint32_t> dead_ranks;  ///< save nothing
  std::uint64_t interval = 1;             ///< iterations between checkpoints
  std::optional<std::uint64_t> copies;    ///< of each worker's part of a snapshot
  std::uint64_t pipeline_stages = 1;      ///< of dp workers each
  std::uint64_t copy_bandwidth = 0;       ///< bytes per second of a worker; 0: no times
  bool gradients = false;                 ///< in place of state
  std::uint64_t full_every = 500;         ///< gradients in a row before the state
  /// Of an iteration: GradientRule::kLeast with it; 0: MoEtion's rule.
  std::uint64_t gradient_budget = 0;
  std::optional<std::uint64_t> micro_batches;  ///< absent: no bubbles
  double forward_s = 0;                        ///< of a micro-batch
  double backward_s = 0;
  std::uint64_t chunks = 1;               ///< interleaved model chunks of a stage
  std::optional<std::uint64_t> capacity;  ///< tokens of an expert in an iteration; absent: no boost
  std::uint64_t lost_tokens = 0;          ///< that an expert makes up
  std::optional<double> retrieval_s;      ///< absent: what a failure wastes is not asked
  std::optional<double> checkpoint_s;     ///< absent: of the largest share of a snapshot
  std::optional<double> dynamic_limit;    ///< PLT of the whole run; absent: K stays
  bool dynamic_predicts = false;
  std::uint64_t iterations = 100'000;  ///< of the whole run, for dynamic K
  std::optional<double> lost_share;    ///< as Job::LostShare
};

/// What a budget buys in the first checkpoint, chosen in both ways.
struct BudgetAnswer {
  std::uint64_t stall_bytes = 0;
  BudgetSelection layers;
  BudgetSelection global;
  std::string record;  ///< of the policy that is planned
};

/// Copies of a snapshot in the memory of other nodes.
struct CopiesAnswer {
  WorkerGrid grid;
  ReplicaPlan plan;
  std::vector<std::uint64_t> sends;     ///< [worker]: for all its copies
  std::vector<std::uint64_t> receives;  ///< [worker]
  std::uint64_t all_bytes = 0;          ///< of all workers
  double longest_s = 0;                 ///< of the worker that sends or receives most
};

/// The log of gradients beside the checkpoints of policy gradient-log.
struct LogAnswer {
  std::uint64_t bytes = 0;       ///< of an iteration
  std::uint64_t rank_bytes = 0;  ///< of a rank's equal share of them
  /// Checkpoint and gradients of an interval; a full checkpoint alone has answer.full.
  std::uint64_t interval_bytes = 0;
  std::uint64_t window = 0;  ///< iterations in which every expert is saved once
  /// The longest interval at which full checkpoints write no less.
  std::uint64_t pays_up_to = 0;
};

/// What is sent of a checkpoint's experts.
struct GradientAnswer {
  TransferPlan plan;
  std::uint64_t state_bytes = 0;  ///< without gradients
  std::uint64_t window = 0;       ///< iterations in which every expert was sent in full once

  std::uint64_t bytes() const { return plan.gradient_bytes + plan.full_bytes; }
};

/// What of the largest share of a snapshot fits the bubbles.
struct BubblesAnswer {
  std::vector<BubbleTimes> stage;
  std::uint32_t rank = 0;
  std::vector<std::string> names;
  std::vector<std::uint64_t> bytes;
  BubblePlan snapshot;
  std::optional<BubblePlan> copies;  ///< of the worker that sends most
};

/// Capacity after a recovery.
struct ExtraCapacityAnswer {
  std::uint64_t least = 0;       ///< ceil(lost / (capacity / 10))
  std::uint64_t extra = 0;       ///< whole tokens an iteration
  std::uint64_t iterations = 0;  ///< with them
};

struct WastedAnswer {
  double checkpoint_s = 0;
  double wasted_s = 0;
};

struct DynamicKAnswer {
  DynamicK state;
  std::optional<std::vector<KLevel>> levels;
};

/// All that a plan answers.
struct PlanAnswer {
  PlanRequest request;
  Job job;
  SelectionOptions options;
  CheckpointSize full;
  std::vector<PlannedCheckpoint> checkpoints;
  std::string selection_record;
  std::optional<bool> uneven;           ///< eq 9; absent: it does not tell
  std::optional<std::uint32_t> phases;  ///< different plans of shares; absent as `uneven`
  std::optional<BudgetAnswer> budget;
  std::optional<LogAnswer> log;  ///< with Policy::kReplay
  std::optional<CopiesAnswer> copies;
  std::vector<GradientAnswer> gradients;
  std::optional<BubblesAnswer> bubbles;
  std::optional<ExtraCapacityAnswer> extra_capacity;
  std::optional<WastedAnswer> wasted;
  std::optional<DynamicKAnswer> dynamic_k;
};

/// Plans the next checkpoints of a store or of told sizes, and answers what else is asked.
/// \error kUsage  a policy that needs tokens which are not known, tokens that end before the store;
///        kLimit  more workers than copies are placed for; kStopped; as ReadJob, PlanCheckpoints
///        and the functions that the request asks for
/// Local. Source: docs/pec-planning.md sections 1 to 12.
Result<PlanAnswer> PlanCheckpoints(const PlanRequest& request, Sink& sink);

/// The report's `result` (docs/pec-planning.md section 12).
/// \error as the records of partial/planner/forecast/records.h
/// Pure.
Result<nlohmann::json> PlanJson(const PlanAnswer& answer);

/// The answer for people: a table for each section that there is. Long ones show their largest
/// rows.
/// Pure.
std::string PlanText(const PlanAnswer& answer);

}  // namespace shardwright::partial
