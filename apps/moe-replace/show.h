#pragma once

#include <string>
#include <vector>

#include "cli/app.h"
#include "moe-replace/flags.h"
#include "moe/planning/planning.h"

namespace shardwright::apps {

// Each shows an answer: tables of at most 100 columns for people, everything for --json. On rank 0;
// elsewhere nothing is shown.

/// One plan: what it is good for, and a line per layer.
/// \param output  file that it was written to; empty: none
void ShowPlan(cli::Context& context, const MoeFlags& flags, const moe::PlanInput& input,
              const moe::PlannedRow& row, const std::string& output);

/// All strategies in one table.
void ShowComparison(cli::Context& context, const MoeFlags& flags, const moe::PlanInput& input,
                    const std::vector<moe::PlannedRow>& rows);

/// Replays, one line per strategy and one per moment at which something was lost.
/// \param events  file that was played
void ShowReplays(cli::Context& context, const std::string& events, const moe::Replays& replays);

}  // namespace shardwright::apps
