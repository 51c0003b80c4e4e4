#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/app.h"
#include "pec-save/flags.h"
#include "pec-save/job.h"
#include "pec/bubbles.h"
#include "pec/budget.h"
#include "pec/coming.h"
#include "pec/dynamic_k.h"
#include "pec/gradient_plan.h"
#include "pec/replicas.h"

namespace shardwright::apps {

/// What a budget buys in the first checkpoint, chosen in both ways.
struct BudgetAnswer {
  std::uint64_t stall_bytes = 0;
  pec::BudgetSelection layers;
  pec::BudgetSelection global;
  std::string record;  ///< of the policy that is planned
};

/// Copies of a snapshot in the memory of other nodes.
struct CopiesAnswer {
  pec::WorkerGrid grid;
  pec::ReplicaPlan plan;
  std::vector<std::uint64_t> sends;     ///< [worker]: for all its copies
  std::vector<std::uint64_t> receives;  ///< [worker]
  std::uint64_t all_bytes = 0;          ///< of all workers
  double longest_s = 0;                 ///< of the worker that sends or receives most
};

/// What is sent of a checkpoint's experts.
struct GradientAnswer {
  pec::TransferPlan plan;
  std::uint64_t state_bytes = 0;  ///< without gradients

  std::uint64_t bytes() const { return plan.gradient_bytes + plan.full_bytes; }
};

/// What of the largest share of a snapshot fits the bubbles.
struct BubblesAnswer {
  std::vector<pec::BubbleTimes> stage;
  std::uint32_t rank = 0;
  std::vector<std::string> names;
  std::vector<std::uint64_t> bytes;
  pec::BubblePlan snapshot;
  std::optional<pec::BubblePlan> copies;  ///< of the worker that sends most
};

/// Capacity after a recovery.
struct BoostAnswer {
  std::uint64_t least = 0;       ///< ceil(lost / (capacity / 10))
  std::uint64_t extra = 0;       ///< whole tokens an iteration
  std::uint64_t iterations = 0;  ///< with them
};

struct WastedAnswer {
  double checkpoint_s = 0;
  double wasted_s = 0;
};

struct DynamicKAnswer {
  pec::DynamicK state;
  std::optional<std::vector<pec::KLevel>> levels;
};

/// All that --plan answers.
struct PlanAnswer {
  Job job;
  pec::SelectionOptions options;
  pec::CheckpointSize full;
  std::vector<pec::ComingCheckpoint> checkpoints;
  std::string selection_record;
  std::optional<bool> uneven;           ///< eq 9; absent: it does not tell
  std::optional<std::uint32_t> phases;  ///< different plans of shares; absent as `uneven`
  std::optional<BudgetAnswer> budget;
  std::optional<CopiesAnswer> copies;
  std::vector<GradientAnswer> gradients;
  std::optional<BubblesAnswer> bubbles;
  std::optional<BoostAnswer> boost;
  std::optional<WastedAnswer> wasted;
  std::optional<DynamicKAnswer> dynamic_k;
};

/// pec-save --plan: plans the next checkpoints and shows them.
/// \error kUsage; as PlanComing and the functions that the flags ask for
/// Local.
Status Plan(cli::Context& context, const cli::App& app, const SaveFlags& save);

/// The report's `result` (docs/pec-planning.md section 12).
/// \error as the records of pec/records.h
Result<nlohmann::json> PlanJson(const PlanAnswer& answer, const SaveFlags& save);

/// The tables, one for each section that there is.
void ShowPlan(cli::Context& context, const PlanAnswer& answer, const SaveFlags& save);

}  // namespace shardwright::apps
