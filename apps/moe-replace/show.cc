// SPDX-License-Identifier: Apache-2.0
#include "moe-replace/show.h"

#include <nlohmann/json.hpp>
#include <ostream>

#include "placement/planning/planning_json.h"
#include "placement/planning/planning_text.h"
#include "support/text/text.h"

namespace shardwright::apps {

void ShowPlan(cli::Context& context, const MoeFlags& flags, const placement::PlanInput& input,
              const placement::PlannedRow& row, const std::string& output) {
  std::ostream& out = context.out();
  out << placement::SummaryText(flags.request, input, row);
  if (!output.empty()) out << "written   " << text::Printable(output) << "\n";
  if (!flags.report.empty()) out << "report    " << text::Printable(flags.report) << "\n";
  out << "\n" << placement::LayersText(input, row);
  context.SetResult(placement::PlanJson(flags.request, input, row));
}

}  // namespace shardwright::apps
