#pragma once

#include "cli/app.h"
#include "pec/planning/plan.h"

namespace shardwright::apps {

/// The tables of a plan, one for each section that there is.
void ShowPlan(cli::Context& context, const pec::PlanAnswer& answer);

}  // namespace shardwright::apps
