// SPDX-License-Identifier: Apache-2.0
#include "placement/failure_simulation/incidents.h"

#include <algorithm>

#include "support/base/text.h"

namespace shardwright::placement {
namespace {

/// Returns the names of strategies. For most of all strategies, names the others instead.
std::string Among(const std::vector<std::string>& names,
                  const std::vector<SimulationResult>& results) {
  if (names.size() == results.size()) return "all";
  if (names.size() * 2 < results.size()) return Joined(names, ", ");
  std::vector<std::string> others;
  for (const SimulationResult& result : results) {
    const bool named = std::find(names.begin(), names.end(), result.strategy) != names.end();
    if (!named) others.push_back(result.strategy);
  }
  return "all but " + Joined(others, ", ");
}

}  // namespace

std::map<std::uint64_t, Incident> IncidentOf(const std::vector<SimulationResult>& results) {
  std::map<std::uint64_t, Incident> moments;
  for (const SimulationResult& result : results) {
    for (const SimulationStep& step : result.steps) {
      const bool stalled = step.state == SimulationStep::State::kStalled;
      if (!stalled && step.experts_lost == 0) continue;
      Incident& moment = moments[step.time_ms];
      if (moment.step == nullptr) moment.step = &step;
      if (step.experts_lost > 0) moment.lost.push_back(result.strategy);
      if (stalled) moment.stalled.push_back(result.strategy);
    }
  }
  return moments;
}

std::string IncidentText(const Incident& moment, const std::vector<SimulationResult>& results) {
  if (results.size() == 1) {
    const bool lost = moment.step->experts_lost > 0;
    std::string text = lost ? Plural(moment.step->experts_lost, "expert") + " lost" : "";
    if (moment.stalled.empty()) return text + ", restored from a checkpoint";
    return text + (lost ? "; no plan: " : "no plan: ") + moment.step->reason;
  }
  std::string text;
  if (!moment.lost.empty()) text = "lost: " + Among(moment.lost, results);
  if (moment.stalled.empty()) return text;
  return text + (text.empty() ? "no plan: " : "; no plan: ") + Among(moment.stalled, results);
}

}  // namespace shardwright::placement
