// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "moe-replace/flags.h"
#include "placement/planning/planning.h"
#include "support/cli/app.h"

namespace shardwright::apps {

/// Shows one plan: its quality, its output file, and one line per layer.
/// \param output  path of the written plan; empty: none
void ShowPlan(cli::Context& context, const MoeFlags& flags, const placement::PlanInput& input,
              const placement::PlannedRow& row, const std::string& output);

}  // namespace shardwright::apps
