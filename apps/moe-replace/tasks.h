#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/app.h"
#include "moe-replace/flags.h"
#include "moe/judge.h"
#include "moe/load_trace.h"
#include "moe/metrics.h"
#include "moe/types.h"

namespace shardwright::apps {

/// What a plan is made from.
struct MoeInput {
  moe::LoadTrace trace;
  moe::Loads loads;
  moe::Cluster cluster;
  std::optional<moe::Placement> current;  ///< --old
  std::optional<moe::Loads> later;        ///< --measured-at
};

/// A plan of one strategy, or why there is none.
struct MoeRow {
  std::string strategy;                 ///< or the format, of a plan that was read
  std::string file;                     ///< of a plan that was read
  std::optional<moe::JudgedPlan> plan;  ///< on rank 0
  double seconds = 0;                   ///< of planning alone
  std::optional<moe::ModelMetrics> later;
  std::string reason;

  /// On the loads that balance is measured on.
  const moe::ModelMetrics& balance() const { return later ? *later : plan->metrics; }
};

/// Reads what the flags name. Every rank reads.
/// Collective.
Result<MoeInput> ReadMoeInput(cli::Context& context, const MoeFlags& flags);

/// Plans with one strategy and measures the plan; a plan that does not exist is a reason.
/// Collective.
Result<MoeRow> PlanWith(cli::Context& context, const MoeFlags& flags, const MoeInput& input,
                        const moe::Strategy& strategy);

/// All strategies, in their order.
/// Collective.
Result<std::vector<MoeRow>> PlanWithAll(cli::Context& context, const MoeFlags& flags,
                                        const MoeInput& input);

/// The four tasks of the command. Collective.
Status RunPlan(cli::Context& context, const MoeFlags& flags);
Status RunCompare(cli::Context& context, const MoeFlags& flags);
Status RunEvents(cli::Context& context, const MoeFlags& flags);
Status RunEvaluate(cli::Context& context, const MoeFlags& flags);

}  // namespace shardwright::apps
