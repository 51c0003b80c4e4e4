#include "moe-replace/tasks.h"

#include <tbb/task_arena.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/outputs.h"
#include "moe-replace/show.h"
#include "moe/node_events.h"
#include "moe/parallel.h"
#include "moe/plan_file.h"
#include "moe/replay.h"
#include "moe/report_page.h"

namespace shardwright::apps {
namespace {

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Runs `body` with the threads that --threads gives.
template <class Body>
auto InArena(cli::Context& context, const Body& body) {
  tbb::task_arena arena(static_cast<int>(context.flags().threads));
  return arena.execute(body);
}

Result<moe::LoadTrace> ReadTrace(cli::Context& context, const MoeFlags& flags) {
  context.sink().Pass("read");
  SW_TRY_ASSIGN(moe::LoadTrace trace, moe::ReadLoads(flags.loads));
  if (context.comm().rank() != 0) return trace;
  context.sink().AddRead(trace.bytes_read, trace.files_read);
  for (const std::string& note : trace.notes) context.sink().Note(note, 0);
  return trace;
}

Result<moe::Loads> PickLater(const moe::LoadTrace& trace, const MoeFlags& flags) {
  SW_TRY_ASSIGN(moe::LoadWindow window, flags.Window());
  window.at = flags.measured_at;
  window.window = 1;
  return moe::Pick(trace, window);
}

/// Without rates nothing could be copied in time, and hecate would silently copy nothing.
Status CheckRates(const MoeFlags& flags, const moe::Cluster& cluster) {
  if (flags.options.hecate.nonmoe_seconds <= 0) return {};
  const bool rates = cluster.device_bytes_per_s > 0 || cluster.node_bytes_per_s > 0;
  if (rates && cluster.param_bytes > 0) return {};
  return Fail(Errc::kUsage, "--nonmoe-seconds needs a --cluster with bandwidth and expert_bytes");
}

Result<MoeInput> ReadLocal(cli::Context& context, const MoeFlags& flags) {
  MoeInput input;
  SW_TRY_ASSIGN(input.trace, ReadTrace(context, flags));
  SW_TRY_ASSIGN(const moe::LoadWindow window, flags.Window());
  SW_TRY_ASSIGN(input.loads, moe::Pick(input.trace, window));
  if (flags.measured_at != MoeFlags::kNoIteration) {
    SW_TRY_ASSIGN(input.later, PickLater(input.trace, flags));
  }
  SW_TRY_ASSIGN(input.cluster, flags.ReadCluster(input.loads.layers));
  SW_TRY(moe::Validate(input.loads));
  SW_TRY(moe::Validate(input.cluster));
  SW_TRY(moe::Validate(input.loads, input.cluster));
  SW_TRY(moe::CheckFaults(flags.faults, input.loads, input.cluster, flags.options.failure_unit));
  SW_TRY(CheckRates(flags, input.cluster));
  if (flags.old_plan.empty()) return input;
  SW_TRY_ASSIGN(moe::PlanFile old, moe::ReadPlan(flags.old_plan));
  auto current = moe::PlacedOn(moe::StateOf(std::move(old)), input.loads, input.cluster);
  if (!current) return Within(flags.old_plan, current.error());
  const Status fits =
      moe::Validate(*current, input.loads, input.cluster, moe::Rules{false, false, 0, false});
  if (!fits) return Within(flags.old_plan, fits.error());
  input.current = *std::move(current);
  return input;
}

Result<std::string> PlanBytes(cli::Context& context, const MoeFlags& flags, const MoeInput& input,
                              const moe::JudgedPlan& plan) {
  if (flags.format == moe::PlanFormat::kPlan) {
    return moe::PlanText(plan, input.loads, input.cluster, flags.options.failure_unit);
  }
  moe::PlanNotes notes;
  SW_TRY_ASSIGN(
      std::string text,
      moe::ForeignPlanText(flags.format, plan.result.placement, input.loads, input.cluster,
                           flags.options.eplb_groups, input.trace.layer_id.size(), &notes));
  for (std::string& note : notes) context.sink().Warn(std::move(note));
  return text;
}

/// Writes the page to look at. What was there before is --old, or one replica of each expert.
Status WriteReport(cli::Context& context, const MoeFlags& flags, const MoeInput& input,
                   const MoeRow& chosen, const std::vector<MoeRow>& rows) {
  moe::ReportPage page;
  page.loads = &input.loads;
  page.cluster = &input.cluster;
  page.plan = &*chosen.plan;
  page.unit = flags.options.failure_unit;
  page.loads_name = flags.loads;
  page.before_name = "vanilla";
  if (input.current) {
    page.before = &*input.current;
    page.before_name = "old plan";
  }
  for (const MoeRow& row : rows) {
    if (row.strategy == "vanilla" && row.plan && page.before == nullptr) {
      page.before = &row.plan->result.placement;
    }
    page.rows.push_back({row.strategy, row.plan ? &*row.plan : nullptr, row.seconds, row.reason});
  }
  return WriteText(context, flags.report, moe::PageText(page));
}

/// The plan that a comparison's page is about: strategies come in their order of merit.
const MoeRow* FirstPlan(const std::vector<MoeRow>& rows) {
  const auto at = std::find_if(rows.begin(), rows.end(),
                               [](const MoeRow& row) { return row.plan.has_value(); });
  return at == rows.end() ? nullptr : &*at;
}

/// Refuses a replay in which not even the whole cluster could hold what is asked.
Status CheckReplay(const MoeFlags& flags, const moe::LoadTrace& trace, moe::Cluster cluster) {
  for (moe::Node& node : cluster.nodes) node.alive = true;
  moe::LoadWindow window;
  if (!flags.layers.empty()) {
    SW_TRY_ASSIGN(window.layers, moe::ParseLayers(flags.layers));
  }
  SW_TRY_ASSIGN(const moe::Loads loads, moe::Pick(trace, window));
  SW_TRY(moe::Validate(loads, cluster));
  SW_TRY(CheckRates(flags, cluster));
  return moe::CheckFaults(flags.faults, loads, cluster, flags.options.failure_unit);
}

}  // namespace

Result<MoeInput> ReadMoeInput(cli::Context& context, const MoeFlags& flags) {
  Result<MoeInput> mine = ReadLocal(context, flags);
  SW_TRY(context.comm().Agree(mine ? Status() : tl::unexpected<Error>(mine.error())));
  return mine;
}

Result<MoeRow> PlanWith(cli::Context& context, const MoeFlags& flags, const MoeInput& input,
                        const moe::Strategy& strategy) {
  MoeRow row;
  row.strategy = strategy.name;
  moe::Options options = flags.options;
  options.seed = context.flags().seed;
  const moe::Placement* current = input.current ? &*input.current : nullptr;
  context.sink().Pass("plan");
  const double start = Seconds();
  auto planned = InArena(context, [&]() {
    return moe::PlanOnRanks(context.comm(), strategy, input.loads, input.cluster, current, options);
  });
  row.seconds = Seconds() - start;
  if (!planned && planned.error().code == Errc::kInfeasible) {
    row.reason = planned.error().message;
    return row;
  }
  if (!planned) return tl::unexpected<Error>(std::move(planned).error());
  context.sink().Pass("measure");
  SW_TRY(context.comm().OnRoot([&]() -> Status {
    return InArena(context, [&]() -> Status {
      SW_TRY_ASSIGN(row.plan,
                    moe::Judge(strategy.name, *std::move(planned), input.loads, input.cluster,
                               current, flags.Judging(context.flags().seed)));
      if (input.later) {
        row.later = moe::Measure(row.plan->result.placement, *input.later, input.cluster);
      }
      return {};
    });
  }));
  return row;
}

Result<std::vector<MoeRow>> PlanWithAll(cli::Context& context, const MoeFlags& flags,
                                        const MoeInput& input) {
  std::vector<MoeRow> rows;
  for (const moe::Strategy& strategy : moe::Strategies()) {
    SW_TRY_ASSIGN(MoeRow row, PlanWith(context, flags, input, strategy));
    rows.push_back(std::move(row));
  }
  return rows;
}

Status RunPlan(cli::Context& context, const MoeFlags& flags) {
  SW_TRY(CheckOutputs(context, {flags.output, flags.report}));
  SW_TRY_ASSIGN(const MoeInput input, ReadMoeInput(context, flags));
  SW_TRY_ASSIGN(const moe::Strategy* strategy, moe::FindStrategy(flags.strategy));
  SW_TRY_ASSIGN(const MoeRow row, PlanWith(context, flags, input, *strategy));
  if (!row.reason.empty()) return Fail(Errc::kInfeasible, row.reason);
  std::vector<MoeRow> others;
  if (!flags.report.empty()) {
    SW_TRY_ASSIGN(others, PlanWithAll(context, flags, input));
  }
  return context.comm().OnRoot([&]() -> Status {
    SW_TRY(moe::CheckSurvives(*row.plan, flags.faults, input.loads, input.cluster,
                              flags.options.failure_unit));
    for (const std::string& warning : row.plan->result.warnings) context.sink().Warn(warning);
    context.sink().Pass("write");
    if (!flags.output.empty()) {
      SW_TRY_ASSIGN(const std::string text, PlanBytes(context, flags, input, *row.plan));
      SW_TRY(WriteText(context, flags.output, text));
    }
    if (!flags.report.empty()) SW_TRY(WriteReport(context, flags, input, row, others));
    ShowPlan(context, flags, input, row);
    return {};
  });
}

Status RunCompare(cli::Context& context, const MoeFlags& flags) {
  SW_TRY(CheckOutputs(context, {flags.output, flags.report}));
  SW_TRY_ASSIGN(const MoeInput input, ReadMoeInput(context, flags));
  SW_TRY_ASSIGN(const std::vector<MoeRow> rows, PlanWithAll(context, flags, input));
  return context.comm().OnRoot([&]() -> Status {
    ShowComparison(context, flags, input, rows);
    const MoeRow* const chosen = FirstPlan(rows);
    if (chosen == nullptr) return Fail(Errc::kInfeasible, "no strategy has a plan");
    if (flags.report.empty()) return {};
    context.sink().Pass("write");
    return WriteReport(context, flags, input, *chosen, rows);
  });
}

Status RunEvents(cli::Context& context, const MoeFlags& flags) {
  Result<moe::LoadTrace> trace = ReadTrace(context, flags);
  std::vector<moe::NodeEvent> events;
  moe::Cluster cluster;
  const auto read = [&]() -> Status {
    if (!trace) return tl::unexpected<Error>(trace.error());
    SW_TRY_ASSIGN(events, moe::ReadNodeEvents(flags.events));
    const std::size_t layers = trace->layer_id.size();
    SW_TRY_ASSIGN(cluster, flags.ReadCluster(static_cast<std::uint32_t>(layers)));
    SW_TRY(moe::Validate(cluster));
    return CheckReplay(flags, *trace, cluster);
  };
  SW_TRY(context.comm().Agree(read()));
  moe::ReplayOptions options;
  options.plan = flags.options;
  options.plan.seed = context.flags().seed;
  SW_TRY_ASSIGN(options.window, flags.Window());
  options.iteration_ms = flags.iteration_seconds * 1e3;
  options.rebalance_every = flags.rebalance_every;
  options.nodes_are_places = flags.short_cluster();
  options.seconds = Seconds;
  std::vector<moe::ReplayResult> results;
  for (const moe::Strategy& strategy : moe::Strategies()) {
    if (!flags.compare && strategy.name != flags.strategy) continue;
    context.sink().Pass("replay");
    SW_TRY_ASSIGN(moe::ReplayResult result, InArena(context, [&]() {
                    return moe::Replay(context.comm(), strategy, *trace, cluster, events, options,
                                       context.sink());
                  }));
    results.push_back(std::move(result));
  }
  ShowReplays(context, flags, cluster, results);
  return {};
}

/// Reads loads and plan, and measures the plan on the loads.
Status Evaluate(cli::Context& context, const MoeFlags& flags, MoeInput* input, MoeRow* row) {
  SW_TRY_ASSIGN(input->trace, ReadTrace(context, flags));
  SW_TRY_ASSIGN(const moe::LoadWindow window, flags.Window());
  SW_TRY_ASSIGN(input->loads, moe::Pick(input->trace, window));
  SW_TRY_ASSIGN(const moe::PlanFile plan, moe::ReadPlan(flags.evaluate));
  if (flags.gives_cluster()) {
    SW_TRY_ASSIGN(input->cluster, flags.ReadCluster(input->loads.layers));
  } else {
    SW_TRY_ASSIGN(input->cluster, moe::ClusterOf(plan));
  }
  SW_TRY(moe::Validate(input->loads, input->cluster));
  if (flags.measured_at != MoeFlags::kNoIteration) {
    SW_TRY_ASSIGN(input->later, PickLater(input->trace, flags));
  }
  auto placed = moe::PlacedOn(plan, input->loads, input->cluster);
  if (!placed) return Within(flags.evaluate, placed.error());
  moe::StrategyResult result;
  result.placement = *std::move(placed);
  if (!plan.owner_slots.empty()) {
    SW_TRY_ASSIGN(result.owners, moe::PlacedOn(moe::StateOf(plan), input->loads, input->cluster));
  }
  // What is copied for an iteration may exceed the slots that hold state.
  moe::Rules rules;
  rules.cluster_slots = !result.owners.has_value();
  const Status fits = moe::Validate(result.placement, input->loads, input->cluster, rules);
  if (!fits) return Fail(Errc::kBadInput, flags.evaluate + ": " + fits.error().message);
  if (result.owners) {
    const Status owned = moe::Validate(*result.owners, input->loads, input->cluster, {});
    if (!owned) return Fail(Errc::kBadInput, flags.evaluate + ": owners: " + owned.error().message);
  }
  context.sink().Pass("measure");
  SW_TRY_ASSIGN(row->plan, moe::Judge(plan.format, std::move(result), input->loads, input->cluster,
                                      nullptr, flags.Judging(context.flags().seed)));
  if (input->later) {
    row->later = moe::Measure(row->plan->result.placement, *input->later, input->cluster);
  }
  row->strategy = plan.format;
  row->file = flags.evaluate;
  return {};
}

Status RunEvaluate(cli::Context& context, const MoeFlags& flags) {
  SW_TRY(CheckOutputs(context, {flags.output, flags.report}));
  return context.comm().OnRoot([&]() -> Status {
    MoeInput input;
    MoeRow row;
    SW_TRY(InArena(context, [&] { return Evaluate(context, flags, &input, &row); }));
    if (!flags.report.empty()) {
      context.sink().Pass("write");
      SW_TRY(WriteReport(context, flags, input, row, {}));
    }
    ShowPlan(context, flags, input, row);
    const std::int64_t certain = row.plan->model_recovery.certain;
    if (certain >= static_cast<std::int64_t>(flags.faults)) return {};
    return Fail(Errc::kMismatch, flags.evaluate + ": survives any " +
                                     std::to_string(std::max<std::int64_t>(certain, 0)) +
                                     " failures, " + std::to_string(flags.faults) + " asked");
  });
}

}  // namespace shardwright::apps
