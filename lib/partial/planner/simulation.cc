// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/simulation.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "partial/planner/forecast/fault_list.h"
#include "support/base/stop.h"
#include "support/base/text.h"
#include "token_counts/trace.h"

namespace shardwright::partial {
namespace {

using Json = nlohmann::json;

Json DynamicJson(const DynamicRun& dynamic) {
  Json history = Json::array();
  for (const KPoint& point : dynamic.k) {
    history.push_back({{"iteration", point.iteration}, {"step", point.step}, {"k", point.k}});
  }
  const auto& covered = dynamic.faults_covered;
  return {{"limit", dynamic.state.limit},
          {"levels", dynamic.state.levels},
          {"spent", dynamic.state.total},
          {"spent_of_level", dynamic.state.spent},
          {"history", std::move(history)},
          {"faults_covered", covered ? Json(*covered) : Json(nullptr)}};
}

Json LogJson(const SimulationRow& row) {
  const std::optional<GradientRule>& rule = row.policy.rule;
  return {{"rule", rule ? Name(*rule) : "replay"},
          {"computed_only", rule.has_value()},
          {"bytes", row.log_bytes},
          {"stall_s", row.log_stall_s},
          {"window", row.window}};
}

Json RowJson(const SimulationRow& row) {
  Json json = {{"policy", Name(row.policy.policy)},
               {"k", row.policy.k_snapshot},
               {"k_persist", row.policy.k_persist},
               {"checkpoints", row.checkpoints},
               {"snapshot_bytes", row.snapshot_bytes},
               {"bytes", row.persist_bytes},
               {"bottleneck_bytes", row.bottleneck_bytes},
               {"bound_bytes", row.bound_bytes},
               {"plt", row.loss.plt},
               {"mlt_sum", row.loss.mlt_sum},
               {"mlt_avg", row.loss.mlt_avg},
               {"plt_by_layer", row.loss.layer},
               {"risk_mean", row.risk_mean},
               {"risk_max", row.risk_max},
               {"repeated_iterations", row.replayed_iterations},
               {"stall_s", row.stall_s},
               {"overhead_s", row.overhead_s},
               {"memory_bytes", row.memory_bytes},
               {"recovery_s", row.recovery_s ? Json(*row.recovery_s) : Json(nullptr)}};
  if (row.policy.policy == Policy::kReplay) json["log"] = LogJson(row);
  if (row.dynamic) json["dynamic"] = DynamicJson(*row.dynamic);
  return json;
}

/// Adds the policies that log or send gradients.
Status AddReplay(const SimulateRequest& request, std::uint32_t experts,
                 const std::string& no_replay, std::vector<SimulatedPolicy>* policies) {
  const bool asked = request.policy == Policy::kReplay;
  std::string refused = no_replay;
  if (request.partial_start) refused = "the first checkpoint must have all experts";
  if (asked && !refused.empty()) return Fail(Errc::kUsage, "--policy gradient-log: ", refused);
  if (refused.empty() && (asked || !request.policy)) {
    for (std::uint64_t k = 1; k < experts; k *= 2) {
      const std::uint64_t saved = std::min<std::uint64_t>(request.k.value_or(k), experts);
      const auto k_both = static_cast<std::uint32_t>(saved);
      SimulatedPolicy one{Policy::kReplay, k_both, k_both, {}};
      one.budget_bytes = request.budget_bytes;
      policies->push_back(one);
      if (request.k || request.budget_bytes > 0) break;
    }
  }
  if (!request.gradients) return {};
  for (const GradientRule rule : {GradientRule::kAlgorithm3, GradientRule::kLeast}) {
    policies->push_back({Policy::kReplay, experts, experts, {}, {}, rule});
  }
  return {};
}

/// Warns about rows that lose more tokens than the limit.
void WarnAboveLimit(const Simulation& simulation, Sink& sink) {
  std::vector<std::string> above;
  for (const SimulationRow& row : simulation.rows) {
    if (row.loss.plt <= simulation.plt_limit) continue;
    above.push_back(PolicyText(row) + (row.dynamic ? " " : " with K ") + LevelsText(row));
  }
  if (above.empty()) return;
  sink.Warn(StrCat("more than ", Fixed(100 * simulation.plt_limit, 2),
                   " % of the tokens are lost (--plt-limit), which harms accuracy, in ",
                   above.size(), " of ", Plural(simulation.rows.size(), "row"), ": ",
                   FirstFew(above)));
}

}  // namespace

Result<std::vector<SimulatedPolicy>> PoliciesOf(const SimulateRequest& request,
                                                std::uint32_t experts,
                                                const std::string& no_replay) {
  const auto k =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(request.k.value_or(1), experts));
  std::vector<SimulatedPolicy> policies;
  for (SimulatedPolicy one : AllPolicies(experts)) {
    if (request.policy && one.policy != *request.policy) continue;
    if (request.k && one.policy != Policy::kFull) {
      // With a fixed K, list each policy once: replace the entry with K = 1.
      if (one.k_snapshot != 1) continue;
      one.k_snapshot = k;
      one.k_persist = static_cast<std::uint32_t>(request.k_persist.value_or(k));
    }
    // Budget policies save the same experts at both levels: K of the persist applies to both.
    if (one.policy == Policy::kBudget || one.policy == Policy::kBudgetGlobal) {
      one.k_snapshot = one.k_persist;
    }
    if (one.policy == Policy::kLoadAware && request.max_age) one.max_age = request.max_age;
    policies.push_back(one);
  }
  SW_TRY(AddReplay(request, experts, no_replay, &policies));
  if (policies.empty()) {
    return Fail(Errc::kUsage, "layers have one expert, so only --policy full is possible");
  }
  if (request.dynamic_limit) {
    policies.push_back({Policy::kSequential, k, k, std::nullopt, request.dynamic_limit});
  }
  return policies;
}

std::optional<std::size_t> BestRow(const std::vector<SimulationRow>& rows, double plt_limit) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].loss.plt > plt_limit || rows[i].policy.rule) continue;
    const auto cost = [&](std::size_t at) {
      return std::pair(rows[at].overhead_s, rows[at].persist_bytes + rows[at].log_bytes);
    };
    if (!best || cost(i) < cost(*best)) best = i;
  }
  return best;
}

std::string TooShort(const SimulateRequest& request, std::size_t faults,
                     std::uint64_t checkpoints) {
  constexpr std::uint64_t kFewestCheckpoints = 5;
  const std::size_t fewest = request.fault_file.empty() ? 3 : 1;
  if (faults >= fewest && checkpoints >= kFewestCheckpoints) return "";
  return StrCat(Plural(faults, "fault"), " and ", Plural(checkpoints, "checkpoint"),
                " are too few, at least ", fewest, " and ", kFewestCheckpoints,
                " are needed (--faults, --interval)");
}

Result<Simulation> SimulateTrace(const SimulateRequest& request, Sink& sink) {
  const Interruptible playing(sink);
  const StopCheck stop = StopOf(sink);
  SW_TRY_ASSIGN(const token_counts::TokenTrace trace, token_counts::ReadLoads(request.tokens));
  for (const std::string& warning : trace.warnings) sink.Warn(warning);
  Simulation simulation;
  simulation.plt_limit = request.plt_limit;
  simulation.seed = request.seed;
  SW_TRY_ASSIGN(simulation.job, ReadJob(request.job, TraceShape{trace.experts, trace.layer_id}));
  const Job& job = simulation.job;
  SimulationInput& input = simulation.input;
  SW_TRY_ASSIGN(input.tokens, CountsOfTrace(trace));
  input.map = job.map;
  input.ranks = job.ranks;
  input.ranks_per_node = job.ranks_per_node;
  input.model = job.model;
  input.keep = job.keep;
  input.interval = request.interval;
  input.first_full = !request.partial_start;
  input.snapshot_bytes_per_s = static_cast<double>(request.job.snapshot_bandwidth);
  input.forward_backward_s = request.job.forward_backward_s;
  input.iteration_s = request.job.iteration_s;
  input.restart_s = request.job.restart_s;
  input.storage_bytes_per_s = static_cast<double>(request.job.persist_bandwidth);
  input.replay_elems_per_s = static_cast<double>(request.job.replay_speed);
  input.full_every = request.full_every;
  input.gradient_budget = request.gradient_budget;
  if (request.fault_file.empty()) {
    SW_TRY_ASSIGN(input.faults, MakeFaults(request.fault_rate, 1, input.tokens.size(), job.nodes(),
                                           request.node_share, request.seed));
  } else {
    SW_TRY_ASSIGN(input.faults, ReadFaults(request.fault_file));
  }
  SW_TRY_ASSIGN(const auto policies, PoliciesOf(request, trace.experts, job.no_replay));
  SW_TRY_ASSIGN(simulation.rows, SimulateAll(input, policies, stop));
  SW_TRY_ASSIGN(simulation.full_bytes, FullBytes(job.model));
  WarnAboveLimit(simulation, sink);
  simulation.no_best = TooShort(request, input.faults.size(), simulation.rows.front().checkpoints);
  if (!simulation.no_best.empty()) return simulation;
  simulation.best = BestRow(simulation.rows, request.plt_limit);
  if (!simulation.best) {
    simulation.no_best = StrCat("every row has lost more than ", Fixed(100 * request.plt_limit, 2),
                                " % of the tokens (--plt-limit)");
  }
  return simulation;
}

Json SimulationJson(const Simulation& simulation) {
  const Job& job = simulation.job;
  const std::optional<std::size_t>& best = simulation.best;
  Json rows = Json::array();
  for (const SimulationRow& row : simulation.rows) rows.push_back(RowJson(row));
  Json faults = Json::array();
  for (const SimulatedFault& fault : simulation.input.faults) {
    faults.push_back({{"iteration", fault.iteration}, {"nodes", fault.nodes}});
  }
  return {{"iterations", simulation.input.tokens.size()},
          {"interval", simulation.input.interval},
          {"moe_layers", job.layer_id},
          {"experts", job.experts().front()},
          {"full_bytes", simulation.full_bytes},
          {"dp", job.ranks.dp},
          {"ep", job.map.ep},
          {"nodes", job.nodes()},
          {"seed", simulation.seed},
          {"faults", std::move(faults)},
          {"plt_limit", simulation.plt_limit},
          {"rows", std::move(rows)},
          {"best", best ? Json(*best) : Json(nullptr)},
          {"no_best", best ? Json(nullptr) : Json(simulation.no_best)}};
}

std::string SimulationCsv(const std::vector<SimulationRow>& rows) {
  std::string text =
      "policy,k,k_persist,checkpoints,snapshot_bytes,bytes,bottleneck_bytes,bound_bytes,plt,"
      "mlt_sum,mlt_avg,risk_mean,risk_max,repeated_iterations,stall_s,overhead_s,dynamic_limit,"
      "dynamic_k,log_rule,log_bytes,log_stall_s,window,memory_bytes,recovery_s\n";
  for (const SimulationRow& row : rows) {
    text += std::string(Name(row.policy.policy));
    for (const std::uint64_t value :
         {std::uint64_t{row.policy.k_snapshot}, std::uint64_t{row.policy.k_persist},
          row.checkpoints, row.snapshot_bytes, row.persist_bytes, row.bottleneck_bytes,
          row.bound_bytes}) {
      text += "," + std::to_string(value);
    }
    for (const double value :
         {row.loss.plt, row.loss.mlt_sum, row.loss.mlt_avg, row.risk_mean, row.risk_max}) {
      text += "," + Fixed(value, 9);
    }
    text += "," + std::to_string(row.replayed_iterations) + "," + Fixed(row.stall_s, 6) + "," +
            Fixed(row.overhead_s, 6) + ",";
    if (row.dynamic) text += Fixed(row.dynamic->state.limit, 9);
    text += "," + (row.dynamic ? std::to_string(row.dynamic->k.back().k) : "") + ",";
    const bool replays = row.policy.policy == Policy::kReplay;
    if (replays) text += row.policy.rule ? Name(*row.policy.rule) : "replay";
    text += "," + std::to_string(row.log_bytes) + "," + Fixed(row.log_stall_s, 6) + "," +
            (replays ? std::to_string(row.window) : "") + "," + std::to_string(row.memory_bytes) +
            "," + (row.recovery_s ? Fixed(*row.recovery_s, 6) : "") + "\n";
  }
  return text;
}

SimulationPage PageOf(const Simulation& simulation, const std::string& trace_name) {
  SimulationPage page;
  page.input = &simulation.input;
  page.rows = simulation.rows;
  page.best = simulation.best;
  page.no_best = simulation.no_best;
  page.plt_limit = simulation.plt_limit;
  page.full_bytes = simulation.full_bytes;
  page.trace_name = trace_name;
  return page;
}

}  // namespace shardwright::partial
