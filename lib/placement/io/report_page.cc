// SPDX-License-Identifier: Apache-2.0
#include "placement/io/report_page.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "placement/core/metrics.h"
#include "placement/io/html/parts.h"
#include "support/html/page.h"
#include "support/json/json.h"

namespace shardwright::placement {

using json::Json;

namespace {

/// Largest number of slots in the report's maps. More would give tens of megabytes of HTML.
constexpr std::size_t kPageSlots = 1'000'000;
/// Largest number of bars for rounds. With more rounds a bar is the mean of consecutive rounds.
constexpr std::uint32_t kPageRounds = 300;

Json RecoveryPoints(const RecoveryProbability& recovery) {
  Json points = Json::array();
  for (const double p : recovery.survived) {
    points.push_back(p);
    if (p == 0 && points.size() > 2) break;
  }
  return points;
}

Json Slots(const Placement& placement, const std::vector<std::uint32_t>& shown) {
  Json rows = Json::array();
  for (const std::uint32_t l : shown) {
    const auto slots = placement.layer(l);
    rows.push_back(std::vector<std::int32_t>(slots.begin(), slots.end()));
  }
  return rows;
}

/// Returns the layers with maps in the report: all, or the least balanced ones that fit.
std::vector<std::uint32_t> ShownLayers(const ReportPage& page) {
  std::size_t per_layer = page.plan->result.placement.slot_count() + page.loads->experts;
  if (page.before != nullptr) per_layer += page.before->slot_count();
  std::vector<std::uint32_t> shown(page.loads->layers);
  std::iota(shown.begin(), shown.end(), 0U);
  const std::size_t fit =
      std::max<std::size_t>(1, kPageSlots / std::max<std::size_t>(per_layer, 1));
  if (fit >= shown.size()) return shown;
  const auto& layers = page.plan->metrics.layers;
  std::stable_sort(shown.begin(), shown.end(), [&](std::uint32_t a, std::uint32_t b) {
    return layers[a].imbalance > layers[b].imbalance;
  });
  shown.resize(fit);
  std::sort(shown.begin(), shown.end());
  return shown;
}

Json Ageing(const std::vector<AgeingPoint>& points) {
  Json rows = Json::array();
  for (const AgeingPoint& point : points) {
    rows.push_back({{"iteration", point.iteration},
                    {"after", point.after},
                    {"before", point.before ? Json(*point.before) : Json()}});
  }
  return rows;
}

Json MovesCurve(const std::vector<MovesPoint>& curve) {
  Json rows = Json::array();
  for (const MovesPoint& point : curve) {
    rows.push_back(
        {{"moves", point.moves}, {"mean", point.imbalance_mean}, {"worst", point.imbalance_max}});
  }
  return rows;
}

/// Returns the transfers per round and reach, as means of `step` consecutive rounds.
Json Rounds(const Migration& migration, std::uint32_t step) {
  std::vector<std::vector<double>> rounds((migration.rounds + step - 1) / step,
                                          std::vector<double>(3, 0));
  for (const Transfer& transfer : migration.transfers) {
    rounds[transfer.round / step][static_cast<std::size_t>(transfer.reach)] += 1.0 / step;
  }
  return rounds;
}

Json Memory(const PlannedCost& cost) {
  if (!cost.memory) return {};
  const auto& dropped = cost.memory->rematerialized;
  return {{"gpu", MemoryJson(cost.memory->gpu)},
          {"rematerialized", dropped ? MemoryJson(*dropped) : Json()},
          {"vanilla", cost.vanilla.memory ? MemoryJson(cost.vanilla.memory->gpu) : Json()}};
}

Json Times(const PlannedCost& cost) {
  if (!cost.times) return {};
  const std::optional<ModelTimes>& vanilla = cost.vanilla.times;
  Json layers = Json::array();
  for (std::size_t l = 0; l < cost.times->layers.size(); ++l) {
    const LayerTimes& layer = cost.times->layers[l];
    layers.push_back({{"experts", layer.experts},
                      {"all_to_all", layer.all_to_all},
                      {"exposed", layer.exposed},
                      {"vanilla", vanilla ? Json(vanilla->layers[l].seconds()) : Json()}});
  }
  const bool copies = cost.memory && cost.memory->rematerialized;
  return {{"seconds", cost.times->seconds()},
          {"other", cost.times->other},
          {"rematerialized", copies ? Json(cost.times->rematerialized()) : Json()},
          {"vanilla", vanilla ? Json(vanilla->seconds()) : Json()},
          {"speedup", vanilla ? Json(SpeedupOf(*cost.times, *vanilla).model) : Json()},
          {"layers", std::move(layers)}};
}

/// Adds the cells of a row of the comparison table; null without a value.
void AddCost(const PlannedCost& cost, Json* row) {
  const bool compared = cost.times && cost.vanilla.times;
  (*row)["seconds"] = cost.times ? Json(cost.times->seconds()) : Json();
  (*row)["speedup"] = compared ? Json(SpeedupOf(*cost.times, *cost.vanilla.times).model) : Json();
  (*row)["memory_bytes"] = cost.memory ? Json(cost.memory->gpu.bytes()) : Json();
}

Json Row(const PageRow& row, std::size_t failures) {
  Json json = {{"strategy", row.strategy}};
  if (const auto found = FindStrategy(row.strategy)) json["summary"] = (*found)->summary;
  if (row.plan == nullptr) {
    json["reason"] = row.reason;
    return json;
  }
  const ModelMetrics& metrics = row.plan->metrics;
  const RecoveryProbability& recovery = row.plan->model_recovery;
  json["balance"] = metrics.imbalance_mean;
  json["worst"] = metrics.imbalance_max;
  json["bound"] = metrics.bound_mean;
  json["split"] = metrics.lp_bound_mean;
  json["leave"] = metrics.inter_node_share_least;
  json["certain"] = recovery.certain;
  json["p"] = failures < recovery.survived.size() ? Json(recovery.survived[failures]) : Json();
  json["ms"] = row.seconds * 1e3;
  const bool moves = row.plan->migration.has_value();
  json["moves"] = moves ? Json(row.plan->migration->transfers.size()) : Json();
  json["bytes"] = moves ? row.plan->migration->bytes : 0;
  json["rounds"] = moves ? Json(row.plan->migration->rounds) : Json();
  AddCost(row.cost == nullptr ? PlannedCost{} : *row.cost, &json);
  return json;
}

/// Returns for each GPU of a node true if it can store experts.
Json Holding(const Cluster& cluster, std::uint32_t node) {
  Json holds = Json::array();
  for (std::uint32_t d = cluster.device_first(node); d < cluster.device_first(node + 1); ++d) {
    holds.push_back(cluster.holds(d));
  }
  return holds;
}

void AddCluster(const ReportPage& page, Json* data) {
  Json nodes = Json::array();
  const Cluster& cluster = *page.cluster;
  (*data)["speeds"] = RelativeSpeeds(cluster);
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    nodes.push_back({{"name", cluster.nodes[n].name},
                     {"alive", cluster.nodes[n].alive},
                     {"gpus", cluster.device_first(n + 1) - cluster.device_first(n)},
                     {"holds", Holding(cluster, n)}});
  }
  (*data)["nodes"] = std::move(nodes);
  (*data)["expert_bytes"] = cluster.expert_bytes;
  (*data)["unit"] = page.unit == FailureUnit::kRack ? "rack" : "node";
}

void AddMetrics(const ReportPage& page, Json* data) {
  const ModelMetrics& after = page.plan->metrics;
  std::optional<ModelMetrics> before;
  if (page.before != nullptr) before = Measure(*page.before, *page.loads, *page.cluster);
  Json layers = Json::array();
  std::size_t worst = 0;
  for (std::size_t l = 0; l < after.layers.size(); ++l) {
    if (after.layers[l].imbalance > after.layers[worst].imbalance) worst = l;
    layers.push_back({{"layer", page.loads->layer_id[l]},
                      {"after", after.layers[l].imbalance},
                      {"bound", after.layers[l].bound},
                      {"before", before ? Json(before->layers[l].imbalance) : Json()}});
  }
  (*data)["metrics"] = std::move(layers);
  (*data)["worst"] = worst;
  (*data)["total"] = {{"after", after.imbalance_mean},
                      {"bound", after.bound_mean},
                      {"before", before ? Json(before->imbalance_mean) : Json()},
                      {"leave", after.inter_node_share},
                      {"leave_least", after.inter_node_share_least},
                      {"certain", page.plan->model_recovery.certain}};
}

void AddSurvival(const ReportPage& page, Json* data) {
  const auto curve = [](const VerifiedPlan& plan) {
    return Json{{"name", plan.strategy},
                {"p", RecoveryPoints(plan.model_recovery)},
                {"exact", plan.model_recovery.exact()}};
  };
  Json curves = Json::array({curve(*page.plan)});
  std::int64_t certain = std::max<std::int64_t>(page.plan->model_recovery.certain, 0);
  for (const PageRow& row : page.rows) {
    if (row.plan == nullptr) continue;
    certain = std::max(certain, row.plan->model_recovery.certain);
    if (row.strategy != page.plan->strategy) curves.push_back(curve(*row.plan));
  }
  const auto failures = static_cast<std::size_t>(certain) + 1;
  Json rows = Json::array();
  for (const PageRow& row : page.rows) rows.push_back(Row(row, failures));
  (*data)["survival"] = std::move(curves);
  (*data)["failures"] = failures;
  (*data)["rows"] = std::move(rows);
}

void AddMigration(const ReportPage& page, Json* data) {
  (*data)["migration"] = nullptr;
  (*data)["rounds"] = nullptr;
  (*data)["round_step"] = 1;
  if (!page.plan->migration) return;
  const Migration& migration = *page.plan->migration;
  (*data)["migration"] = {{"transfers", migration.transfers.size()},
                          {"bytes", migration.bytes},
                          {"rounds", migration.rounds}};
  const std::uint32_t step = (migration.rounds + kPageRounds - 1) / kPageRounds;
  if (step == 0) return;
  (*data)["rounds"] = Rounds(migration, step);
  (*data)["round_step"] = step;
}

}  // namespace

std::string PageText(const ReportPage& report) {
  Json data = Json::object();
  data["strategy"] = report.plan->strategy;
  data["loads_name"] = report.loads_name;
  data["before_name"] = report.before_name;
  data["experts"] = token_counts::ExpertsText(*report.loads);
  data["iteration"] = report.loads->iteration ? Json(*report.loads->iteration) : Json();
  AddCluster(report, &data);
  AddMetrics(report, &data);
  AddSurvival(report, &data);
  AddMigration(report, &data);
  data["times"] = report.cost == nullptr ? Json() : Times(*report.cost);
  data["memory"] = report.cost == nullptr ? Json() : Memory(*report.cost);
  data["ageing"] = Ageing(report.ageing);
  data["moves_curve"] = MovesCurve(report.plan->result.moves_curve);
  const std::vector<std::uint32_t> shown = ShownLayers(report);
  data["shown"] = shown;
  Json loads = Json::array();
  for (const std::uint32_t l : shown) {
    const auto counts = report.loads->layer(l);
    loads.push_back(std::vector<std::uint64_t>(counts.begin(), counts.end()));
  }
  data["loads"] = std::move(loads);
  data["after"] = Slots(report.plan->result.placement, shown);
  data["after_begin"] = report.plan->result.placement.slot_begin;
  data["before"] = report.before == nullptr ? Json() : Slots(*report.before, shown);
  data["before_begin"] = report.before == nullptr ? Json() : Json(report.before->slot_begin);
  html::Document document;
  document.title = "Expert placement";
  document.css = kPageCss;
  const std::string json = data.dump(-1, ' ', false, Json::error_handler_t::replace);
  document.body = std::string(kPageHtml) + "<script type=\"application/json\" id=\"data\">" +
                  html::ScriptSafe(json) + "</script>\n";
  document.script = std::string(kPageCostsJs) + kPageJs;
  return html::Render(document);
}

}  // namespace shardwright::placement
