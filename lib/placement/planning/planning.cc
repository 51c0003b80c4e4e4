// SPDX-License-Identifier: Apache-2.0
#include "placement/planning/planning.h"

#include <algorithm>
#include <chrono>
#include <string_view>
#include <utility>

#include "placement/core/layer_groups.h"
#include "placement/core/parallel.h"
#include "placement/io/cluster_text.h"
#include "placement/io/plan_file.h"
#include "placement/planning/everywhere.h"
#include "placement/planning/plan_cost.h"
#include "placement/planning/planning_internal.h"
#include "support/base/bytes.h"
#include "support/base/limits.h"
#include "support/base/stop.h"
#include "support/base/text.h"

namespace shardwright::placement {

Result<token_counts::TokenTrace> internal::ReadTrace(const std::string& path, bool counts,
                                                     std::uint64_t* idle_records, Sink& sink) {
  sink.Pass("read");
  SW_TRY_ASSIGN(token_counts::TokenTrace trace, token_counts::ReadUnevenLoads(path));
  const std::size_t records = trace.records.size();
  const std::vector<std::uint64_t> idle = token_counts::RemoveIdle(&trace);
  *idle_records += idle.size();
  if (!counts) return trace;
  sink.AddRead(trace.bytes_read, trace.files_read);
  for (const std::string& note : trace.notes) sink.Note(note, 0);
  for (const std::string& warning : trace.warnings) sink.Warn(warning);
  if (!idle.empty()) {
    sink.Note(StrCat(path, ": ", idle.size(), " of ", Plural(records, "record"),
                     " have no tokens and are ignored: iteration ", token_counts::Ranges(idle)),
              0);
  }
  return trace;
}

Status internal::CheckRates(const PlanRequest& request, const Cluster& cluster) {
  SW_TRY(CheckCost(request.cost, cluster));
  if (request.options.hecate.nonmoe_seconds <= 0) return {};
  const bool rates = cluster.device_bytes_per_s > 0 || cluster.node_bytes_per_s > 0;
  if (rates && cluster.param_bytes > 0) return {};
  return Fail(
      Errc::kUsage,
      "--nonmoe-seconds requires bandwidths and the size of an expert: pass --gpu-bandwidth, "
      "--node-bandwidth and --expert-bytes, or a --cluster with bandwidth and expert_bytes");
}

namespace {

using internal::CheckRates;
using internal::InArena;
using internal::ReadTrace;

/// Notes the default window of joined recordings, if it is not that of the first recording.
void NoteDefaultWindows(const std::vector<token_counts::Recording>& recordings, Sink& sink) {
  for (const token_counts::Recording& joined : recordings) {
    if (joined.trace.serving == recordings.front().trace.serving) continue;
    sink.Note(StrCat(joined.trace.path, ": ",
                     joined.trace.serving ? "the whole recording is" : "the newest iteration is",
                     " added, as is the default for this format; --window chooses a part of all "
                     "recordings"),
              0);
  }
}

/// Reads the recordings of a request, and picks the token counts for planning and those for
/// measuring balance.
Status ReadRecordings(const PlanRequest& request, bool counts, PlanInput* input, Sink& sink) {
  SW_TRY_ASSIGN(token_counts::TokenTrace main,
                ReadTrace(request.loads, counts, &input->idle_records, sink));
  input->recordings.push_back({std::move(main), 1});
  for (const JoinedLoads& joined : request.joined) {
    SW_TRY_ASSIGN(token_counts::TokenTrace other,
                  ReadTrace(joined.path, counts, &input->idle_records, sink));
    input->recordings.push_back({std::move(other), joined.weight});
  }
  SW_TRY_ASSIGN(input->loads, token_counts::Pick(input->recordings, request.window));
  if (counts && request.window.windows.empty()) NoteDefaultWindows(input->recordings, sink);
  const std::vector<std::uint64_t> empty = input->EmptyLayers();
  if (counts && !empty.empty()) {
    sink.Note(StrCat("layers without tokens: ", token_counts::Ranges(empty),
                     "; all experts of such a layer get equal counts"),
              0);
  }
  if (!request.measured_at) return {};
  token_counts::LoadWindow later;
  later.layers = request.window.layers;
  later.at = request.measured_at;
  later.windows = {1};
  SW_TRY_ASSIGN(input->later, token_counts::Pick(input->recordings.front().trace, later));
  return {};
}

/// Reads the file of --affinity, if there is one.
Status ReadTransitions(const PlanRequest& request, PlanInput* input) {
  if (request.affinity.empty()) return {};
  const token_counts::TokenTrace& trace = input->recordings.front().trace;
  if (!trace.layer_experts.empty()) {
    return Fail(Errc::kUnsupported, request.loads,
                ": --affinity requires the same number of experts in all layers of the file");
  }
  SW_TRY_ASSIGN(input->affinity, ReadAffinity(request.affinity, trace.layer_id,
                                              input->loads.layer_id, input->loads.experts));
  return {};
}

/// Returns the limit of moves as a number of replicas.
/// \error kUsage  bytes without the size of an expert, or a limit below one replica
Result<std::optional<std::uint64_t>> MovesMax(const MovesLimit& limit, const TokenCounts& loads,
                                              const Cluster& cluster) {
  if (!limit.given()) return std::optional<std::uint64_t>();
  SW_TRY(token_counts::RequireEqualExperts(loads, "--max-moves"));
  if (limit.replicas) return limit.replicas;
  if (limit.share) {
    const double slots = static_cast<double>(cluster.live_slots()) * loads.layers;
    const auto replicas = static_cast<std::uint64_t>(*limit.share * slots);
    if (replicas > 0) return std::optional(replicas);
    return Fail(Errc::kUsage, "--max-moves ", Percent(*limit.share, 2), " of ", Fixed(slots, 0),
                " slots is less than one replica");
  }
  if (cluster.expert_bytes == 0) {
    return Fail(Errc::kUsage, "--max-moves ", FormatBytes(*limit.bytes),
                " requires the size of an expert: pass --expert-bytes, or set expert_bytes in the "
                "file of --cluster");
  }
  if (*limit.bytes >= cluster.expert_bytes) {
    return std::optional(*limit.bytes / cluster.expert_bytes);
  }
  return Fail(Errc::kUsage, "--max-moves ", FormatBytes(*limit.bytes),
              " is less than one expert: ", FormatBytes(cluster.expert_bytes));
}

Result<PlanInput> ReadLocal(const PlanRequest& request, bool counts, Sink& sink) {
  PlanInput input;
  SW_TRY(ReadRecordings(request, counts, &input, sink));
  SW_TRY_ASSIGN(input.cluster, ClusterOf(request.cluster, input.loads.layers));
  SW_TRY(token_counts::Validate(input.loads));
  SW_TRY(Validate(input.cluster));
  SW_TRY(Validate(input.loads, input.cluster));
  SW_TRY(Validate(request.options.pins, input.loads, input.cluster));
  SW_TRY(CheckFaults(request.faults, input.loads, input.cluster, request.options.failure_unit));
  SW_TRY(CheckRates(request, input.cluster));
  SW_TRY(ReadTransitions(request, &input));
  if (request.old_plan.empty()) return input;
  SW_TRY_ASSIGN(input.moves_max, MovesMax(request.max_moves, input.loads, input.cluster));
  SW_TRY_ASSIGN(PlanFile old, ReadPlan(request.old_plan));
  auto current =
      PlacedOn(StateOf(std::move(old)), input.loads, input.cluster, input.RecordedLayers());
  if (!current) return Within(request.old_plan, current.error());
  const Status fits = Validate(*current, input.loads, input.cluster, Rules{false, false, 0, false});
  if (!fits) return Within(request.old_plan, fits.error());
  input.current = *std::move(current);
  return input;
}

/// Computes the cost with which all plans are compared.
Status AddVanilla(const PlanRequest& request, PlanInput* input, Sink& sink) {
  return InArena(request.threads, [&]() -> Status {
    SW_TRY_ASSIGN(input->vanilla, VanillaCost(request, *input, StopOf(sink)));
    return {};
  });
}

/// Verifies that a plan from a file fits counts and cluster, and measures it.
Status Measured(const PlanRequest& request, const PlanFile& plan, const std::string& file,
                EvaluatedPlan* answer, Sink& sink) {
  const PlanInput& input = answer->input;
  PlannedRow& row = answer->row;
  auto placed = PlacedOn(plan, input.loads, input.cluster, input.RecordedLayers());
  if (!placed) return Within(file, placed.error());
  StrategyResult result;
  result.placement = *std::move(placed);
  if (!plan.owner_slots.empty()) {
    SW_TRY_ASSIGN(result.owners,
                  PlacedOn(StateOf(plan), input.loads, input.cluster, input.RecordedLayers()));
  }
  // Copies for one iteration may exceed the slots for state.
  Rules rules;
  rules.cluster_slots = !result.owners.has_value();
  const Status fits = Validate(result.placement, input.loads, input.cluster, rules);
  if (!fits) return Fail(Errc::kBadInput, file, ": ", fits.error().message);
  if (result.owners) {
    const Status owned = Validate(*result.owners, input.loads, input.cluster, {});
    if (!owned) return Fail(Errc::kBadInput, file, ": owners: ", owned.error().message);
  }
  sink.Pass("measure");
  SW_TRY_ASSIGN(row.plan, VerifyPlan(plan.format, std::move(result), input.loads, input.cluster,
                                     nullptr, request.Judging(sink)));
  if (input.later) row.later = Measure(row.plan->result.placement, *input.later, input.cluster);
  if (input.affinity) {
    row.affinity = PlannedTransitions{
        {}, MeasureTransitions(*input.affinity, row.plan->result.placement, input.cluster)};
  }
  SW_TRY_ASSIGN(row.cost, CostOf(request, input, row.plan->result, StopOf(sink)));
  row.strategy = plan.format;
  row.file = file;
  return {};
}

}  // namespace

double ClockSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Result<Cluster> ClusterOf(const ClusterRequest& request, std::uint32_t layers) {
  if (!request.file.empty()) return ReadCluster(request.file, layers);
  const std::uint64_t gpus = request.nodes * request.gpus;
  if (request.slots > limits::kMoeSlots / gpus) {
    return Fail(Errc::kLimit, gpus, " gpus of ", request.slots, " slots: more than ",
                limits::kMoeSlots, " slots");
  }
  Cluster made = UniformCluster(static_cast<std::uint32_t>(request.nodes),
                                static_cast<std::uint32_t>(request.gpus),
                                static_cast<std::uint32_t>(request.slots));
  made.expert_bytes = request.expert_bytes;
  // Mixed precision with Adam stores 14 bytes per parameter, 2 of which are the weight.
  made.param_bytes = request.expert_bytes / 7;
  made.device_bytes_per_s = static_cast<double>(request.gpu_bytes_per_s);
  made.node_bytes_per_s = static_cast<double>(request.node_bytes_per_s);
  return made;
}

std::vector<std::uint64_t> PlanInput::EmptyLayers() const {
  std::vector<std::uint64_t> empty;
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    const auto tokens = loads.layer(l);
    const bool any = std::any_of(tokens.begin(), tokens.end(), [](auto t) { return t > 0; });
    if (!any) empty.push_back(loads.layer_id[l]);
  }
  return empty;
}

VerifyOptions PlanRequest::Judging(const Sink& sink) const {
  VerifyOptions judging;
  judging.stop = StopOf(sink);
  judging.unit = options.failure_unit;
  judging.recovery.failures_max = static_cast<std::uint32_t>(failures);
  judging.recovery.seed = options.seed;
  judging.forward = forward;
  judging.pins = options.pins;
  return judging;
}

Result<PlanInput> ReadPlanInput(comm::Comm& comm, const PlanRequest& request, Sink& sink) {
  const Interruptible reading(sink);
  SW_TRY_ASSIGN(PlanInput input, comm.Agree(ReadLocal(request, comm.rank() == 0, sink)));
  SW_TRY(comm.OnRoot([&] { return AddVanilla(request, &input, sink); }));
  return input;
}

namespace {

/// Returns the GPUs that may be exchanged without breaking a constraint of the request.
ExchangeScope ScopeOf(const PlanRequest& request) {
  const Options& options = request.options;
  if (!options.pins.empty()) return ExchangeScope::kInNodes;
  const bool grouped = options.eplb_groups > 1 && options.eplb_policy != EplbPolicy::kGlobal;
  return grouped || request.faults > 0 ? ExchangeScope::kNodes : ExchangeScope::kCluster;
}

/// Returns the transitions of a plan, and arranges it first if its strategy supports this.
std::optional<PlannedTransitions> Arrange(const PlanRequest& request, const PlanInput& input,
                                          const Strategy& strategy, const StopCheck& stop,
                                          StrategyResult* result) {
  if (!input.affinity) return std::nullopt;
  PlannedTransitions transitions;
  const auto measured = [&] {
    return MeasureTransitions(*input.affinity, result->placement, input.cluster);
  };
  const Objective objective = request.options.objective.value_or(Objective::kBalance);
  if (strategy.name == "best" && objective == Objective::kBalance) {
    transitions.before = measured();
    result->placement = ArrangeForAffinity(*input.affinity, result->placement, input.cluster,
                                           {ScopeOf(request), request.options.failure_unit, stop});
  }
  transitions.after = measured();
  return transitions;
}

/// Extends an infeasible result: its numbers of experts and slots are those of the rest.
template <class Planned>
Planned WithRest(const PlanRequest& request, Planned planned) {
  if (planned || planned.error().code != Errc::kInfeasible) return planned;
  Error error = std::move(planned).error();
  if (error.message.find("--everywhere") != std::string::npos) return tl::unexpected(error);
  error.message += StrCat(" (not counting the experts of --everywhere, which take ",
                          Plural(request.everywhere.size(), "slot"), " of every gpu)");
  return tl::unexpected<Error>(std::move(error));
}

/// Plans the experts that are not on every GPU.
/// \param current  placement of all experts
Result<StrategyResult> PlanRestOnRanks(comm::Comm& comm, const PlanRequest& request,
                                       const TokenCounts& loads, const Cluster& cluster,
                                       const Strategy& strategy, const Placement* current,
                                       Options options) {
  SW_TRY_ASSIGN(const PlanRest rest,
                WithoutEverywhere(loads, cluster, current, request.everywhere));
  SW_TRY(WithRest(request, Validate(rest.loads, rest.cluster)));
  SW_TRY_ASSIGN(options.pins, PinsOfRest(options.pins, request.everywhere));
  options.expert_names = rest.names;
  if (options.eplb_policy == EplbPolicy::kGlobal) options.eplb_groups = 1;
  options.expert_group = GroupsOfRest(loads.experts, options.eplb_groups, rest.names);
  if (options.moves_max) {
    if (rest.moves > *options.moves_max) {
      return Fail(Errc::kInfeasible, "at most ", *options.moves_max,
                  " moves are allowed, but gpus lack ", rest.moves,
                  " replicas of the experts of --everywhere; raise --max-moves");
    }
    *options.moves_max -= rest.moves;
  }
  SW_TRY_ASSIGN(StrategyResult result,
                WithRest(request, PlanOnRanks(comm, strategy, rest.loads, rest.cluster,
                                              rest.current ? &*rest.current : nullptr, options)));
  SW_TRY(AddEverywhere(rest, loads, cluster, current, request.everywhere, &result));
  return result;
}

}  // namespace

Result<PlannedRow> PlanWith(comm::Comm& comm, const PlanRequest& request, const PlanInput& input,
                            const Strategy& strategy, Sink& sink) {
  PlannedRow row;
  row.strategy = strategy.name;
  if (!request.options.pins.empty() && strategy.name != "best") {
    row.reason = "does not support --pin";
    return row;
  }
  const Placement* current = input.current ? &*input.current : nullptr;
  sink.Pass("plan");
  const double start = ClockSeconds();
  const Interruptible planning(sink);
  Options options = request.options;
  options.stop = StopOf(sink);
  options.moves_max = input.moves_max;
  const Cluster& cluster = input.cluster;
  const GroupPlan plan = [&](const TokenCounts& loads, const Placement* held) {
    return request.everywhere.empty()
               ? PlanOnRanks(comm, strategy, loads, cluster, held, options)
               : PlanRestOnRanks(comm, request, loads, cluster, strategy, held, options);
  };
  auto planned =
      InArena(request.threads, [&]() { return PlanEachSize(input.loads, current, plan); });
  row.seconds = ClockSeconds() - start;
  if (!planned && planned.error().code == Errc::kInfeasible) {
    row.reason = planned.error().message;
    return row;
  }
  if (!planned) return tl::unexpected<Error>(std::move(planned).error());
  sink.Pass("measure");
  SW_TRY(comm.OnRoot([&]() -> Status {
    return InArena(request.threads, [&]() -> Status {
      const double arranging = ClockSeconds();
      row.affinity = Arrange(request, input, strategy, options.stop, &*planned);
      row.seconds += ClockSeconds() - arranging;
      SW_TRY(CheckStop(options.stop));
      SW_TRY_ASSIGN(row.plan, VerifyPlan(strategy.name, *std::move(planned), input.loads,
                                         input.cluster, current, request.Judging(sink)));
      if (input.later) row.later = Measure(row.plan->result.placement, *input.later, input.cluster);
      SW_TRY_ASSIGN(row.cost, CostOf(request, input, row.plan->result, options.stop));
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

namespace {

/// Returns true if a file is a plan with all experts in each layer. A matrix of token counts can be
/// read as a plan too, but lacks experts.
bool IsWholePlan(const std::string& path) {
  const Result<PlanFile> plan = ReadPlan(path);
  if (!plan) return false;
  for (std::size_t l = 0; l < plan->slots.size(); ++l) {
    std::vector<bool> found(plan->experts, false);
    for (const std::int32_t expert : plan->slots[l]) {
      if (expert != kNoExpert) found[static_cast<std::size_t>(expert)] = true;
    }
    if (std::ranges::count(found, true) < std::ptrdiff_t{plan->ExpertsOf(l)}) return false;
  }
  return true;
}

/// Extends the error about the files of an evaluation, if they seem to be swapped.
tl::unexpected<Error> WithOrder(const PlanRequest& request, const std::string& plan_file,
                                Error error) {
  if (error.code == Errc::kBadInput && IsWholePlan(request.loads) &&
      token_counts::ReadLoads(plan_file)) {
    error.message +=
        StrCat("; ", request.loads, " is a plan; the arguments may be swapped: pass PLAN first");
  }
  return tl::unexpected<Error>(std::move(error));
}

}  // namespace

Result<EvaluatedPlan> EvaluatePlan(const PlanRequest& request, const std::string& plan_file,
                                   Sink& sink) {
  const Interruptible evaluating(sink);
  EvaluatedPlan answer;
  PlanInput& input = answer.input;
  const Status counts = ReadRecordings(request, true, &input, sink);
  const Result<PlanFile> read = ReadPlan(plan_file);
  if (!counts || !read) {
    return WithOrder(request, plan_file, counts ? read.error() : counts.error());
  }
  const PlanFile& plan = *read;
  if (request.cluster.told()) {
    SW_TRY_ASSIGN(input.cluster, ClusterOf(request.cluster, input.loads.layers));
  } else {
    SW_TRY_ASSIGN(input.cluster, ClusterOf(plan));
  }
  SW_TRY(Validate(input.loads, input.cluster));
  SW_TRY(CheckRates(request, input.cluster));
  SW_TRY(ReadTransitions(request, &input));
  SW_TRY(AddVanilla(request, &input, sink));
  SW_TRY(
      InArena(request.threads, [&] { return Measured(request, plan, plan_file, &answer, sink); }));
  return answer;
}

Status CheckEvaluated(const PlanRequest& request, const PlannedRow& row) {
  const std::int64_t certain = row.plan->model_recovery.certain;
  if (certain >= static_cast<std::int64_t>(request.faults)) return {};
  return Fail(Errc::kMismatch, row.file, ": survives any ",
              Plural(static_cast<std::uint64_t>(std::max<std::int64_t>(certain, 0)), "failure"),
              ", but --faults is ", request.faults);
}

Result<std::string> PlanBytes(PlanFormat format, const PlanRequest& request, const PlanInput& input,
                              const VerifiedPlan& plan, Sink& sink) {
  const Interruptible making(sink);
  if (format == PlanFormat::kPlan) {
    return PlanText(plan, input.loads, input.cluster, request.options.failure_unit);
  }
  PlanNotes notes;
  SW_TRY_ASSIGN(std::string text,
                ForeignPlanText(format, plan.result.placement, input.loads, input.cluster,
                                request.options.eplb_groups, input.RecordedLayers(), &notes));
  for (std::string& note : notes) sink.Warn(std::move(note));
  return text;
}

const PlannedRow* FirstPlan(const std::vector<PlannedRow>& rows) {
  const auto at = std::find_if(rows.begin(), rows.end(),
                               [](const PlannedRow& row) { return row.plan.has_value(); });
  return at == rows.end() ? nullptr : &*at;
}

}  // namespace shardwright::placement
