// SPDX-License-Identifier: Apache-2.0
#include "placement/planning/planning_text.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "placement/failure_simulation/incidents.h"
#include "placement/planning/plan_cost.h"
#include "support/base/bytes.h"
#include "support/base/text.h"
#include "support/text/table.h"
#include "support/text/text.h"

namespace shardwright::placement {
namespace {

using Column = text::Table::Column;
constexpr auto kLeft = text::Table::Align::kLeft;
using text::kRight;

/// Formats a share in percent. Values below 1 are never shown as 100 %.
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

/// Formats the bytes of moves, or "-" if the cluster does not specify the size of an expert.
std::string MovedBytes(std::uint64_t bytes, const Cluster& cluster) {
  return cluster.expert_bytes == 0 ? "-" : FormatBytes(bytes);
}

/// Returns the selected part of the recordings: ", sum of 10 iterations up to 100".
std::string WindowText(const PlanRequest& request, const PlanInput& input) {
  const token_counts::LoadWindow& window = request.window;
  const TokenCounts& loads = input.loads;
  std::string text;
  if (loads.records > 1) {
    text.append(", sum of ").append(Plural(loads.records, "iteration"));
    if (loads.iteration) text.append(" up to ").append(std::to_string(*loads.iteration));
  } else if (loads.iteration) {
    text.append(", iteration ").append(std::to_string(*loads.iteration));
  }
  if (!request.joined.empty()) {
    text.append(" of ").append(Plural(request.joined.size() + 1, "recording"));
  }
  if (window.half_life > 0) text.append(", half-life ").append(Fixed(window.half_life, 1));
  if (loads.windows.size() > 1) {
    text.append("; balance is the worst of the windows ");
    for (std::size_t w = 0; w < window.windows.size(); ++w) {
      const std::uint64_t records = window.windows[w];
      text.append(w == 0 ? "" : ", ");
      text.append(records == token_counts::kAllRecords ? "all" : std::to_string(records));
    }
  }
  if (window.windows.empty() && input.recordings.front().trace.serving) {
    text.append(
        "\n          the whole recording, as is the default for this format; "
        "--window chooses a part");
  }
  return text;
}

/// Returns the least and the greatest speed of the GPUs that can store experts.
std::pair<double, double> SpeedsOf(const Cluster& cluster) {
  std::pair<double, double> speeds(std::numeric_limits<double>::infinity(), 0);
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (!cluster.holds(d)) continue;
    speeds.first = std::min(speeds.first, cluster.devices[d].speed);
    speeds.second = std::max(speeds.second, cluster.devices[d].speed);
  }
  return speeds;
}

/// Returns a summary of the input in two lines.
std::string InputText(const PlanRequest& request, const PlanInput& input) {
  const Cluster& cluster = input.cluster;
  std::string text = "tokens    " + Plural(input.loads.layers, "layer") + " of " +
                     token_counts::ExpertsText(input.loads);
  text += WindowText(request, input);
  if (input.later) {
    text += "; balance measured at iteration " + std::to_string(*input.later->iteration);
  }
  text += "\ncluster   " + Plural(cluster.live_nodes(), "node") + " with " +
          Plural(cluster.live_devices(), "gpu") + ", " + Plural(cluster.live_slots(), "slot") +
          " per layer";
  if (cluster.live_nodes() != cluster.node_count()) {
    text += ", " + std::to_string(cluster.node_count() - cluster.live_nodes()) + " dead";
  }
  std::uint32_t dead = 0;
  for (const Device& gpu : cluster.devices) dead += gpu.alive ? 0 : 1;
  if (dead > 0) text += ", " + Plural(dead, "gpu") + " dead";
  const auto [slowest, fastest] = SpeedsOf(cluster);
  if (slowest < fastest) {
    text += ", speeds " + Fixed(slowest, 2) + " to " + Fixed(fastest, 2);
  }
  return text + "\n";
}

std::string UnitName(const PlanRequest& request) {
  return request.options.failure_unit == FailureUnit::kRack ? "rack" : "node";
}

/// Returns survival as text: "any 1 node; 2: 93.3 %, 3: 80.0 %".
std::string Survival(const RecoveryProbability& recovery, const std::string& unit) {
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

std::string MethodText(const RecoveryProbability& recovery) {
  return recovery.exact() ? "computed exactly" : "estimated by sampling";
}

/// Wraps a text to the right of its label and indents the following lines.
std::string Indented(const std::string& text) {
  std::string out;
  for (const std::string& line : text::Wrap(text, 88))
    out += (out.empty() ? "" : "\n          ") + line;
  return out;
}

/// Returns the names of the first lost experts.
std::string LostNames(const Migration& migration, const TokenCounts& loads) {
  constexpr std::size_t kNamed = 4;
  std::string text;
  for (std::size_t i = 0; i < std::min(kNamed, migration.lost.size()); ++i) {
    const LostExpert& one = migration.lost[i];
    text += (i == 0 ? "layer " : ", layer ") + std::to_string(loads.layer_id[one.layer]) +
            " expert " + std::to_string(one.expert);
  }
  if (migration.lost.size() > kNamed) {
    text += " and " + std::to_string(migration.lost.size() - kNamed) + " more, all with --json";
  }
  return text;
}

/// Returns the copies of one iteration, which are dropped afterwards.
std::string VolumesText(const VerifiedPlan& plan, std::uint64_t expert_bytes) {
  std::uint64_t copies = 0;
  std::uint64_t most = 0;
  for (std::size_t l = 0; l < plan.volumes.size(); ++l) {
    copies += plan.metrics.layers[l].replicas - plan.result.placement.ExpertsOf(l);
    for (const std::uint64_t experts : plan.volumes[l].in) most = std::max(most, experts);
  }
  std::string text = "copies    " + std::to_string(copies) + " per iteration over all layers";
  if (most > 0) text += ", at most " + Plural(most, "expert") + " into a gpu for a layer";
  if (most > 0 && expert_bytes > 0) text += " (" + FormatBytes(most * expert_bytes) + ")";
  return text + "\n";
}

/// Returns the moves from the old plan, and the experts that no live GPU has.
std::string MovesText(const Migration& migration, const PlanInput& input) {
  std::string text = "moves     " + Plural(migration.transfers.size(), "replica") + ", " +
                     std::to_string(migration.inter_node_transfers) + " into another node";
  if (input.cluster.expert_bytes > 0) text += ", " + FormatBytes(migration.bytes);
  text += ", " + Plural(migration.rounds, "round");
  if (migration.seconds > 0) text += ", " + Duration(migration.seconds);
  if (!migration.lost.empty()) {
    text += "\nlost      " + Plural(migration.lost.size(), "expert") +
            " that no live gpu holds: restore from a checkpoint\n          " +
            Indented(LostNames(migration, input.loads));
  }
  return text + "\n";
}

/// Returns the transitions between layers that stay on their GPU and node.
std::string TransitionsText(const PlannedTransitions& transitions) {
  const Transitions& after = transitions.after;
  std::string text = "affinity  " + Share(after.gpu_share()) +
                     " of the transitions between layers stay on their gpu, " +
                     Share(after.node_share()) + " on their node";
  if (transitions.before) {
    text += "\n          before gpus were exchanged: " + Share(transitions.before->gpu_share()) +
            " and " + Share(transitions.before->node_share());
  }
  return text + "\n";
}

/// Returns balance by moves, in a few points.
std::string CurveText(const std::vector<MovesPoint>& curve) {
  constexpr std::size_t kShown = 8;
  std::string points;
  const std::size_t last = curve.size() - 1;
  const std::size_t shown = std::min(kShown, curve.size());
  for (std::size_t i = 0; i < shown; ++i) {
    const MovesPoint& point = curve[shown == 1 ? 0 : i * last / (shown - 1)];
    points.append(i == 0 ? "" : ", ").append(Fixed(point.imbalance_mean, 3));
    points.append(" with ").append(std::to_string(point.moves));
  }
  return "trade     " + Indented("balance " + points + " moves") + "\n";
}

/// Returns the probability to survive `failures` failures, or "-" if it is unknown.
std::string Chance(const RecoveryProbability& recovery, std::size_t failures) {
  return failures < recovery.survived.size() ? Share(recovery.survived[failures]) : "-";
}

/// Returns a table of the first times at which a strategy lost state or had no plan.
std::string IncidentTable(const std::vector<SimulationResult>& results) {
  constexpr std::size_t kShown = 20;
  constexpr std::size_t kTextColumns = 62;
  const auto moments = IncidentOf(results);
  if (moments.empty()) return "\nNothing was lost, and a plan existed at every moment.\n";
  text::Table table({Column{"AFTER", kRight}, Column{"ITERATION", kRight}, Column{"NODES", kRight},
                     Column{"GONE", kRight}, Column{"INCIDENT", kLeft}});
  std::size_t shown = 0;
  for (const auto& [time, moment] : moments) {
    if (++shown > kShown) break;
    const auto lines = text::Wrap(IncidentText(moment, results), kTextColumns);
    table.AddRow({text::FormatSeconds(static_cast<double>(time) / 1e3),
                  std::to_string(moment.step->iteration), std::to_string(moment.step->nodes_live),
                  std::to_string(moment.step->nodes_removed), lines.front()});
    for (std::size_t i = 1; i < lines.size(); ++i) table.AddRow({"", "", "", "", lines[i]});
  }
  std::string text = "\n" + Plural(moments.size(), "moment") + " with something lost or no plan\n" +
                     table.Render(0);
  if (moments.size() > kShown) {
    text += "and " + std::to_string(moments.size() - kShown) + " more, all of them with --json\n";
  }
  return text + text::Legend(
                    "AFTER: time in the events file. NODES: live nodes. GONE: nodes that left at "
                    "that moment.");
}

/// Returns a table of the samples that each strategy trains; nothing if none were computed.
std::string ThroughputTable(const std::vector<Throughput>& runs) {
  if (runs.empty()) return "";
  const Throughput* const baseline = BaselineOf(runs);
  text::Table table({Column{"STRATEGY"}, Column{"SAMPLES", kRight}, Column{"PER S", kRight},
                     Column{"RATIO", kRight}, Column{"TRAIN", kRight}, Column{"REDONE", kRight},
                     Column{"SAVE", kRight}, Column{"DETECT", kRight}, Column{"REBALANCE", kRight},
                     Column{"COPY", kRight}, Column{"RESTART", kRight}, Column{"STALLED", kRight}});
  for (const Throughput& run : runs) {
    const auto share = [&](double seconds) {
      return run.total_seconds > 0 ? Share(seconds / run.total_seconds) : "-";
    };
    const bool ratio = baseline != nullptr && baseline->samples > 0;
    table.AddRow({run.strategy, Fixed(run.samples, 0), Fixed(run.rate(), 2),
                  ratio ? Fixed(run.samples / baseline->samples, 2) : "-",
                  share(run.of(Activity::kTrain)), share(run.of(Activity::kRecompute)),
                  share(run.of(Activity::kCheckpoint)), share(run.of(Activity::kDetection)),
                  share(run.of(Activity::kRebalance)), share(run.of(Activity::kMigration)),
                  share(run.of(Activity::kRestart) + run.of(Activity::kRestore)),
                  share(run.of(Activity::kStalled))});
  }
  return "\n" + table.Render(0) +
         text::Legend(
             "SAMPLES: trained from the first plan to the last event. RATIO: samples / samples of "
             "ds. The other columns are shares of the time. TRAIN: steps that count. REDONE: steps "
             "that a restart discards. SAVE: writing checkpoints. DETECT: of failures. REBALANCE: "
             "new placements, without COPY of experts. RESTART: with reading the checkpoint. "
             "STALLED: no plan.");
}

/// Returns the legend of a comparison table.
/// \param chance  heading of the column of survival
std::string ComparisonLegend(const PlanRequest& request, const std::string& chance,
                             std::size_t failures) {
  const std::string unit = UnitName(request);
  std::string legend =
      "BALANCE, WORST: busiest gpu / mean, mean and worst layer. BOUND: least possible in as many "
      "slots. SPLIT: least possible with these replicas. LEAVE: tokens that leave their node if "
      "near replicas come first. FAULTS: number of " +
      unit + " failures that the plan always survives. " + chance + ": chance to survive ";
  legend += request.node_failure > 0
                ? "when each " + unit + " fails with " + Share(request.node_failure)
                : Plural(failures, "failure");
  if (request.faults > 0) legend += "; !: FAULTS is below --faults";
  legend += ". MOVES: replicas copied from the old plan. TIME: of planning.";
  return text::Legend(legend);
}

/// Returns the reasons for the end of the searches; nothing for strategies without search.
std::string SearchText(const VerifiedPlan& plan) {
  const auto count = [&](SearchEnd end) {
    return static_cast<std::size_t>(
        std::count_if(plan.result.notes.begin(), plan.result.notes.end(),
                      [end](const LayerNotes& note) { return note.search_end == end; }));
  };
  const std::size_t bound = count(SearchEnd::kBound);
  const std::size_t budget = count(SearchEnd::kBudget);
  const std::size_t stale = count(SearchEnd::kNoGain);
  if (bound + budget + stale == 0) return "";
  std::string text = "\nsearch    ended within 0.1 % of the bound in " + Plural(bound, "layer");
  if (budget > 0) {
    text += ", with --effort used up in " + std::to_string(budget) + ": more may lower balance";
  }
  if (stale > 0) text += ", without further gain in " + std::to_string(stale);
  return text;
}

/// Returns the cells of a strategy in a comparison table.
std::vector<std::string> ComparisonCells(const PlanRequest& request, const PlanInput& input,
                                         const PlannedRow& row, std::size_t failures) {
  if (!row.plan) {
    std::vector<std::string> cells(12, "-");
    cells[0] = row.strategy;
    cells[11] = Millis(row.seconds);
    return cells;
  }
  const ModelMetrics& balance = row.balance();
  const RecoveryProbability& recovery = row.plan->model_recovery;
  const auto& migration = row.plan->migration;
  const bool kept = recovery.certain >= static_cast<std::int64_t>(request.faults);
  return {row.strategy,
          Fixed(balance.imbalance_mean, 3),
          Fixed(balance.imbalance_max, 3),
          Fixed(balance.bound_mean, 3),
          Fixed(balance.lp_bound_mean, 3),
          Share(balance.inter_node_share_least),
          std::to_string(recovery.certain) + (kept ? "" : " !"),
          request.node_failure > 0 ? Share(SurvivalAt(recovery, request.node_failure))
                                   : Chance(recovery, failures),
          migration ? std::to_string(migration->transfers.size()) : "-",
          migration ? MovedBytes(migration->bytes, input.cluster) : "-",
          migration ? std::to_string(migration->rounds) : "-",
          Millis(row.seconds)};
}

}  // namespace

std::string SummaryText(const PlanRequest& request, const PlanInput& input, const PlannedRow& row) {
  const VerifiedPlan& plan = *row.plan;
  const ModelMetrics& balance = row.balance();
  std::string text = InputText(request, input) + "plan      ";
  if (!row.file.empty()) text += text::Printable(row.file) + ", format ";
  text += row.strategy;
  if (row.seconds > 0) text += " in " + Millis(row.seconds);
  text += "\nbalance   " + Fixed(balance.imbalance_mean, 3) + " mean, " +
          Fixed(balance.imbalance_max, 3) + " worst layer (busiest gpu / mean); bound " +
          Fixed(balance.bound_mean, 3) + ", with any split " + Fixed(balance.lp_bound_mean, 3) +
          SearchText(plan) + "\nlinks     " + Share(balance.inter_node_share) +
          " of the tokens leave their node, " + Share(balance.inter_node_share_least) +
          " if near replicas come first\nsurvives  " +
          Indented(Survival(plan.model_recovery, UnitName(request)) + " (" +
                   MethodText(plan.model_recovery) + ")") +
          "\n";
  if (request.node_failure > 0) {
    text += "          " + Share(SurvivalAt(plan.model_recovery, request.node_failure)) +
            " when each " + UnitName(request) + " fails with " + Share(request.node_failure) + "\n";
  }
  if (row.affinity) text += TransitionsText(*row.affinity);
  if (!plan.volumes.empty()) text += VolumesText(plan, input.cluster.param_bytes);
  if (plan.migration) text += MovesText(*plan.migration, input);
  if (plan.result.moves_curve.size() > 1) text += CurveText(plan.result.moves_curve);
  return text + CostText(row.cost);
}

std::string LayersText(const PlanInput& input, const PlannedRow& row) {
  text::Table table({Column{"LAYER", kRight}, Column{"TOKENS", kRight}, Column{"BALANCE", kRight},
                     Column{"BOUND", kRight}, Column{"ANY SPLIT", kRight}, Column{"NODES", kRight},
                     Column{"LEAVE NODE", kRight}, Column{"REPLICAS", kRight},
                     Column{"SURVIVES", kRight}, Column{"THEN", kRight}});
  const double unit = input.later ? input.later->unit : input.loads.unit;
  for (std::size_t l = 0; l < row.balance().layers.size(); ++l) {
    const LayerMetrics& layer = row.balance().layers[l];
    const RecoveryProbability& recovery = row.plan->layer_recovery[l];
    const double tokens = static_cast<double>(std::max<std::uint64_t>(layer.tokens, 1));
    table.AddRow({std::to_string(input.loads.layer_id[l]),
                  Fixed(static_cast<double>(layer.tokens) * unit, 0), Fixed(layer.imbalance, 3),
                  Fixed(layer.bound, 3), Fixed(layer.lp_bound, 3), Fixed(layer.node_imbalance, 3),
                  Share(layer.inter_node_tokens_least / tokens), std::to_string(layer.replicas),
                  std::to_string(recovery.certain),
                  Chance(recovery, static_cast<std::size_t>(recovery.certain + 1))});
  }
  return table.Render(0) +
         text::Legend(
             "BALANCE: busiest gpu / mean. BOUND: least possible in as many slots. ANY SPLIT: "
             "least possible with these replicas. NODES: busiest node / mean. LEAVE NODE: tokens "
             "that leave their node if near replicas come first. SURVIVES: failures always "
             "survived. THEN: chance to survive one more.") +
         CostLayersText(row.cost, input.loads);
}

std::string ComparisonText(const PlanRequest& request, const PlanInput& input,
                           const std::vector<PlannedRow>& rows) {
  std::int64_t certain = 0;
  for (const PlannedRow& row : rows) {
    if (row.plan) certain = std::max(certain, row.plan->model_recovery.certain);
  }
  const auto failures = static_cast<std::size_t>(certain) + 1;
  const std::string chance =
      request.node_failure > 0 ? "ALIVE" : "P(" + std::to_string(failures) + ")";
  text::Table table({Column{"STRATEGY"}, Column{"BALANCE", kRight}, Column{"WORST", kRight},
                     Column{"BOUND", kRight}, Column{"SPLIT", kRight}, Column{"LEAVE", kRight},
                     Column{"FAULTS", kRight}, Column{chance, kRight}, Column{"MOVES", kRight},
                     Column{"BYTES", kRight}, Column{"ROUNDS", kRight}, Column{"TIME", kRight}});
  std::string refused;
  for (const PlannedRow& row : rows) {
    table.AddRow(ComparisonCells(request, input, row, failures));
    if (row.reason.empty()) continue;
    refused += row.strategy + ": no plan: " + text::Printable(row.reason) + "\n";
  }
  return InputText(request, input) + "\n" + table.Render(0) +
         ComparisonLegend(request, chance, failures) + refused + CostComparisonText(rows);
}

std::string FailureSimulationsText(const std::string& events,
                                   const FailureSimulations& simulations) {
  const std::vector<SimulationResult>& results = simulations.results;
  const Cluster& cluster = simulations.cluster;
  std::string text = "events    " + text::Printable(events);
  if (!results.empty()) {
    text += ", " + Plural(results.front().steps.size(), "moment") + " over " +
            text::FormatSeconds(static_cast<double>(results.front().time_ms) / 1e3);
  }
  text::Table table({Column{"STRATEGY"}, Column{"FAILURES", kRight}, Column{"SURVIVED", kRight},
                     Column{"STALLED", kRight}, Column{"PLANS", kRight}, Column{"MOVES", kRight},
                     Column{"BYTES", kRight}, Column{"RESTORED", kRight}, Column{"BALANCE", kRight},
                     Column{"TIME", kRight}});
  for (const SimulationResult& result : results) {
    table.AddRow({result.strategy, std::to_string(result.failures), std::to_string(result.survived),
                  text::FormatSeconds(static_cast<double>(result.stalled_ms) / 1e3),
                  std::to_string(result.plans), std::to_string(result.transfers),
                  MovedBytes(result.bytes, cluster), MovedBytes(result.restored_bytes, cluster),
                  Fixed(result.imbalance_mean, 3), Millis(result.plan_seconds_mean)});
  }
  return text + "\n\n" + table.Render(0) +
         text::Legend(
             "FAILURES: moments at which nodes with experts were lost. SURVIVED: those after "
             "which every expert still had a replica; after the others, state is RESTORED from a "
             "checkpoint. STALLED: time without a plan. MOVES: replicas copied. BALANCE: busiest "
             "gpu / mean. TIME: of a plan, mean.") +
         ThroughputTable(simulations.throughput) + IncidentTable(results);
}

}  // namespace shardwright::placement
