#include "moe-replace/show.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "cli/text.h"

namespace shardwright::apps {
namespace {

using Json = nlohmann::json;
using Column = cli::Table::Column;
constexpr auto kRight = cli::Table::Align::kRight;

std::string Fixed(double value, int digits) {
  char text[48];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string Percent(double share) {
  // What is short of certain is never shown as certain.
  if (share < 1 && share > 0.9995) return "<100 %";
  return Fixed(100 * share, share < 1 && share >= 0.0005 ? 1 : 0) + " %";
}

std::string Millis(double seconds) {
  const double ms = seconds * 1e3;
  return Fixed(ms, ms < 10 ? 2 : ms < 100 ? 1 : 0) + " ms";
}

std::string Duration(double seconds) {
  return seconds < 0.1 ? Millis(seconds) : cli::FormatSeconds(seconds);
}

std::string Plural(std::uint64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

/// Bytes of moves, or nothing where the cluster does not say what an expert weighs.
std::string MovedBytes(std::uint64_t bytes, const moe::Cluster& cluster) {
  return cluster.expert_bytes == 0 ? "-" : FormatBytes(bytes);
}

Json RecoveryJson(const moe::Recovery& recovery) {
  Json json = {{"method", moe::Name(recovery.method)},
               {"exact", recovery.exact()},
               {"units", recovery.units},
               {"certain", recovery.certain},
               {"survived", recovery.survived},
               {"lost", recovery.lost}};
  if (!recovery.survived_sets.empty()) json["survived_sets"] = recovery.survived_sets;
  if (!recovery.standard_error.empty()) json["standard_error"] = recovery.standard_error;
  return json;
}

Json LayerJson(const moe::LayerMetrics& layer) {
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

Json MetricsJson(const moe::ModelMetrics& metrics, const moe::Loads& loads) {
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

Json MigrationJson(const moe::Migration& migration, const moe::Loads& loads) {
  Json lost = Json::array();
  for (const moe::LostExpert& one : migration.lost) {
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

Json RowJson(const MoeFlags& flags, const MoeInput& input, const MoeRow& row) {
  Json json = {{"strategy", row.strategy}, {"plan_seconds", row.seconds}};
  if (!row.plan) {
    json["reason"] = row.reason;
    return json;
  }
  const moe::JudgedPlan& plan = *row.plan;
  json["metrics"] = MetricsJson(plan.metrics, input.loads);
  if (row.later) json["measured"] = MetricsJson(*row.later, *input.later);
  json["recovery"] = RecoveryJson(plan.model_recovery);
  Json layers = Json::array();
  for (const moe::Recovery& recovery : plan.layer_recovery) {
    layers.push_back(RecoveryJson(recovery));
  }
  json["layer_recovery"] = std::move(layers);
  if (flags.node_failure > 0) {
    json["survival"] = {{"node_failure", flags.node_failure},
                        {"probability", moe::SurvivalAt(plan.model_recovery, flags.node_failure)}};
  }
  if (plan.migration) json["migration"] = MigrationJson(*plan.migration, input.loads);
  json["cut_layers"] = std::count_if(plan.result.notes.begin(), plan.result.notes.end(),
                                     [](const moe::LayerNotes& note) { return note.cut; });
  json["warnings"] = plan.result.warnings;
  return json;
}

Json InputJson(const MoeInput& input) {
  Json json = {{"format", input.trace.format},         {"layers", input.loads.layers},
               {"experts", input.loads.experts},       {"records", input.trace.records.size()},
               {"nodes", input.cluster.node_count()},  {"live_nodes", input.cluster.live_nodes()},
               {"gpus", input.cluster.device_count()}, {"live_slots", input.cluster.live_slots()}};
  if (input.loads.iteration) json["iteration"] = *input.loads.iteration;
  if (input.later && input.later->iteration) json["measured_at"] = *input.later->iteration;
  return json;
}

void Head(std::ostream& out, const MoeFlags& flags, const MoeInput& input) {
  const moe::Cluster& cluster = input.cluster;
  out << "loads     " << Plural(input.loads.layers, "layer") << " of "
      << Plural(input.loads.experts, "expert");
  if (input.loads.iteration) out << ", iteration " << *input.loads.iteration;
  if (flags.window > 1) out << ", mean of " << flags.window;
  if (input.later) out << "; balance measured at iteration " << *input.later->iteration;
  out << "\ncluster   " << Plural(cluster.live_nodes(), "node") << " with "
      << Plural(cluster.live_devices(), "gpu") << ", " << Plural(cluster.live_slots(), "slot")
      << " per layer";
  if (cluster.live_nodes() != cluster.node_count()) {
    out << ", " << cluster.node_count() - cluster.live_nodes() << " dead";
  }
  out << "\n";
}

std::string UnitName(const MoeFlags& flags) {
  return flags.options.failure_unit == moe::FailureUnit::kRack ? "rack" : "node";
}

/// "any 1 node; 2: 93.3 %, 3: 80.0 %".
std::string Survival(const moe::Recovery& recovery, const std::string& unit) {
  if (recovery.certain < 0) return "nothing: experts are missing";
  std::string text = recovery.certain == 0
                         ? "no failure for certain"
                         : "any " + Plural(static_cast<std::uint64_t>(recovery.certain), unit);
  const auto first = static_cast<std::size_t>(recovery.certain) + 1;
  std::size_t shown = 0;
  for (std::size_t k = first; k < recovery.survived.size() && shown < 6; ++k, ++shown) {
    if (recovery.survived[k] == 0) break;
    text += (shown == 0 ? "; " : ", ") + std::to_string(k) + ": " + Percent(recovery.survived[k]);
  }
  return text;
}

std::string MethodText(const moe::Recovery& recovery) {
  if (!recovery.exact()) return "estimated by Monte Carlo";
  return "exact, " + std::string(moe::Name(recovery.method));
}

void Summary(std::ostream& out, const MoeFlags& flags, const MoeInput& input, const MoeRow& row) {
  const moe::JudgedPlan& plan = *row.plan;
  const moe::ModelMetrics& balance = row.balance();
  out << "plan      " << row.strategy;
  if (row.seconds > 0) out << " in " << Millis(row.seconds);
  out << "\nbalance   " << Fixed(balance.imbalance_mean, 3) << " mean, "
      << Fixed(balance.imbalance_max, 3) << " worst layer (busiest gpu / mean); bound "
      << Fixed(balance.bound_mean, 3) << ", with any split " << Fixed(balance.lp_bound_mean, 3)
      << "\nlinks     " << Percent(balance.inter_node_share) << " of the tokens leave their node, "
      << Percent(balance.inter_node_share_least) << " if near replicas come first\n"
      << "survives  " << Survival(plan.model_recovery, UnitName(flags)) << " ("
      << MethodText(plan.model_recovery) << ")\n";
  if (flags.node_failure > 0) {
    out << "          " << Percent(moe::SurvivalAt(plan.model_recovery, flags.node_failure))
        << " when each " << UnitName(flags) << " fails with " << Percent(flags.node_failure)
        << "\n";
  }
  if (!plan.migration) return;
  const moe::Migration& migration = *plan.migration;
  out << "moves     " << Plural(migration.transfers.size(), "replica") << ", "
      << migration.inter_node_transfers << " into another node";
  if (input.cluster.expert_bytes > 0) out << ", " << FormatBytes(migration.bytes);
  out << ", " << Plural(migration.rounds, "round");
  if (migration.seconds > 0) out << ", " << Duration(migration.seconds);
  out << "\n";
  if (migration.lost.empty()) return;
  out << "lost      " << Plural(migration.lost.size(), "expert")
      << " that no live gpu holds: restore them from a checkpoint\n";
}

void LayerTable(cli::Context& context, const MoeInput& input, const MoeRow& row) {
  cli::Table table({Column{"LAYER", kRight}, Column{"TOKENS", kRight}, Column{"BALANCE", kRight},
                    Column{"BOUND", kRight}, Column{"ANY SPLIT", kRight}, Column{"NODES", kRight},
                    Column{"LEAVE NODE", kRight}, Column{"REPLICAS", kRight},
                    Column{"SURVIVES", kRight}, Column{"THEN", kRight}});
  for (std::size_t l = 0; l < row.balance().layers.size(); ++l) {
    const moe::LayerMetrics& layer = row.balance().layers[l];
    const moe::Recovery& recovery = row.plan->layer_recovery[l];
    const auto next = static_cast<std::size_t>(recovery.certain + 1);
    const double tokens = static_cast<double>(std::max<std::uint64_t>(layer.tokens, 1));
    table.AddRow({std::to_string(input.loads.layer_id[l]), std::to_string(layer.tokens),
                  Fixed(layer.imbalance, 3), Fixed(layer.bound, 3), Fixed(layer.lp_bound, 3),
                  Fixed(layer.node_imbalance, 3), Percent(layer.inter_node_tokens / tokens),
                  std::to_string(layer.replicas), std::to_string(recovery.certain),
                  next < recovery.survived.size() ? Percent(recovery.survived[next]) : "-"});
  }
  context.Print(table);
}

/// P(k) of the first failures that are not survived for certain by every row.
std::string Chance(const moe::Recovery& recovery, std::size_t failures) {
  return failures < recovery.survived.size() ? Percent(recovery.survived[failures]) : "-";
}

Json ReplayJson(const moe::ReplayResult& result) {
  constexpr const char* kStates[] = {"started", "migrated", "restored", "stalled"};
  Json steps = Json::array();
  for (const moe::ReplayStep& step : result.steps) {
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

/// Moments at which state was lost or no plan existed; the first ones.
void TroubleTable(cli::Context& context, const moe::ReplayResult& result) {
  constexpr std::size_t kShown = 20;
  cli::Table table({Column{"AFTER", kRight}, Column{"ITERATION", kRight}, Column{"NODES", kRight},
                    Column{"GONE", kRight}, Column{"LOST EXPERTS", kRight},
                    Column{"WHAT FOLLOWED", cli::Table::Align::kLeft, true}});
  std::size_t trouble = 0;
  for (const moe::ReplayStep& step : result.steps) {
    const bool stalled = step.state == moe::ReplayStep::State::kStalled;
    if (!stalled && step.experts_lost == 0) continue;
    if (++trouble > kShown) continue;
    table.AddRow({cli::FormatSeconds(static_cast<double>(step.time_ms) / 1e3),
                  std::to_string(step.iteration), std::to_string(step.nodes_live),
                  std::to_string(step.nodes_removed), std::to_string(step.experts_lost),
                  stalled ? "waits: " + step.reason : "restored from a checkpoint"});
  }
  if (trouble == 0) return;
  context.out() << "\n"
                << result.strategy << ": " << Plural(trouble, "moment")
                << " with something lost or no plan\n";
  context.Print(table);
  if (trouble > kShown) {
    context.out() << "and " << trouble - kShown << " more, all of them with --json\n";
  }
}

}  // namespace

void ShowPlan(cli::Context& context, const MoeFlags& flags, const MoeInput& input,
              const MoeRow& row) {
  Head(context.out(), flags, input);
  Summary(context.out(), flags, input, row);
  if (!flags.output.empty()) context.out() << "written   " << cli::Printable(flags.output) << "\n";
  if (!flags.report.empty()) context.out() << "report    " << cli::Printable(flags.report) << "\n";
  context.out() << "\n";
  LayerTable(context, input, row);
  Json result = InputJson(input);
  result["plan"] = RowJson(flags, input, row);
  context.SetResult(std::move(result));
}

void ShowComparison(cli::Context& context, const MoeFlags& flags, const MoeInput& input,
                    const std::vector<MoeRow>& rows) {
  Head(context.out(), flags, input);
  std::int64_t certain = -1;
  for (const MoeRow& row : rows) {
    if (row.plan) certain = std::max(certain, row.plan->model_recovery.certain);
  }
  const auto failures = static_cast<std::size_t>(std::max<std::int64_t>(certain, 0)) + 1;
  context.out() << "\n";
  cli::Table table({Column{"STRATEGY"}, Column{"BALANCE", kRight}, Column{"WORST", kRight},
                    Column{"BOUND", kRight}, Column{"SPLIT", kRight}, Column{"LEAVE", kRight},
                    Column{"SURVIVES", kRight},
                    Column{"P(" + std::to_string(failures) + ")", kRight}, Column{"MOVES", kRight},
                    Column{"BYTES", kRight}, Column{"ROUNDS", kRight}, Column{"TIME", kRight}});
  for (const MoeRow& row : rows) {
    if (!row.plan) {
      std::vector<std::string> cells(12, "-");
      cells[0] = row.strategy;
      cells[11] = Millis(row.seconds);
      table.AddRow(std::move(cells));
      continue;
    }
    const moe::ModelMetrics& balance = row.balance();
    const moe::Recovery& recovery = row.plan->model_recovery;
    const auto& migration = row.plan->migration;
    const bool kept = recovery.certain >= static_cast<std::int64_t>(flags.faults);
    table.AddRow({row.strategy, Fixed(balance.imbalance_mean, 3), Fixed(balance.imbalance_max, 3),
                  Fixed(balance.bound_mean, 3), Fixed(balance.lp_bound_mean, 3),
                  Percent(balance.inter_node_share),
                  std::to_string(recovery.certain) + (kept ? "" : " !"), Chance(recovery, failures),
                  migration ? std::to_string(migration->transfers.size()) : "-",
                  migration ? MovedBytes(migration->bytes, input.cluster) : "-",
                  migration ? std::to_string(migration->rounds) : "-", Millis(row.seconds)});
  }
  context.Print(table);
  context.out() << "\nBALANCE, WORST: busiest gpu / mean, over layers. BOUND: least possible in as "
                   "many slots.\nSPLIT: least possible with these replicas. LEAVE: tokens that "
                   "leave their node. SURVIVES: any\nso many "
                << UnitName(flags) << " failures. P(" << failures << "): chance to survive "
                << failures << ". MOVES: replicas that are copied from the old plan.\n";
  Json strategies = Json::array();
  for (const MoeRow& row : rows) {
    strategies.push_back(RowJson(flags, input, row));
    if (!row.reason.empty()) {
      context.out() << row.strategy << ": no plan: " << cli::Printable(row.reason) << "\n";
    } else if (row.plan->model_recovery.certain < static_cast<std::int64_t>(flags.faults)) {
      context.out() << row.strategy << " !: does not survive the "
                    << Plural(flags.faults, "failure") << " asked\n";
    }
  }
  Json result = InputJson(input);
  result["strategies"] = std::move(strategies);
  context.SetResult(std::move(result));
}

void ShowReplays(cli::Context& context, const MoeFlags& flags, const moe::Cluster& cluster,
                 const std::vector<moe::ReplayResult>& results) {
  if (context.comm().rank() != 0) return;
  cli::Table table({Column{"STRATEGY"}, Column{"FAILURES", kRight}, Column{"SURVIVED", kRight},
                    Column{"RESTORES", kRight}, Column{"STALLED", kRight}, Column{"PLANS", kRight},
                    Column{"MOVES", kRight}, Column{"BYTES", kRight}, Column{"RESTORED", kRight},
                    Column{"BALANCE", kRight}, Column{"PER PLAN", kRight}});
  Json strategies = Json::array();
  for (const moe::ReplayResult& result : results) {
    table.AddRow({result.strategy, std::to_string(result.failures), std::to_string(result.survived),
                  std::to_string(result.restores),
                  cli::FormatSeconds(static_cast<double>(result.stalled_ms) / 1e3),
                  std::to_string(result.plans), std::to_string(result.transfers),
                  MovedBytes(result.bytes, cluster), MovedBytes(result.restored_bytes, cluster),
                  Fixed(result.imbalance_mean, 3), Millis(result.plan_seconds_mean)});
    strategies.push_back(ReplayJson(result));
  }
  context.out() << "events    " << cli::Printable(flags.events);
  if (!results.empty()) {
    context.out() << ", " << Plural(results.front().steps.size(), "moment") << " over "
                  << cli::FormatSeconds(static_cast<double>(results.front().time_ms) / 1e3);
  }
  context.out() << "\n\n";
  context.Print(table);
  for (const moe::ReplayResult& result : results) TroubleTable(context, result);
  context.SetResult({{"strategies", std::move(strategies)}});
}

}  // namespace shardwright::apps
