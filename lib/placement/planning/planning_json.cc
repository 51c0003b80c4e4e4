// SPDX-License-Identifier: Apache-2.0
#include "placement/planning/planning_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "placement/planning/plan_cost.h"

namespace shardwright::placement {
namespace {

using Json = nlohmann::json;

Json RecoveryJson(const RecoveryProbability& recovery) {
  Json json = {{"method", Name(recovery.method)}, {"exact", recovery.exact()},
               {"units", recovery.units},         {"certain", recovery.certain},
               {"survived", recovery.survived},   {"lost", recovery.lost}};
  if (!recovery.survived_sets.empty()) json["survived_sets"] = recovery.survived_sets;
  if (!recovery.standard_error.empty()) json["standard_error"] = recovery.standard_error;
  return json;
}

Json LayerJson(const LayerMetrics& layer) {
  return {{"tokens", layer.tokens},
          {"tokens_lost", layer.tokens_lost},
          {"mean_load", layer.mean_load},
          {"max_load", layer.max_load},
          {"imbalance", layer.imbalance},
          {"node_imbalance", layer.node_imbalance},
          {"bound", layer.bound},
          {"lp_bound", layer.lp_bound},
          {"inter_node_tokens", layer.inter_node_tokens},
          {"inter_node_tokens_least", layer.inter_node_tokens_least},
          {"replicas", layer.replicas},
          {"gpu_duplicates", layer.device_duplicates}};
}

Json MetricsJson(const ModelMetrics& metrics, const TokenCounts& loads) {
  Json layers = Json::array();
  for (std::size_t l = 0; l < metrics.layers.size(); ++l) {
    Json layer = LayerJson(metrics.layers[l]);
    layer["layer"] = loads.layer_id[l];
    layers.push_back(std::move(layer));
  }
  return {{"imbalance_mean", metrics.imbalance_mean},
          {"imbalance_max", metrics.imbalance_max},
          {"bound_mean", metrics.bound_mean},
          {"lp_bound_mean", metrics.lp_bound_mean},
          {"node_imbalance_mean", metrics.node_imbalance_mean},
          {"inter_node_share", metrics.inter_node_share},
          {"inter_node_share_least", metrics.inter_node_share_least},
          {"layers", std::move(layers)}};
}

Json MigrationJson(const Migration& migration, const TokenCounts& loads) {
  Json lost = Json::array();
  for (const LostExpert& one : migration.lost) {
    lost.push_back({loads.layer_id[one.layer], one.expert});
  }
  return {{"transfers", migration.transfers.size()},
          {"migrated_experts", migration.inter_node_transfers},
          {"bytes", migration.bytes},
          {"inter_node_bytes", migration.inter_node_bytes},
          {"inter_rack_bytes", migration.inter_rack_bytes},
          {"node_in_bytes", migration.node_in_bytes},
          {"node_out_bytes", migration.node_out_bytes},
          {"rounds", migration.rounds},
          {"seconds", migration.seconds},
          {"lost", std::move(lost)}};
}

/// Returns the volumes of the sparse collectives of one iteration, by layer and GPU.
Json VolumesJson(const VerifiedPlan& plan, const PlanInput& input) {
  const std::uint64_t bytes = input.cluster.param_bytes;
  const auto bytes_of = [&](std::vector<std::uint64_t> experts) {
    for (std::uint64_t& count : experts) count *= bytes;
    return experts;
  };
  Json layers = Json::array();
  for (std::size_t l = 0; l < plan.volumes.size(); ++l) {
    const SparseVolumes& volumes = plan.volumes[l];
    layers.push_back({{"layer", input.loads.layer_id[l]},
                      {"gather_in_experts", volumes.in},
                      {"gather_out_experts", volumes.out},
                      {"bound_experts", volumes.bound},
                      {"all_reduce_experts", volumes.all_reduce},
                      {"copied_share", volumes.copied_share}});
    if (bytes == 0) continue;
    layers.back()["gather_in_bytes"] = bytes_of(volumes.in);
    layers.back()["gather_out_bytes"] = bytes_of(volumes.out);
    layers.back()["bound_bytes"] = volumes.bound * bytes;
    layers.back()["all_reduce_bytes"] = volumes.all_reduce * static_cast<double>(bytes);
  }
  return layers;
}

/// Returns the reason for the end of each layer's search; empty for strategies without search.
Json SearchJson(const PlanRequest& request, const VerifiedPlan& plan) {
  Json ends = Json::array();
  for (const LayerNotes& note : plan.result.notes) {
    switch (note.search_end) {
      case SearchEnd::kNone:
        break;
      case SearchEnd::kBound:
        ends.push_back("bound");
        break;
      case SearchEnd::kBudget:
        ends.push_back(request.options.best_seconds > 0 ? "time" : "steps");
        break;
      case SearchEnd::kNoGain:
        ends.push_back("no_gain");
    }
  }
  return ends;
}

/// Returns balance by moves.
Json CurveJson(const VerifiedPlan& plan, const PlanInput& input) {
  Json points = Json::array();
  for (const MovesPoint& point : plan.result.moves_curve) {
    points.push_back({{"moves", point.moves},
                      {"bytes", point.moves * input.cluster.expert_bytes},
                      {"imbalance_mean", point.imbalance_mean},
                      {"imbalance_max", point.imbalance_max}});
  }
  return points;
}

/// Returns the transitions that stay on their GPU and node.
Json TransitionsJson(const PlannedTransitions& transitions, const TokenCounts& loads) {
  const Transitions& after = transitions.after;
  Json pairs = Json::array();
  for (std::size_t l = 0; l < after.pairs.size(); ++l) {
    const PairTransitions& pair = after.pairs[l];
    pairs.push_back({{"layer", loads.layer_id[l]},
                     {"next_layer", loads.layer_id[l + 1]},
                     {"transitions", pair.all},
                     {"on_gpu", pair.on_gpu},
                     {"on_node", pair.on_node}});
  }
  Json json = {{"transitions", after.sum.all},
               {"on_gpu_share", after.gpu_share()},
               {"on_node_share", after.node_share()},
               {"pairs", std::move(pairs)}};
  if (!transitions.before) return json;
  json["on_gpu_share_before"] = transitions.before->gpu_share();
  json["on_node_share_before"] = transitions.before->node_share();
  return json;
}

/// Returns a plan with all its measures, or the reason for a missing plan.
Json RowJson(const PlanRequest& request, const PlanInput& input, const PlannedRow& row) {
  Json json = {{"strategy", row.strategy}, {"plan_seconds", row.seconds}};
  if (!row.file.empty()) json["file"] = row.file;
  if (!row.plan) {
    json["reason"] = row.reason;
    return json;
  }
  const VerifiedPlan& plan = *row.plan;
  json["metrics"] = MetricsJson(plan.metrics, input.loads);
  if (row.later) json["measured"] = MetricsJson(*row.later, *input.later);
  json["recovery"] = RecoveryJson(plan.model_recovery);
  Json layers = Json::array();
  for (const RecoveryProbability& recovery : plan.layer_recovery) {
    layers.push_back(RecoveryJson(recovery));
  }
  json["layer_recovery"] = std::move(layers);
  if (!plan.volumes.empty()) json["volumes"] = VolumesJson(plan, input);
  if (request.node_failure > 0) {
    json["survival"] = {{"node_failure", request.node_failure},
                        {"probability", SurvivalAt(plan.model_recovery, request.node_failure)}};
  }
  if (plan.migration) json["migration"] = MigrationJson(*plan.migration, input.loads);
  if (row.affinity) json["affinity"] = TransitionsJson(*row.affinity, input.loads);
  AddCostJson(row.cost, input.loads, &json);
  if (!plan.result.moves_curve.empty()) json["moves_curve"] = CurveJson(plan, input);
  json["cut_layers"] = std::count_if(plan.result.notes.begin(), plan.result.notes.end(),
                                     [](const LayerNotes& note) { return note.cut; });
  json["search"] = SearchJson(request, plan);
  json["warnings"] = plan.result.warnings;
  return json;
}

/// Returns a summary of the input.
Json InputJson(const PlanInput& input) {
  const token_counts::TokenTrace& trace = input.recordings.front().trace;
  Json json = {{"format", trace.format},
               {"layers", input.loads.layers},
               {"experts", input.loads.experts},
               {"records", trace.records.size()},
               {"nodes", input.cluster.node_count()},
               {"live_nodes", input.cluster.live_nodes()},
               {"gpus", input.cluster.device_count()},
               {"live_slots", input.cluster.live_slots()}};
  if (!input.loads.layer_experts.empty()) json["layer_experts"] = input.loads.layer_experts;
  json["window_records"] = input.loads.records;
  json["token_unit"] = input.loads.unit;
  std::vector<double> speeds;
  speeds.reserve(input.cluster.devices.size());
  for (const Device& gpu : input.cluster.devices) speeds.push_back(gpu.speed);
  if (std::any_of(speeds.begin(), speeds.end(), [](double speed) { return speed != 1; })) {
    json["gpu_speeds"] = speeds;
  }
  if (input.idle_records > 0) json["idle_records"] = input.idle_records;
  const std::vector<std::uint64_t> empty = input.EmptyLayers();
  if (!empty.empty()) json["layers_without_tokens"] = empty;
  if (input.loads.iteration) json["iteration"] = *input.loads.iteration;
  if (input.later && input.later->iteration) json["measured_at"] = *input.later->iteration;
  return json;
}

/// Returns a simulation, step by step.
Json SimulationJson(const SimulationResult& result) {
  constexpr const char* kStates[] = {"started", "migrated", "restored", "stalled"};
  Json steps = Json::array();
  for (const SimulationStep& step : result.steps) {
    Json json = {{"milliseconds", step.time_ms},
                 {"iteration", step.iteration},
                 {"state", kStates[static_cast<std::size_t>(step.state)]},
                 {"failure", step.failure},
                 {"nodes_added", step.nodes_added},
                 {"nodes_removed", step.nodes_removed},
                 {"nodes_live", step.nodes_live},
                 {"experts_lost", step.experts_lost},
                 {"transfers", step.transfers},
                 {"migrated_experts", step.migrated},
                 {"bytes", step.bytes},
                 {"inter_node_bytes", step.inter_node_bytes},
                 {"restored_bytes", step.restored_bytes},
                 {"rounds", step.rounds},
                 {"migration_seconds", step.migration_seconds},
                 {"copies_min", step.copies_min},
                 {"imbalance_before", step.imbalance_before},
                 {"imbalance", step.imbalance},
                 {"plan_seconds", step.plan_seconds}};
    if (!step.reason.empty()) json["reason"] = step.reason;
    steps.push_back(std::move(json));
  }
  return {{"strategy", result.strategy},
          {"failures", result.failures},
          {"survived", result.survived},
          {"restores", result.restores},
          {"stalls", result.stalls},
          {"plans", result.plans},
          {"transfers", result.transfers},
          {"migrated_experts", result.migrated},
          {"bytes", result.bytes},
          {"inter_node_bytes", result.inter_node_bytes},
          {"restored_bytes", result.restored_bytes},
          {"migration_seconds", result.migration_seconds},
          {"plan_seconds_mean", result.plan_seconds_mean},
          {"plan_seconds_max", result.plan_seconds_max},
          {"imbalance_mean", result.imbalance_mean},
          {"milliseconds", result.time_ms},
          {"stalled_milliseconds", result.stalled_ms},
          {"steps", std::move(steps)}};
}

/// Returns the throughput of a run over time. \param baseline  null: no ratio
Json ThroughputJson(const Throughput& run, const Throughput* baseline) {
  Json timeline = Json::array();
  for (const ThroughputSpan& span : run.spans) {
    const double seconds = span.end_seconds - span.begin_seconds;
    timeline.push_back({{"begin_seconds", span.begin_seconds},
                        {"end_seconds", span.end_seconds},
                        {"activity", ActivityName(span.activity)},
                        {"gpus", span.gpus},
                        {"samples", span.samples},
                        {"samples_per_second", span.samples / seconds}});
  }
  Json seconds = {{"total", run.total_seconds}};
  for (std::size_t i = 0; i < kActivities; ++i) {
    seconds[std::string(ActivityName(static_cast<Activity>(i)))] = run.seconds[i];
  }
  Json json = {{"strategy", run.strategy},         {"samples", run.samples},
               {"samples_lost", run.samples_lost}, {"samples_per_second", run.rate()},
               {"checkpoints", run.checkpoints},   {"restores", run.restores},
               {"seconds", std::move(seconds)},    {"timeline", std::move(timeline)}};
  if (baseline != nullptr && baseline->samples > 0) {
    json["ratio"] = run.samples / baseline->samples;
  }
  return json;
}

}  // namespace

Json PlanJson(const PlanRequest& request, const PlanInput& input, const PlannedRow& row) {
  Json json = InputJson(input);
  json["plan"] = RowJson(request, input, row);
  return json;
}

Json ComparisonJson(const PlanRequest& request, const PlanInput& input,
                    const std::vector<PlannedRow>& rows) {
  Json json = InputJson(input);
  Json& strategies = json["strategies"] = Json::array();
  for (const PlannedRow& row : rows) strategies.push_back(RowJson(request, input, row));
  return json;
}

Json FailureSimulationsJson(const FailureSimulations& simulations) {
  Json strategies = Json::array();
  for (const SimulationResult& result : simulations.results)
    strategies.push_back(SimulationJson(result));
  Json json = {{"strategies", std::move(strategies)}};
  const Throughput* const baseline = BaselineOf(simulations.throughput);
  for (const Throughput& run : simulations.throughput) {
    json["throughput"].push_back(ThroughputJson(run, baseline));
  }
  return json;
}

}  // namespace shardwright::placement
