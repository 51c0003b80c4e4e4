#include "moe-replace/show.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/text.h"
#include "moe/planning/planning_json.h"
#include "moe/replay/trouble.h"
#include "text/text.h"

namespace shardwright::apps {
namespace {

using Json = nlohmann::json;
using Column = text::Table::Column;
constexpr auto kLeft = text::Table::Align::kLeft;
constexpr auto kRight = text::Table::Align::kRight;

/// In percent. What is short of certain is never shown as certain.
std::string Share(double share) {
  if (share < 1 && share > 0.9995) return "<100 %";
  return Percent(share, share < 1 && share >= 0.0005 ? 1 : 0);
}

std::string Millis(double seconds) {
  const double ms = seconds * 1e3;
  return Fixed(ms, ms < 10 ? 2 : ms < 100 ? 1 : 0) + " ms";
}

std::string Duration(double seconds) {
  return seconds < 0.1 ? Millis(seconds) : text::FormatSeconds(seconds);
}

/// Bytes of moves, or nothing where the cluster does not say what an expert weighs.
std::string MovedBytes(std::uint64_t bytes, const moe::Cluster& cluster) {
  return cluster.expert_bytes == 0 ? "-" : FormatBytes(bytes);
}

void Head(std::ostream& out, const MoeFlags& flags, const moe::PlanInput& input) {
  const moe::Cluster& cluster = input.cluster;
  out << "loads     " << Plural(input.loads.layers, "layer") << " of "
      << Plural(input.loads.experts, "expert");
  if (input.loads.iteration) out << ", iteration " << *input.loads.iteration;
  if (flags.request.window.window > 1) out << ", mean of " << flags.request.window.window;
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
  return flags.request.options.failure_unit == moe::FailureUnit::kRack ? "rack" : "node";
}

/// "any 1 node; 2: 93.3 %, 3: 80.0 %".
std::string Survival(const moe::RecoveryProbability& recovery, const std::string& unit) {
  if (recovery.certain < 0) return "nothing: experts are missing";
  std::string text = recovery.certain == 0
                         ? "no failure for certain"
                         : "any " + Plural(static_cast<std::uint64_t>(recovery.certain), unit);
  const auto first = static_cast<std::size_t>(recovery.certain) + 1;
  std::size_t shown = 0;
  for (std::size_t k = first; k < recovery.survived.size() && shown < 6; ++k, ++shown) {
    if (recovery.survived[k] == 0) break;
    text += (shown == 0 ? "; " : ", ") + std::to_string(k) + ": " + Share(recovery.survived[k]);
  }
  return text;
}

std::string MethodText(const moe::RecoveryProbability& recovery) {
  if (!recovery.exact()) return "estimated by Monte Carlo";
  return "exact, " + std::string(moe::Name(recovery.method));
}

/// A text behind its word, continued below itself.
std::string Indented(const std::string& text) {
  std::string out;
  for (const std::string& line : text::Wrap(text, 88))
    out += (out.empty() ? "" : "\n          ") + line;
  return out;
}

/// The first lost experts by name.
std::string LostNames(const moe::Migration& migration, const moe::Loads& loads) {
  constexpr std::size_t kNamed = 4;
  std::string text;
  for (std::size_t i = 0; i < std::min(kNamed, migration.lost.size()); ++i) {
    const moe::LostExpert& one = migration.lost[i];
    text += (i == 0 ? "layer " : ", layer ") + std::to_string(loads.layer_id[one.layer]) +
            " expert " + std::to_string(one.expert);
  }
  if (migration.lost.size() > kNamed) {
    text += " and " + std::to_string(migration.lost.size() - kNamed) + " more, all with --json";
  }
  return text;
}

/// What is copied for an iteration and dropped.
void Volumes(std::ostream& out, const moe::JudgedPlan& plan) {
  std::uint64_t copies = 0;
  std::uint64_t most = 0;
  for (std::size_t l = 0; l < plan.volumes.size(); ++l) {
    copies += plan.metrics.layers[l].replicas - plan.result.placement.experts;
    for (const std::uint64_t bytes : plan.volumes[l].in_bytes) most = std::max(most, bytes);
  }
  out << "copies    " << copies << " per iteration over all layers";
  if (most > 0) out << ", at most " << FormatBytes(most) << " into a gpu for a layer";
  out << "\n";
}

void Summary(std::ostream& out, const MoeFlags& flags, const moe::PlanInput& input,
             const moe::PlannedRow& row) {
  const moe::JudgedPlan& plan = *row.plan;
  const moe::ModelMetrics& balance = row.balance();
  out << "plan      ";
  if (!row.file.empty()) out << text::Printable(row.file) << ", format ";
  out << row.strategy;
  if (row.seconds > 0) out << " in " << Millis(row.seconds);
  out << "\nbalance   " << Fixed(balance.imbalance_mean, 3) << " mean, "
      << Fixed(balance.imbalance_max, 3) << " worst layer (busiest gpu / mean); bound "
      << Fixed(balance.bound_mean, 3) << ", with any split " << Fixed(balance.lp_bound_mean, 3)
      << "\nlinks     " << Share(balance.inter_node_share) << " of the tokens leave their node, "
      << Share(balance.inter_node_share_least) << " if near replicas come first\n"
      << "survives  "
      << Indented(Survival(plan.model_recovery, UnitName(flags)) + " (" +
                  MethodText(plan.model_recovery) + ")")
      << "\n";
  if (flags.node_failure > 0) {
    out << "          " << Share(moe::SurvivalAt(plan.model_recovery, flags.node_failure))
        << " when each " << UnitName(flags) << " fails with " << Share(flags.node_failure) << "\n";
  }
  if (!plan.volumes.empty()) Volumes(out, plan);
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
      << " that no live gpu holds: restore from a checkpoint\n          "
      << Indented(LostNames(migration, input.loads)) << "\n";
}

void LayerTable(cli::Context& context, const moe::PlanInput& input, const moe::PlannedRow& row) {
  text::Table table({Column{"LAYER", kRight}, Column{"TOKENS", kRight}, Column{"BALANCE", kRight},
                     Column{"BOUND", kRight}, Column{"ANY SPLIT", kRight}, Column{"NODES", kRight},
                     Column{"LEAVE NODE", kRight}, Column{"REPLICAS", kRight},
                     Column{"SURVIVES", kRight}, Column{"THEN", kRight}});
  for (std::size_t l = 0; l < row.balance().layers.size(); ++l) {
    const moe::LayerMetrics& layer = row.balance().layers[l];
    const moe::RecoveryProbability& recovery = row.plan->layer_recovery[l];
    const auto next = static_cast<std::size_t>(recovery.certain + 1);
    const double tokens = static_cast<double>(std::max<std::uint64_t>(layer.tokens, 1));
    table.AddRow({std::to_string(input.loads.layer_id[l]), std::to_string(layer.tokens),
                  Fixed(layer.imbalance, 3), Fixed(layer.bound, 3), Fixed(layer.lp_bound, 3),
                  Fixed(layer.node_imbalance, 3), Share(layer.inter_node_tokens_least / tokens),
                  std::to_string(layer.replicas), std::to_string(recovery.certain),
                  next < recovery.survived.size() ? Share(recovery.survived[next]) : "-"});
  }
  context.Print(table);
}

/// P(k) of the first failures that are not survived for certain by every row.
std::string Chance(const moe::RecoveryProbability& recovery, std::size_t failures) {
  return failures < recovery.survived.size() ? Share(recovery.survived[failures]) : "-";
}

/// What the columns of a table mean.
void Legend(cli::Context& context, const std::string& text) {
  context.out() << "\n";
  for (const std::string& line : text::Wrap(text, 98)) context.out() << line << "\n";
}

/// Moments at which a strategy lost state or had no plan; the first ones, in one table.
void TroubleTable(cli::Context& context, const std::vector<moe::ReplayResult>& results) {
  constexpr std::size_t kShown = 20;
  constexpr std::size_t kTextColumns = 62;
  const auto moments = moe::TroubleOf(results);
  if (moments.empty()) {
    context.out() << "\nNothing was lost, and a plan existed at every moment.\n";
    return;
  }
  text::Table table({Column{"AFTER", kRight}, Column{"ITERATION", kRight}, Column{"NODES", kRight},
                     Column{"GONE", kRight}, Column{"WHAT HAPPENED", kLeft}});
  std::size_t shown = 0;
  for (const auto& [time, moment] : moments) {
    if (++shown > kShown) break;
    const auto lines = text::Wrap(moe::TroubleText(moment, results), kTextColumns);
    table.AddRow({text::FormatSeconds(static_cast<double>(time) / 1e3),
                  std::to_string(moment.step->iteration), std::to_string(moment.step->nodes_live),
                  std::to_string(moment.step->nodes_removed), lines.front()});
    for (std::size_t i = 1; i < lines.size(); ++i) table.AddRow({"", "", "", "", lines[i]});
  }
  context.out() << "\n" << Plural(moments.size(), "moment") << " with something lost or no plan\n";
  context.Print(table);
  if (moments.size() > kShown) {
    context.out() << "and " << moments.size() - kShown << " more, all of them with --json\n";
  }
}

}  // namespace

void ShowPlan(cli::Context& context, const MoeFlags& flags, const moe::PlanInput& input,
              const moe::PlannedRow& row, const std::string& output) {
  Head(context.out(), flags, input);
  Summary(context.out(), flags, input, row);
  if (!output.empty()) context.out() << "written   " << text::Printable(output) << "\n";
  if (!flags.report.empty()) context.out() << "report    " << text::Printable(flags.report) << "\n";
  context.out() << "\n";
  LayerTable(context, input, row);
  Json result = moe::InputJson(input);
  result["plan"] = moe::RowJson(input, row, flags.node_failure);
  context.SetResult(std::move(result));
}

void ShowComparison(cli::Context& context, const MoeFlags& flags, const moe::PlanInput& input,
                    const std::vector<moe::PlannedRow>& rows) {
  Head(context.out(), flags, input);
  std::int64_t certain = -1;
  for (const moe::PlannedRow& row : rows) {
    if (row.plan) certain = std::max(certain, row.plan->model_recovery.certain);
  }
  const auto failures = static_cast<std::size_t>(std::max<std::int64_t>(certain, 0)) + 1;
  const bool by_chance = flags.node_failure > 0;
  const std::string chance = by_chance ? "ALIVE" : "P(" + std::to_string(failures) + ")";
  context.out() << "\n";
  text::Table table({Column{"STRATEGY"}, Column{"BALANCE", kRight}, Column{"WORST", kRight},
                     Column{"BOUND", kRight}, Column{"SPLIT", kRight}, Column{"LEAVE", kRight},
                     Column{"FAULTS", kRight}, Column{chance, kRight}, Column{"MOVES", kRight},
                     Column{"BYTES", kRight}, Column{"ROUNDS", kRight}, Column{"TIME", kRight}});
  for (const moe::PlannedRow& row : rows) {
    if (!row.plan) {
      std::vector<std::string> cells(12, "-");
      cells[0] = row.strategy;
      cells[11] = Millis(row.seconds);
      table.AddRow(std::move(cells));
      continue;
    }
    const moe::ModelMetrics& balance = row.balance();
    const moe::RecoveryProbability& recovery = row.plan->model_recovery;
    const auto& migration = row.plan->migration;
    const bool kept = recovery.certain >= static_cast<std::int64_t>(flags.request.faults);
    table.AddRow({row.strategy, Fixed(balance.imbalance_mean, 3), Fixed(balance.imbalance_max, 3),
                  Fixed(balance.bound_mean, 3), Fixed(balance.lp_bound_mean, 3),
                  Share(balance.inter_node_share_least),
                  std::to_string(recovery.certain) + (kept ? "" : " !"),
                  by_chance ? Share(moe::SurvivalAt(recovery, flags.node_failure))
                            : Chance(recovery, failures),
                  migration ? std::to_string(migration->transfers.size()) : "-",
                  migration ? MovedBytes(migration->bytes, input.cluster) : "-",
                  migration ? std::to_string(migration->rounds) : "-", Millis(row.seconds)});
  }
  context.Print(table);
  const std::string unit = UnitName(flags);
  std::string legend =
      "BALANCE, WORST: busiest gpu / mean, mean and worst layer. BOUND: least possible in as many "
      "slots. SPLIT: least possible with these replicas. LEAVE: tokens that leave their node if "
      "near replicas come first. FAULTS: any so many " +
      unit + " failures are survived. " + chance + ": chance to survive ";
  legend += by_chance ? "when each " + unit + " fails with " + Share(flags.node_failure)
                      : Plural(failures, "failure");
  if (flags.request.faults > 0) legend += "; !: fewer failures than asked are survived";
  legend += ". MOVES: replicas copied from the old plan. TIME: of planning.";
  Legend(context, legend);
  Json strategies = Json::array();
  for (const moe::PlannedRow& row : rows) {
    strategies.push_back(moe::RowJson(input, row, flags.node_failure));
    if (!row.reason.empty()) {
      context.out() << row.strategy << ": no plan: " << text::Printable(row.reason) << "\n";
    }
  }
  Json result = moe::InputJson(input);
  result["strategies"] = std::move(strategies);
  context.SetResult(std::move(result));
}

void ShowReplays(cli::Context& context, const std::string& events, const moe::Replays& replays) {
  if (context.comm().rank() != 0) return;
  const std::vector<moe::ReplayResult>& results = replays.results;
  const moe::Cluster& cluster = replays.cluster;
  text::Table table({Column{"STRATEGY"}, Column{"FAILURES", kRight}, Column{"SURVIVED", kRight},
                     Column{"STALLED", kRight}, Column{"PLANS", kRight}, Column{"MOVES", kRight},
                     Column{"BYTES", kRight}, Column{"RESTORED", kRight}, Column{"BALANCE", kRight},
                     Column{"TIME", kRight}});
  Json strategies = Json::array();
  for (const moe::ReplayResult& result : results) {
    table.AddRow({result.strategy, std::to_string(result.failures), std::to_string(result.survived),
                  text::FormatSeconds(static_cast<double>(result.stalled_ms) / 1e3),
                  std::to_string(result.plans), std::to_string(result.transfers),
                  MovedBytes(result.bytes, cluster), MovedBytes(result.restored_bytes, cluster),
                  Fixed(result.imbalance_mean, 3), Millis(result.plan_seconds_mean)});
    strategies.push_back(moe::ReplayJson(result));
  }
  context.out() << "events    " << text::Printable(events);
  if (!results.empty()) {
    context.out() << ", " << Plural(results.front().steps.size(), "moment") << " over "
                  << text::FormatSeconds(static_cast<double>(results.front().time_ms) / 1e3);
  }
  context.out() << "\n\n";
  context.Print(table);
  Legend(context,
         "FAILURES: moments at which nodes went away that held experts. SURVIVED: of those, with "
         "every expert still somewhere; after the others state is RESTORED from a checkpoint. "
         "STALLED: time without a plan. MOVES: replicas copied. BALANCE: busiest gpu / mean. "
         "TIME: of a plan, mean.");
  TroubleTable(context, results);
  context.SetResult({{"strategies", std::move(strategies)}});
}

}  // namespace shardwright::apps
