#pragma once

#include <string>

#include "cli/app.h"
#include "moe-replace/flags.h"
#include "moe/planning/planning.h"

namespace shardwright::apps {

/// Shows one plan: what it is good for, where it was written, and a line per layer.
/// \param output  file that it was written to; empty: none
void ShowPlan(cli::Context& context, const MoeFlags& flags, const moe::PlanInput& input,
              const moe::PlannedRow& row, const std::string& output);

}  // namespace shardwright::apps
