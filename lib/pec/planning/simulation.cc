#include "pec/planning/simulation.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/text.h"
#include "loads/load_trace.h"
#include "pec/forecast/fault_list.h"

namespace shardwright::pec {
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
               {"overhead_s", row.overhead_s}};
  if (row.dynamic) json["dynamic"] = DynamicJson(*row.dynamic);
  return json;
}

}  // namespace

Result<std::vector<SimulatedPolicy>> PoliciesOf(const SimulateRequest& request,
                                                std::uint32_t experts) {
  const auto k =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(request.k.value_or(1), experts));
  std::vector<SimulatedPolicy> policies;
  for (SimulatedPolicy one : AllPolicies(experts)) {
    if (request.policy && one.policy != *request.policy) continue;
    if (request.k && one.policy != Policy::kFull) {
      // Each policy once: in the place of its smallest K.
      if (one.k_snapshot != 1) continue;
      one.k_snapshot = k;
      one.k_persist = static_cast<std::uint32_t>(request.k_persist.value_or(k));
    }
    // These keep one set of experts for both levels, of the persisted size.
    if (one.policy == Policy::kBudget || one.policy == Policy::kBudgetGlobal) {
      one.k_snapshot = one.k_persist;
    }
    if (one.policy == Policy::kLoadAware && request.max_age) one.max_age = request.max_age;
    policies.push_back(one);
  }
  if (policies.empty()) {
    return Fail(Errc::kUsage, "a layer of one expert leaves no choice: only --policy full");
  }
  if (request.dynamic_limit) {
    policies.push_back({Policy::kSequential, k, k, std::nullopt, request.dynamic_limit});
  }
  return policies;
}

std::optional<std::size_t> BestRow(const std::vector<SimulationRow>& rows, double plt_limit) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].loss.plt > plt_limit) continue;
    const auto cost = [&](std::size_t at) {
      return std::pair(rows[at].overhead_s, rows[at].persist_bytes);
    };
    if (!best || cost(i) < cost(*best)) best = i;
  }
  return best;
}

Result<Simulation> SimulateTrace(const SimulateRequest& request) {
  SW_TRY_ASSIGN(const loads::LoadTrace trace, loads::ReadLoads(request.tokens));
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
  if (request.fault_file.empty()) {
    SW_TRY_ASSIGN(input.faults, MakeFaults(request.fault_rate, 1, input.tokens.size(), job.nodes(),
                                           request.node_share, request.seed));
  } else {
    SW_TRY_ASSIGN(input.faults, ReadFaults(request.fault_file));
  }
  SW_TRY_ASSIGN(const auto policies, PoliciesOf(request, trace.experts));
  SW_TRY_ASSIGN(simulation.rows, SimulateAll(input, policies));
  SW_TRY_ASSIGN(simulation.full_bytes, FullBytes(job.model));
  simulation.best = BestRow(simulation.rows, request.plt_limit);
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
          {"best", best ? Json(*best) : Json(nullptr)}};
}

std::string SimulationCsv(const std::vector<SimulationRow>& rows) {
  std::string text =
      "policy,k,k_persist,checkpoints,snapshot_bytes,bytes,bottleneck_bytes,bound_bytes,plt,"
      "mlt_sum,mlt_avg,risk_mean,risk_max,repeated_iterations,stall_s,overhead_s,dynamic_limit,"
      "dynamic_k\n";
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
    text += "," + (row.dynamic ? std::to_string(row.dynamic->k.back().k) : "") + "\n";
  }
  return text;
}

SimulationPage PageOf(const Simulation& simulation, const std::string& trace_name) {
  SimulationPage page;
  page.input = &simulation.input;
  page.rows = simulation.rows;
  page.best = simulation.best;
  page.plt_limit = simulation.plt_limit;
  page.full_bytes = simulation.full_bytes;
  page.trace_name = trace_name;
  return page;
}

}  // namespace shardwright::pec
