// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "partial/planner/forecast/records.h"
#include "partial/planner/plan.h"

namespace shardwright::partial {
namespace {

using Json = nlohmann::json;

/// \pre `text` is a record from records.h, so it is valid JSON
Json RecordJson(const std::string& text) { return Json::parse(text, nullptr, false); }

double Share(std::uint64_t part, std::uint64_t all) {
  return all == 0 ? 0 : static_cast<double>(part) / static_cast<double>(all);
}

double Less(std::uint64_t now, std::uint64_t before) {
  return before == 0 ? 0 : 1 - Share(now, before);
}

Json PartsJson(const ComponentBytes& bytes) {
  return {{"weights", bytes.weights}, {"master", bytes.master}, {"moments", bytes.moments}};
}

Json SizeJson(const CheckpointSize& size) {
  const auto optimizer = [](const ComponentBytes& b) { return b.master + b.moments; };
  const auto share = [&](std::uint64_t bytes) { return Share(bytes, size.bytes); };
  return {{"bytes", size.bytes},
          {"ratio", size.ratio()},
          {"expert", PartsJson(size.expert)},
          {"nonexpert", PartsJson(size.nonexpert)},
          {"share",
           {{"expert_weights", share(size.expert.weights)},
            {"expert_optimizer", share(optimizer(size.expert))},
            {"nonexpert_weights", share(size.nonexpert.weights)},
            {"nonexpert_optimizer", share(optimizer(size.nonexpert))}}}};
}

Json RiskJson(const TokensAtRisk& risk) {
  return {{"tokens", risk.at_risk}, {"of", risk.total}, {"fraction", risk.fraction()}};
}

Result<Json> SharesJson(const PlanAnswer& answer, std::size_t t, const char* name,
                        const PlannedLevel& level) {
  const ShareComparison& shares = level.shares;
  SW_TRY_ASSIGN(const std::string record,
                ShardingRecord(answer.job.names, shares.adaptive.start, shares.adaptive.nonexpert));
  const std::uint64_t before = shares.unshared_bottleneck;
  return Json{
      {"t", t},
      {"level", name},
      {"bytes", level.size.bytes},
      {"rank_bytes", shares.adaptive.rank_bytes},
      {"equal_rank_bytes", shares.equal.rank_bytes},
      {"unshared_rank_bytes", shares.unshared},
      {"bottleneck_bytes", shares.adaptive.bottleneck},
      {"equal_bottleneck_bytes", shares.equal.bottleneck},
      {"unshared_bottleneck_bytes", before},
      {"bound_bytes", shares.adaptive.bound},
      {"ideal_bytes", shares.adaptive.ideal},
      {"less",
       {{"ideal", Less(shares.adaptive.ideal, before)},
        {"equal", Less(shares.equal.bottleneck, before)},
        {"adaptive", Less(shares.adaptive.bottleneck, before)},
        {"adaptive_than_equal", Less(shares.adaptive.bottleneck, shares.equal.bottleneck)}}},
      {"record", RecordJson(record)}};
}

Json BudgetJson(const BudgetAnswer& budget) {
  return {{"s_total", budget.layers.total},
          {"stall_bytes", budget.stall_bytes},
          {"at_risk_tokens", budget.layers.at_risk_tokens},
          {"global_at_risk_tokens", budget.global.at_risk_tokens},
          {"record", RecordJson(budget.record)}};
}

Json LevelJson(const LevelBudget& level) {
  return {{"bytes_per_s", level.bandwidth},
          {"ranks", level.ranks},
          {"rank_bytes", level.rank_bytes},
          {"bytes", level.bytes},
          {"expert_bytes", level.budget.expert_bytes},
          {"nonexpert_bytes", level.budget.nonexpert_bytes},
          {"s_total", level.budget.experts},
          {"stall_bytes", level.budget.stall_bytes},
          {"bottleneck_bytes", level.bottleneck_bytes},
          {"seconds", level.seconds()},
          {"stall_s", level.stall_s()}};
}

Json LevelsJson(const LevelBudgets& levels, const std::optional<AgentBandwidths>& agent) {
  Json json = {{"iteration_s", levels.local.iteration_s},
               {"agent", agent ? BandwidthsJson(*agent) : Json(nullptr)},
               {"local", LevelJson(levels.local)},
               {"remote", nullptr}};
  if (!levels.remote) return json;
  Json remote = LevelJson(levels.remote->level);
  Json checkpoints = Json::array();
  for (std::size_t t = 0; t < levels.remote->sent.size(); ++t) {
    const BudgetSelection& sent = levels.remote->sent[t];
    Json layers = Json::object();
    for (std::size_t m = 0; m < sent.selected.size(); ++m) {
      layers[std::to_string(m)] = sent.selected[m];
    }
    checkpoints.push_back({{"t", t},
                           {"layers", std::move(layers)},
                           {"saved_tokens", sent.saved_tokens},
                           {"at_risk_tokens", sent.at_risk_tokens}});
  }
  remote["copies"] = levels.remote->copies;
  remote["checkpoints"] = std::move(checkpoints);
  json["remote"] = std::move(remote);
  return json;
}

Json CopiesJson(const CopiesAnswer& copies) {
  Json workers = Json::array();
  for (std::size_t i = 0; i < copies.sends.size(); ++i) {
    workers.push_back({{"stage", copies.grid.stage[i]},
                       {"node", copies.grid.node[i]},
                       {"holders", copies.plan.holders[i]},
                       {"load", copies.plan.load[i]},
                       {"send_bytes", copies.sends[i]},
                       {"receive_bytes", copies.receives[i]}});
  }
  return {{"replicas", copies.plan.replicas},
          {"clamped", copies.plan.clamped},
          {"cheap", copies.plan.cheap},
          {"costly", copies.plan.costly},
          {"incomplete", copies.plan.incomplete},
          {"workers", std::move(workers)},
          {"bytes", copies.all_bytes},
          {"longest_s", copies.longest_s}};
}

Json GradientsJson(const std::vector<GradientAnswer>& list) {
  Json json = Json::array();
  for (const GradientAnswer& one : list) {
    const std::uint64_t bytes = one.bytes();
    json.push_back({{"iteration", one.plan.iteration},
                    {"gradient_experts", SizeOf(one.plan.gradients)},
                    {"full_experts", SizeOf(one.plan.full)},
                    {"gradient_bytes", one.plan.gradient_bytes},
                    {"full_bytes", one.plan.full_bytes},
                    {"bytes", bytes},
                    {"state_bytes", one.state_bytes},
                    {"over_bytes", one.plan.over_bytes},
                    {"window", one.window},
                    {"factor", bytes == 0 ? Json(nullptr) : Json(Share(one.state_bytes, bytes))}});
  }
  return json;
}

Json LogJson(const PlanAnswer& answer) {
  const LogAnswer& log = *answer.log;
  return {{"bytes", log.bytes},
          {"rank_bytes", log.rank_bytes},
          {"interval", answer.request.interval},
          {"interval_bytes", log.interval_bytes},
          {"window", log.window},
          {"pays_up_to", log.pays_up_to}};
}

Json FillJson(const BubblePlan& plan) {
  return {{"seconds", plan.snapshot_s},
          {"in_bubble_bytes", plan.in_bubble},
          {"outside_bubble_bytes", plan.outside}};
}

Json BubblesJson(const BubblesAnswer& bubbles) {
  Json stages = Json::array();
  for (const BubbleTimes& times : bubbles.stage) {
    stages.push_back(
        {{"before_s", times.before_s}, {"between_s", times.between_s}, {"after_s", times.after_s}});
  }
  Json modules = Json::array();
  for (std::size_t i = 0; i < bubbles.names.size(); ++i) {
    modules.push_back({{"name", bubbles.names[i]},
                       {"in_bubble_bytes", bubbles.snapshot.module[i].in_bubble},
                       {"outside_bubble_bytes", bubbles.snapshot.module[i].outside}});
  }
  Json json = {{"iteration_s", bubbles.stage.front().iteration_s},
               {"bubble_s", bubbles.stage.front().bubble_s},
               {"stages", std::move(stages)},
               {"rank", bubbles.rank},
               {"snapshot", FillJson(bubbles.snapshot)},
               {"modules", std::move(modules)}};
  if (bubbles.copies) json["copies"] = FillJson(*bubbles.copies);
  return json;
}

Json DynamicKJson(const DynamicKAnswer& dynamic) {
  Json json = {{"share", dynamic.state.share()},
               {"limit", dynamic.state.limit},
               {"levels", nullptr},
               {"faults", nullptr}};
  if (!dynamic.levels) return json;
  Json levels = Json::array();
  std::uint64_t faults = 0;
  for (const KLevel& level : *dynamic.levels) {
    levels.push_back({{"k", level.k}, {"plt", level.plt}, {"faults", level.faults}});
    faults += level.faults;
  }
  json["levels"] = std::move(levels);
  json["faults"] = faults;
  return json;
}

Status AddCheckpoints(const PlanAnswer& answer, Json* result) {
  Json shares = Json::array();
  Json sizes = Json::array();
  for (std::size_t t = 0; t < answer.checkpoints.size(); ++t) {
    const PlannedCheckpoint& one = answer.checkpoints[t];
    Json size = {
        {"t", t}, {"snapshot_bytes", one.snapshot.size.bytes}, {"bytes", one.stored().size.bytes}};
    if (one.risk) size["at_risk"] = RiskJson(*one.risk);
    sizes.push_back(std::move(size));
    SW_TRY_ASSIGN(Json stored, SharesJson(answer, t, "persist", one.stored()));
    shares.push_back(std::move(stored));
    if (!one.persist) continue;
    SW_TRY_ASSIGN(Json snapshot, SharesJson(answer, t, "snapshot", one.snapshot));
    shares.push_back(std::move(snapshot));
  }
  (*result)["checkpoints"] = std::move(sizes);
  (*result)["shares"] = std::move(shares);
  return {};
}

void AddSections(const PlanAnswer& answer, Json* result) {
  const PlanRequest& request = answer.request;
  if (answer.budget) (*result)["budget"] = BudgetJson(*answer.budget);
  if (answer.levels) (*result)["levels"] = LevelsJson(*answer.levels, request.agent);
  if (answer.log) (*result)["log"] = LogJson(answer);
  if (answer.copies) (*result)["copies"] = CopiesJson(*answer.copies);
  if (!answer.gradients.empty()) (*result)["gradients"] = GradientsJson(answer.gradients);
  if (answer.bubbles) (*result)["bubbles"] = BubblesJson(*answer.bubbles);
  if (answer.extra_capacity) {
    (*result)["capacity_increase"] = {{"capacity", *request.capacity},
                                      {"lost_tokens", request.lost_tokens},
                                      {"extra_tokens", answer.extra_capacity->extra},
                                      {"least_iterations", answer.extra_capacity->least},
                                      {"iterations", answer.extra_capacity->iterations}};
  }
  if (answer.wasted) {
    (*result)["wasted"] = {{"checkpoint_s", answer.wasted->checkpoint_s},
                           {"retrieval_s", *request.retrieval_s},
                           {"wasted_s", answer.wasted->wasted_s}};
  }
  if (answer.dynamic_k) (*result)["dynamic_k"] = DynamicKJson(*answer.dynamic_k);
}

}  // namespace

Result<Json> PlanJson(const PlanAnswer& answer) {
  const PlannedCheckpoint& first = answer.checkpoints.front();
  Json result = {{"policy", Name(answer.options.policy)},
                 {"k", answer.options.k_snapshot},
                 {"k_persist", answer.options.k_persist},
                 {"experts", answer.job.experts()},
                 {"moe_layers", answer.job.layer_id},
                 {"dp", answer.job.ranks.dp},
                 {"ep", answer.job.map.ep},
                 {"dead_ranks", answer.job.ranks.excluded},
                 {"zero", answer.request.zero_stage},
                 {"size",
                  {{"full", SizeJson(answer.full)},
                   {"snapshot", SizeJson(first.snapshot.size)},
                   {"persist", SizeJson(first.stored().size)}}},
                 {"selection", RecordJson(answer.selection_record)},
                 {"uneven", answer.uneven ? Json(*answer.uneven) : Json(nullptr)},
                 {"phases", answer.phases ? Json(*answer.phases) : Json(nullptr)}};
  SW_TRY(AddCheckpoints(answer, &result));
  AddSections(answer, &result);
  return result;
}

}  // namespace shardwright::partial
