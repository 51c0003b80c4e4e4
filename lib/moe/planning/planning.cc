#include "moe/planning/planning.h"

#include <tbb/task_arena.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/limits.h"
#include "moe/core/node_events.h"
#include "moe/core/parallel.h"
#include "moe/io/cluster_text.h"
#include "moe/io/plan_file.h"
#include "moe/io/report_page.h"

namespace shardwright::moe {
namespace {

double ClockSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Runs `body` with so many threads.
template <class Body>
auto InArena(unsigned threads, const Body& body) {
  tbb::task_arena arena(static_cast<int>(threads));
  return arena.execute(body);
}

/// \param counts  whether this rank's reading is reported
Result<loads::LoadTrace> ReadTrace(const PlanRequest& request, bool counts, Sink& sink) {
  sink.Pass("read");
  SW_TRY_ASSIGN(loads::LoadTrace trace, loads::ReadLoads(request.loads));
  if (!counts) return trace;
  sink.AddRead(trace.bytes_read, trace.files_read);
  for (const std::string& note : trace.notes) sink.Note(note, 0);
  return trace;
}

/// The loads that plans are made for, and those that they are measured on.
Status PickLoads(const PlanRequest& request, PlanInput* input) {
  SW_TRY_ASSIGN(input->loads, loads::Pick(input->trace, request.window));
  if (!request.measured_at) return {};
  loads::LoadWindow later = request.window;
  later.at = request.measured_at;
  later.window = 1;
  SW_TRY_ASSIGN(input->later, loads::Pick(input->trace, later));
  return {};
}

/// Without rates nothing could be copied in time, and hecate would silently copy nothing.
Status CheckRates(const PlanRequest& request, const Cluster& cluster) {
  if (request.options.hecate.nonmoe_seconds <= 0) return {};
  const bool rates = cluster.device_bytes_per_s > 0 || cluster.node_bytes_per_s > 0;
  if (rates && cluster.param_bytes > 0) return {};
  return Fail(Errc::kUsage, "--nonmoe-seconds needs a --cluster with bandwidth and expert_bytes");
}

Result<PlanInput> ReadLocal(const PlanRequest& request, bool counts, Sink& sink) {
  PlanInput input;
  SW_TRY_ASSIGN(input.trace, ReadTrace(request, counts, sink));
  SW_TRY(PickLoads(request, &input));
  SW_TRY_ASSIGN(input.cluster, ClusterOf(request.cluster, input.loads.layers));
  SW_TRY(loads::Validate(input.loads));
  SW_TRY(Validate(input.cluster));
  SW_TRY(Validate(input.loads, input.cluster));
  SW_TRY(CheckFaults(request.faults, input.loads, input.cluster, request.options.failure_unit));
  SW_TRY(CheckRates(request, input.cluster));
  if (request.old_plan.empty()) return input;
  SW_TRY_ASSIGN(PlanFile old, ReadPlan(request.old_plan));
  auto current = PlacedOn(StateOf(std::move(old)), input.loads, input.cluster);
  if (!current) return Within(request.old_plan, current.error());
  const Status fits = Validate(*current, input.loads, input.cluster, Rules{false, false, 0, false});
  if (!fits) return Within(request.old_plan, fits.error());
  input.current = *std::move(current);
  return input;
}

/// Refuses a replay in which not even the whole cluster could hold what is asked.
Status CheckReplay(const PlanRequest& request, const loads::LoadTrace& trace, Cluster cluster) {
  for (Node& node : cluster.nodes) node.alive = true;
  loads::LoadWindow window;
  window.layers = request.window.layers;
  SW_TRY_ASSIGN(const Loads loads, loads::Pick(trace, window));
  SW_TRY(Validate(loads, cluster));
  SW_TRY(CheckRates(request, cluster));
  return CheckFaults(request.faults, loads, cluster, request.options.failure_unit);
}

/// Proves that a plan that was read fits what it was read for, and measures it.
Status Measured(const PlanRequest& request, const PlanFile& plan, const std::string& file,
                EvaluatedPlan* answer, Sink& sink) {
  const PlanInput& input = answer->input;
  PlannedRow& row = answer->row;
  auto placed = PlacedOn(plan, input.loads, input.cluster);
  if (!placed) return Within(file, placed.error());
  StrategyResult result;
  result.placement = *std::move(placed);
  if (!plan.owner_slots.empty()) {
    SW_TRY_ASSIGN(result.owners, PlacedOn(StateOf(plan), input.loads, input.cluster));
  }
  // What is copied for an iteration may exceed the slots that hold state.
  Rules rules;
  rules.cluster_slots = !result.owners.has_value();
  const Status fits = Validate(result.placement, input.loads, input.cluster, rules);
  if (!fits) return Fail(Errc::kBadInput, file + ": " + fits.error().message);
  if (result.owners) {
    const Status owned = Validate(*result.owners, input.loads, input.cluster, {});
    if (!owned) return Fail(Errc::kBadInput, file + ": owners: " + owned.error().message);
  }
  sink.Pass("measure");
  SW_TRY_ASSIGN(row.plan, Judge(plan.format, std::move(result), input.loads, input.cluster, nullptr,
                                request.Judging()));
  if (input.later) row.later = Measure(row.plan->result.placement, *input.later, input.cluster);
  row.strategy = plan.format;
  row.file = file;
  return {};
}

}  // namespace

Result<Cluster> ClusterOf(const ClusterRequest& request, std::uint32_t layers) {
  if (!request.file.empty()) return ReadCluster(request.file, layers);
  const std::uint64_t gpus = request.nodes * request.gpus;
  if (request.slots > limits::kMoeSlots / gpus) {
    return Fail(Errc::kLimit, std::to_string(gpus) + " gpus of " + std::to_string(request.slots) +
                                  " slots: more than " + std::to_string(limits::kMoeSlots) +
                                  " slots");
  }
  Cluster made = UniformCluster(static_cast<std::uint32_t>(request.nodes),
                                static_cast<std::uint32_t>(request.gpus),
                                static_cast<std::uint32_t>(request.slots));
  made.expert_bytes = request.expert_bytes;
  // Mixed precision with Adam keeps 14 bytes of a parameter, 2 of which are the weight.
  made.param_bytes = request.expert_bytes / 7;
  return made;
}

JudgeOptions PlanRequest::Judging() const {
  JudgeOptions judging;
  judging.unit = options.failure_unit;
  judging.recovery.failures_max = static_cast<std::uint32_t>(failures);
  judging.recovery.seed = options.seed;
  judging.forward = forward;
  return judging;
}

Result<PlanInput> ReadPlanInput(comm::Comm& comm, const PlanRequest& request, Sink& sink) {
  return comm.Agree(ReadLocal(request, comm.rank() == 0, sink));
}

Result<PlannedRow> PlanWith(comm::Comm& comm, const PlanRequest& request, const PlanInput& input,
                            const Strategy& strategy, Sink& sink) {
  PlannedRow row;
  row.strategy = strategy.name;
  const Placement* current = input.current ? &*input.current : nullptr;
  sink.Pass("plan");
  const double start = ClockSeconds();
  auto planned = InArena(request.threads, [&]() {
    return PlanOnRanks(comm, strategy, input.loads, input.cluster, current, request.options);
  });
  row.seconds = ClockSeconds() - start;
  if (!planned && planned.error().code == Errc::kInfeasible) {
    row.reason = planned.error().message;
    return row;
  }
  if (!planned) return tl::unexpected<Error>(std::move(planned).error());
  sink.Pass("measure");
  SW_TRY(comm.OnRoot([&]() -> Status {
    return InArena(request.threads, [&]() -> Status {
      SW_TRY_ASSIGN(row.plan, Judge(strategy.name, *std::move(planned), input.loads, input.cluster,
                                    current, request.Judging()));
      if (input.later) row.later = Measure(row.plan->result.placement, *input.later, input.cluster);
      return {};
    });
  }));
  return row;
}

Result<std::vector<PlannedRow>> PlanWithAll(comm::Comm& comm, const PlanRequest& request,
                                            const PlanInput& input, Sink& sink) {
  std::vector<PlannedRow> rows;
  for (const Strategy& strategy : Strategies()) {
    SW_TRY_ASSIGN(PlannedRow row, PlanWith(comm, request, input, strategy, sink));
    rows.push_back(std::move(row));
  }
  return rows;
}

Result<EvaluatedPlan> EvaluatePlan(const PlanRequest& request, const std::string& plan_file,
                                   Sink& sink) {
  EvaluatedPlan answer;
  PlanInput& input = answer.input;
  SW_TRY_ASSIGN(input.trace, ReadTrace(request, true, sink));
  SW_TRY(PickLoads(request, &input));
  SW_TRY_ASSIGN(const PlanFile plan, ReadPlan(plan_file));
  if (request.cluster.told()) {
    SW_TRY_ASSIGN(input.cluster, ClusterOf(request.cluster, input.loads.layers));
  } else {
    SW_TRY_ASSIGN(input.cluster, ClusterOf(plan));
  }
  SW_TRY(Validate(input.loads, input.cluster));
  SW_TRY(
      InArena(request.threads, [&] { return Measured(request, plan, plan_file, &answer, sink); }));
  return answer;
}

Status CheckEvaluated(const PlanRequest& request, const PlannedRow& row) {
  const std::int64_t certain = row.plan->model_recovery.certain;
  if (certain >= static_cast<std::int64_t>(request.faults)) return {};
  return Fail(Errc::kMismatch, row.file + ": survives any " +
                                   std::to_string(std::max<std::int64_t>(certain, 0)) +
                                   " failures, " + std::to_string(request.faults) + " asked");
}

Result<std::string> PlanBytes(PlanFormat format, const PlanRequest& request, const PlanInput& input,
                              const JudgedPlan& plan, Sink& sink) {
  if (format == PlanFormat::kPlan) {
    return PlanText(plan, input.loads, input.cluster, request.options.failure_unit);
  }
  PlanNotes notes;
  SW_TRY_ASSIGN(std::string text,
                ForeignPlanText(format, plan.result.placement, input.loads, input.cluster,
                                request.options.eplb_groups, input.trace.layer_id.size(), &notes));
  for (std::string& note : notes) sink.Warn(std::move(note));
  return text;
}

std::string PlanPage(const PlanRequest& request, const PlanInput& input, const PlannedRow& chosen,
                     const std::vector<PlannedRow>& rows) {
  ReportPage page;
  page.loads = &input.loads;
  page.cluster = &input.cluster;
  page.plan = &*chosen.plan;
  page.unit = request.options.failure_unit;
  page.loads_name = request.loads;
  page.before_name = "vanilla";
  if (input.current) {
    page.before = &*input.current;
    page.before_name = "old plan";
  }
  for (const PlannedRow& row : rows) {
    if (row.strategy == "vanilla" && row.plan && page.before == nullptr) {
      page.before = &row.plan->result.placement;
    }
    page.rows.push_back({row.strategy, row.plan ? &*row.plan : nullptr, row.seconds, row.reason});
  }
  return PageText(page);
}

const PlannedRow* FirstPlan(const std::vector<PlannedRow>& rows) {
  const auto at = std::find_if(rows.begin(), rows.end(),
                               [](const PlannedRow& row) { return row.plan.has_value(); });
  return at == rows.end() ? nullptr : &*at;
}

Result<Replays> ReplayEvents(comm::Comm& comm, const PlanRequest& request,
                             const EventsRequest& events, Sink& sink) {
  Replays replays;
  Result<loads::LoadTrace> trace = ReadTrace(request, comm.rank() == 0, sink);
  std::vector<NodeEvent> moments;
  const auto read = [&]() -> Status {
    if (!trace) return tl::unexpected<Error>(trace.error());
    SW_TRY_ASSIGN(moments, ReadNodeEvents(events.events));
    const std::size_t layers = trace->layer_id.size();
    SW_TRY_ASSIGN(replays.cluster, ClusterOf(request.cluster, static_cast<std::uint32_t>(layers)));
    SW_TRY(Validate(replays.cluster));
    return CheckReplay(request, *trace, replays.cluster);
  };
  SW_TRY(comm.Agree(read()));
  ReplayOptions options;
  options.plan = request.options;
  options.window = request.window;
  options.iteration_ms = events.iteration_seconds * 1e3;
  options.rebalance_every = events.rebalance_every;
  // Nodes that are told by a number are places without names of their own.
  options.nodes_are_places = request.cluster.file.empty();
  options.seconds = ClockSeconds;
  for (const Strategy& strategy : Strategies()) {
    if (!events.strategy.empty() && strategy.name != events.strategy) continue;
    sink.Pass("replay");
    SW_TRY_ASSIGN(ReplayResult result, InArena(request.threads, [&]() {
                    return Replay(comm, strategy, *trace, replays.cluster, moments, options, sink);
                  }));
    replays.results.push_back(std::move(result));
  }
  return replays;
}

}  // namespace shardwright::moe
