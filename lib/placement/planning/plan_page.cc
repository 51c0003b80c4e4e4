// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "placement/io/report_page.h"
#include "placement/planning/planning.h"
#include "support/base/stop.h"

namespace shardwright::placement {
namespace {

/// Returns the ratio of the busiest GPU's load to the mean, averaged over layers with tokens.
double MeanImbalance(const Placement& placement, const TokenCounts& loads, const Cluster& cluster) {
  const std::vector<double> speeds = RelativeSpeeds(cluster);
  double sum = 0;
  double layers = 0;
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    const std::vector<double> load = DeviceLoads(placement, loads, cluster, l);
    const double all = std::inner_product(load.begin(), load.end(), speeds.begin(), 0.0);
    if (all <= 0) continue;
    sum += *std::max_element(load.begin(), load.end()) * cluster.live_devices() / all;
    layers += 1;
  }
  return layers > 0 ? sum / layers : 1;
}

/// Returns the balance of the report's placements on some iterations of the recording.
std::vector<AgeingPoint> AgeingOf(const PlanRequest& request, const PlanInput& input,
                                  const ReportPage& page) {
  constexpr std::size_t kPoints = 24;
  const token_counts::TokenTrace& trace = input.recordings.front().trace;
  const std::size_t records = trace.records.size();
  const std::size_t count = std::min(kPoints, records);
  std::vector<AgeingPoint> points;
  if (count < 2) return points;
  for (std::size_t i = 0; i < count; ++i) {
    token_counts::LoadWindow window;
    window.layers = request.window.layers;
    window.windows = {1};
    window.at = trace.records[i * (records - 1) / (count - 1)].iteration;
    const auto one = token_counts::Pick(trace, window);
    if (!one) continue;  // the reader merged this record
    AgeingPoint& point = points.emplace_back();
    point.iteration = *window.at;
    point.after = MeanImbalance(page.plan->result.placement, *one, input.cluster);
    if (page.before != nullptr) point.before = MeanImbalance(*page.before, *one, input.cluster);
  }
  return points;
}

}  // namespace

std::string PlanPage(const PlanRequest& request, const PlanInput& input, const PlannedRow& chosen,
                     const std::vector<PlannedRow>& rows, Sink& sink) {
  const Interruptible making(sink);
  ReportPage page;
  page.loads = &input.loads;
  page.cluster = &input.cluster;
  page.plan = &*chosen.plan;
  page.unit = request.options.failure_unit;
  page.loads_name = request.loads;
  page.before_name = "vanilla";
  if (input.current) {
    page.before = &*input.current;
    page.before_name = "old plan";
  }
  for (const PlannedRow& row : rows) {
    if (row.strategy == "vanilla" && row.plan && page.before == nullptr) {
      page.before = &row.plan->result.placement;
    }
    page.rows.push_back(
        {row.strategy, row.plan ? &*row.plan : nullptr, row.seconds, row.reason, &row.cost});
  }
  page.cost = &chosen.cost;
  page.ageing = AgeingOf(request, input, page);
  return PageText(page);
}

}  // namespace shardwright::placement
