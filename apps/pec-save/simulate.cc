#include "pec-save/simulate.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/number.h"
#include "cli/text.h"
#include "common/outputs.h"
#include "moe/load_trace.h"
#include "pec/fault_list.h"
#include "pec/simulate.h"
#include "pec/simulate_page.h"

namespace shardwright::apps {
namespace {

using Json = nlohmann::json;
using Column = cli::Table::Column;
constexpr auto kRight = cli::Table::Align::kRight;
constexpr std::uint64_t kInterval = 10;

/// A number reads as a rate, anything else is a file.
std::optional<double> AsRate(const std::string& text) {
  double rate = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, rate);
  if (error != std::errc() || at != end || !std::isfinite(rate)) return std::nullopt;
  return rate;
}

Result<std::vector<pec::SimulatedFault>> FaultsOf(cli::Context& context, const cli::App& app,
                                                  const PlanningFlags& flags, const Job& job,
                                                  std::uint64_t iterations) {
  const std::optional<double> rate = AsRate(flags.faults);
  if (rate) {
    return pec::MakeFaults(*rate, 1, iterations, job.nodes(), flags.node_share,
                           context.flags().seed);
  }
  for (const char* flag : {"--node-share", "--seed"}) {
    if (!app.Given(flag)) continue;
    return Fail(Errc::kUsage,
                std::string(flag) + " means nothing with the file " + flags.faults + " of faults");
  }
  return pec::ReadFaults(flags.faults);
}

/// All policies and K, or of those what the flags leave.
Result<std::vector<pec::SimulatedPolicy>> PoliciesOf(const cli::App& app, const SaveFlags& save,
                                                     std::uint32_t experts) {
  const bool one_k = app.Given("--k");
  const auto k = static_cast<std::uint32_t>(std::min<std::uint64_t>(save.k, experts));
  std::vector<pec::SimulatedPolicy> policies;
  if (app.Given("--k-persist") && !one_k) {
    return Fail(Errc::kUsage, "--k-persist means nothing without --k");
  }
  for (pec::SimulatedPolicy one : pec::AllPolicies(experts)) {
    if (app.Given("--policy") && one.policy != save.policy) continue;
    const bool full = one.policy == pec::Policy::kFull;
    if (one_k && !full) {
      // Each policy once: in the place of its smallest K.
      if (one.k_snapshot != 1) continue;
      one.k_snapshot = k;
      one.k_persist =
          save.k_persist == SaveFlags::kUnset ? k : static_cast<std::uint32_t>(save.k_persist);
    }
    // These keep one set of experts for both levels, of the persisted size.
    if (one.policy == pec::Policy::kBudget || one.policy == pec::Policy::kBudgetGlobal) {
      one.k_snapshot = one.k_persist;
    }
    if (one.policy == pec::Policy::kLoadAware && save.max_age != SaveFlags::kUnset) {
      one.max_age = save.max_age;
    }
    policies.push_back(one);
  }
  if (policies.empty()) {
    return Fail(Errc::kUsage, "a layer of one expert leaves no choice: only --policy full");
  }
  if (!app.Given("--dynamic-k")) return policies;
  if (app.Given("--policy") && save.policy != pec::Policy::kSequential) {
    return Fail(Errc::kUsage, "--dynamic-k goes with --policy sequential, not " +
                                  std::string(pec::Name(save.policy)));
  }
  if (app.Given("--k-persist")) {
    return Fail(Errc::kUsage,
                "--k-persist means nothing with --dynamic-k, whose K is that of both levels");
  }
  const std::uint32_t start = one_k ? k : 1;
  policies.push_back({pec::Policy::kSequential, start, start, std::nullopt, save.dynamic_k});
  return policies;
}

/// The row within the limit with the least overhead, then the fewest bytes.
std::optional<std::size_t> Best(const std::vector<pec::SimulationRow>& rows, double limit) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].loss.plt > limit) continue;
    const auto cost = [&](std::size_t at) {
      return std::pair(rows[at].overhead_s, rows[at].persist_bytes);
    };
    if (!best || cost(i) < cost(*best)) best = i;
  }
  return best;
}

Json DynamicJson(const pec::DynamicRun& dynamic) {
  Json history = Json::array();
  for (const pec::KPoint& point : dynamic.k) {
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

Json RowJson(const pec::SimulationRow& row) {
  Json json = {{"policy", pec::Name(row.policy.policy)},
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

std::string RowsCsv(const std::vector<pec::SimulationRow>& rows) {
  std::string text =
      "policy,k,k_persist,checkpoints,snapshot_bytes,bytes,bottleneck_bytes,bound_bytes,plt,"
      "mlt_sum,mlt_avg,risk_mean,risk_max,repeated_iterations,stall_s,overhead_s,dynamic_limit,"
      "dynamic_k\n";
  for (const pec::SimulationRow& row : rows) {
    text += std::string(pec::Name(row.policy.policy));
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

cli::Table RowsTable(const std::vector<pec::SimulationRow>& rows) {
  cli::Table table({Column{"POLICY"}, Column{"K", kRight}, Column{"WRITTEN", kRight},
                    Column{"LARGEST", kRight}, Column{"BOUND", kRight}, Column{"PLT %", kRight},
                    Column{"MLT %", kRight}, Column{"RISK %", kRight}, Column{"STALL s", kRight},
                    Column{"COST s", kRight}});
  for (const pec::SimulationRow& row : rows) {
    table.AddRow({pec::PolicyText(row), pec::LevelsText(row), FormatBytes(row.persist_bytes),
                  FormatBytes(row.bottleneck_bytes), FormatBytes(row.bound_bytes),
                  Fixed(100 * row.loss.plt, 3), Fixed(100 * row.loss.mlt_sum, 2),
                  Fixed(100 * row.risk_mean, 2), Fixed(row.stall_s, 3), Fixed(row.overhead_s, 1)});
  }
  return table;
}

void ShowDynamic(std::ostream& out, const pec::DynamicRun& dynamic) {
  out << "dynamic K " << dynamic.k.front().k;
  for (std::size_t i = 1; i < dynamic.k.size(); ++i) {
    out << ", " << dynamic.k[i].k << " after iteration " << dynamic.k[i].iteration;
  }
  out << "; lost " << Fixed(100 * dynamic.state.total, 3) << " of "
      << Fixed(100 * dynamic.state.limit, 3) << " %, covers ";
  if (dynamic.faults_covered) {
    out << *dynamic.faults_covered
        << (*dynamic.faults_covered == 1 ? " more fault\n" : " more faults\n");
  } else {
    out << "any number of faults\n";
  }
}

void ShowRows(cli::Context& context, const PlanningFlags& flags, const Job& job,
              const pec::SimulationInput& input, const std::vector<pec::SimulationRow>& rows,
              std::uint64_t full_bytes) {
  const std::optional<std::size_t> best = Best(rows, flags.plt_limit);
  Json list = Json::array();
  for (const pec::SimulationRow& row : rows) list.push_back(RowJson(row));
  Json faults = Json::array();
  for (const auto& fault : input.faults) {
    faults.push_back({{"iteration", fault.iteration}, {"nodes", fault.nodes}});
  }
  const std::size_t experts = job.experts().front();
  context.SetResult({{"iterations", input.tokens.size()},
                     {"interval", input.interval},
                     {"moe_layers", job.layer_id},
                     {"experts", experts},
                     {"full_bytes", full_bytes},
                     {"dp", job.ranks.dp},
                     {"ep", job.map.ep},
                     {"nodes", job.nodes()},
                     {"seed", context.flags().seed},
                     {"faults", std::move(faults)},
                     {"plt_limit", flags.plt_limit},
                     {"rows", std::move(list)},
                     {"best", best ? Json(*best) : Json(nullptr)}});
  std::ostream& out = context.out();
  out << "run       " << input.tokens.size() << " iterations, " << job.layer_id.size()
      << " MoE layers of " << experts << " experts, " << rows.front().checkpoints
      << " checkpoints, " << input.faults.size()
      << (input.faults.size() == 1 ? " fault\n" : " faults\n") << "job       "
      << FormatBytes(full_bytes) << " of state, " << job.ranks.dp << " data-parallel ranks, "
      << job.map.ep << " of them expert-parallel, " << job.nodes()
      << (job.nodes() == 1 ? " node\n" : " nodes\n") << "repeated  "
      << rows.front().replayed_iterations << " iterations after faults\n\n";
  context.Print(RowsTable(rows));
  out << "\nWRITTEN  bytes of all checkpoints; LARGEST  of a rank in one, BOUND  the least "
         "possible\n"
         "PLT, MLT  lost tokens, mean and sum of the layers; RISK  unsaved after a checkpoint, "
         "mean\n"
         "STALL  of the longest snapshot; COST  stalls, restarts and repeated work of the run\n\n";
  for (const pec::SimulationRow& row : rows) {
    if (row.dynamic) ShowDynamic(out, *row.dynamic);
  }
  if (best) {
    const pec::SimulationRow& row = rows[*best];
    out << "least cost with PLT up to " << Fixed(100 * flags.plt_limit, 2)
        << " %: " << pec::RowText(row) << "\n";
  } else {
    out << "no row has a PLT up to " << Fixed(100 * flags.plt_limit, 2) << " %\n";
  }
}

}  // namespace

Status Simulate(cli::Context& context, const cli::App& app, const SaveFlags& save,
                const PlanningFlags& flags) {
  SW_TRY(CheckOutputs(context, {flags.csv, flags.page}));
  SW_TRY_ASSIGN(const moe::LoadTrace trace, moe::ReadLoads(save.source.input));
  SW_TRY_ASSIGN(const Job job,
                flags.job.Read(app, save.keep, Shape{trace.experts, trace.layer_id}));
  pec::SimulationInput input;
  SW_TRY_ASSIGN(input.tokens, pec::CountsOfTrace(trace));
  input.map = job.map;
  input.ranks = job.ranks;
  input.ranks_per_node = job.ranks_per_node;
  input.model = job.model;
  input.keep = job.keep;
  input.interval = flags.interval == 0 ? kInterval : flags.interval;
  input.first_full = !save.partial_start;
  input.snapshot_bytes_per_s = static_cast<double>(flags.job.snapshot_bandwidth);
  input.forward_backward_s = flags.job.forward_backward_s;
  input.iteration_s = flags.job.iteration_s;
  input.restart_s = flags.job.restart_s;
  SW_TRY_ASSIGN(input.faults, FaultsOf(context, app, flags, job, input.tokens.size()));
  SW_TRY_ASSIGN(const auto policies, PoliciesOf(app, save, trace.experts));
  SW_TRY_ASSIGN(const auto rows, pec::SimulateAll(input, policies));
  SW_TRY_ASSIGN(const std::uint64_t full_bytes, FullBytes(job.model));
  ShowRows(context, flags, job, input, rows, full_bytes);
  pec::SimulationPage page;
  page.input = &input;
  page.rows = rows;
  page.best = Best(rows, flags.plt_limit);
  page.plt_limit = flags.plt_limit;
  page.full_bytes = full_bytes;
  page.trace_name = cli::Printable(save.source.input);
  return context.comm().OnRoot([&]() -> Status {
    if (!flags.csv.empty()) SW_TRY(WriteText(context, flags.csv, RowsCsv(rows)));
    if (!flags.page.empty()) SW_TRY(WriteText(context, flags.page, pec::PageText(page)));
    return {};
  });
}

}  // namespace shardwright::apps
