// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "moe-replace/flags.h"
#include "placement/planning/planning.h"
#include "support/cli/app.h"

namespace shardwright::apps {

/// Shows one plan: what it is good for, where it was written, and a line per layer.
/// \param output  file that it was written to; empty: none
void ShowPlan(cli::Context& context, const MoeFlags& flags, const placement::PlanInput& input,
              const placement::PlannedRow& row, const std::string& output);

}  // namespace shardwright::apps
