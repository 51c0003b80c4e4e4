// SPDX-License-Identifier: Apache-2.0
// Times one strategy: moe_bench STRATEGY LOADS NODES GPUS SLOTS RUNS [OLD_LOADS]
// With OLD_LOADS the GPUs hold a plan that eplb+ made for those. Prints one JSON object: seconds of
// each run of the plan, of its recovery probabilities and of its metrics, the slots, the imbalance
// of every layer, and how many replicas move.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include <tbb/parallel_for.h>
#include <nlohmann/json.hpp>

#include "placement/core/metrics.h"
#include "placement/core/types.h"
#include "placement/migration/migration.h"
#include "placement/recovery/recovery.h"
#include "token_counts/window.h"

namespace {

namespace token_counts = shardwright::token_counts;
namespace placement = shardwright::placement;
using shardwright::Errc;
using shardwright::Fail;
using shardwright::Result;

double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

struct Task {
  std::string strategy, loads, old_loads;
  std::uint32_t nodes = 0, gpus = 0, slots = 0, runs = 0;
};

Result<placement::TokenCounts> ReadLoads(const std::string& path) {
  SW_TRY_ASSIGN(const token_counts::TokenTrace trace, token_counts::ReadLoads(path));
  return token_counts::Pick(trace, {});
}

// Seconds that the recovery probabilities of all layers and of the model take.
double TimeRecovery(const placement::Placement& placement, const placement::Cluster& cluster,
                    nlohmann::json* report) {
  placement::RecoveryOptions options;
  options.failures_max = 16;
  const double start = Now();
  std::vector<placement::RecoveryProbability> layers(placement.layers);
  tbb::parallel_for(std::uint32_t{0}, placement.layers, [&](std::uint32_t l) {
    layers[l] =
        placement::LayerRecovery(placement, cluster, l, placement::FailureUnit::kNode, options);
  });
  const placement::RecoveryProbability model =
      placement::ModelRecovery(placement, cluster, placement::FailureUnit::kNode, options);
  const double seconds = Now() - start;
  (*report)["recovery_method"] = Name(model.method);
  (*report)["model_recovery"] = model.survived;
  return seconds;
}

Result<nlohmann::json> Run(const Task& task) {
  SW_TRY_ASSIGN(const placement::TokenCounts loads, ReadLoads(task.loads));
  const placement::Cluster cluster = placement::UniformCluster(task.nodes, task.gpus, task.slots);
  SW_TRY(placement::Validate(loads, cluster));
  SW_TRY_ASSIGN(const placement::Strategy* strategy, placement::FindStrategy(task.strategy));
  placement::Options options;
  placement::Placement current;
  if (!task.old_loads.empty()) {
    SW_TRY_ASSIGN(const placement::TokenCounts old, ReadLoads(task.old_loads));
    SW_TRY_ASSIGN(const placement::Strategy* first, placement::FindStrategy("eplb+"));
    SW_TRY_ASSIGN(placement::StrategyResult plan, first->plan(old, cluster, nullptr, options));
    current = std::move(plan.placement);
  }
  const placement::Placement* now = task.old_loads.empty() ? nullptr : &current;
  nlohmann::json report;
  for (std::uint32_t run = 0; run < task.runs; ++run) {
    double start = Now();
    SW_TRY_ASSIGN(const placement::StrategyResult plan,
                  strategy->plan(loads, cluster, now, options));
    report["plan_seconds"].push_back(Now() - start);
    report["recovery_seconds"].push_back(TimeRecovery(plan.placement, cluster, &report));
    start = Now();
    const placement::ModelMetrics metrics = placement::Measure(plan.placement, loads, cluster);
    report["metrics_seconds"].push_back(Now() - start);
    if (run + 1 < task.runs) continue;
    for (std::uint32_t l = 0; l < loads.layers; ++l) {
      const auto slots = plan.placement.layer(l);
      report["slots"].push_back(std::vector<std::int32_t>(slots.begin(), slots.end()));
      report["imbalance"].push_back(metrics.layers[l].imbalance);
      report["cut"].push_back(static_cast<bool>(plan.notes[l].cut));
    }
    if (now == nullptr) continue;
    start = Now();
    SW_TRY_ASSIGN(const placement::Migration migration,
                  placement::PlanMigration(current, plan.placement, cluster));
    report["migration_seconds"] = Now() - start;
    report["moves"] = migration.transfers.size();
  }
  return report;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 7 || argc > 8) {
    std::fprintf(stderr, "usage: moe_bench STRATEGY LOADS NODES GPUS SLOTS RUNS [OLD_LOADS]\n");
    return 2;
  }
  Task task{argv[1], argv[2], argc == 8 ? argv[7] : ""};
  std::uint32_t* const numbers[] = {&task.nodes, &task.gpus, &task.slots, &task.runs};
  for (int i = 0; i < 4; ++i) {
    *numbers[i] = static_cast<std::uint32_t>(std::strtoul(argv[3 + i], nullptr, 10));
  }
  const auto report = Run(task);
  if (!report) {
    std::fprintf(stderr, "moe_bench: %s\n", report.error().message.c_str());
    return 1;
  }
  std::printf("%s\n", report->dump().c_str());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "moe_bench: %s\n", error.what());
  return 1;
}
