#pragma once

#include <vector>

#include "cli/app.h"
#include "moe-replace/flags.h"
#include "moe-replace/tasks.h"
#include "moe/replay.h"

namespace shardwright::apps {

// Each shows an answer: tables of at most 100 columns for people, everything for --json. On rank 0;
// elsewhere nothing is shown.

/// One plan: what it is good for, and a line per layer.
void ShowPlan(cli::Context& context, const MoeFlags& flags, const MoeInput& input,
              const MoeRow& row);

/// All strategies in one table.
void ShowComparison(cli::Context& context, const MoeFlags& flags, const MoeInput& input,
                    const std::vector<MoeRow>& rows);

/// Replays, one line per strategy and one per moment at which something was lost.
void ShowReplays(cli::Context& context, const MoeFlags& flags, const moe::Cluster& cluster,
                 const std::vector<moe::ReplayResult>& results);

}  // namespace shardwright::apps
