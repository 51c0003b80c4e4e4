#include "moe-replace/show.h"

#include <nlohmann/json.hpp>
#include <ostream>

#include "moe/planning/planning_json.h"
#include "moe/planning/planning_text.h"
#include "text/text.h"

namespace shardwright::apps {

void ShowPlan(cli::Context& context, const MoeFlags& flags, const moe::PlanInput& input,
              const moe::PlannedRow& row, const std::string& output) {
  std::ostream& out = context.out();
  out << moe::SummaryText(flags.request, input, row);
  if (!output.empty()) out << "written   " << text::Printable(output) << "\n";
  if (!flags.report.empty()) out << "report    " << text::Printable(flags.report) << "\n";
  out << "\n" << moe::LayersText(input, row);
  context.SetResult(moe::PlanJson(flags.request, input, row));
}

}  // namespace shardwright::apps
