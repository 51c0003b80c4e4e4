// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/plan.h"

#include <algorithm>
#include <utility>

#include "partial/planner/forecast/extra_capacity.h"
#include "partial/planner/forecast/overhead.h"
#include "partial/planner/forecast/records.h"
#include "partial/planner/forecast/replay_costs.h"
#include "partial/planner/forecast/simulate.h"
#include "partial/select/lost_tokens.h"
#include "partial/store/token_log.h"
#include "support/base/bytes.h"
#include "support/base/checked.h"
#include "support/base/stop.h"
#include "token_counts/trace.h"

namespace shardwright::partial {
namespace {

constexpr std::uint64_t kMostWorkers = 16'384;

/// Returns the total token counts of all records after an iteration.
Result<Counts> TokensAfter(const token_counts::TokenTrace& trace, std::uint64_t iteration) {
  SW_TRY_ASSIGN(const std::vector<Counts> tables, CountsOfTrace(trace));
  LevelState sum = MakeLevelState(LayerExperts(trace.layer_id.size(), trace.experts), 1);
  for (std::size_t i = 0; i < tables.size(); ++i) {
    if (trace.records[i].iteration > iteration) SW_TRY(CountTokens(&sum, tables[i]));
  }
  return std::move(sum.tokens);
}

/// Sets the state of both levels from the store, plus the tokens of the trace since then.
Status StartFromStore(const Job& job, const std::string& tokens_path,
                      const std::optional<token_counts::TokenTrace>& trace,
                      CheckpointPlanInput* input) {
  SelectionState state = job.state;
  input->iteration = job.newest->iteration;
  if (trace) {
    const std::uint64_t last = trace->records.back().iteration;
    const std::uint64_t first = state.counted_to.value_or(job.newest->iteration);
    if (last < first) {
      return Fail(Errc::kUsage, tokens_path, ": ends at iteration ", last, ", but the store is at ",
                  first);
    }
    SW_TRY(CountUpTo(*trace, tokens_path, last, job.experts(), &state));
    SW_TRY_ASSIGN(input->between, TokensAfter(*trace, job.newest->iteration));
    input->iteration = std::max(input->iteration, last);
  }
  input->counted = state.counted_to.has_value();
  input->snapshot = std::move(state.snapshot);
  input->persist = std::move(state.persist);
  return {};
}

Status StartFromNothing(const Job& job, const SelectionOptions& options,
                        const std::optional<token_counts::TokenTrace>& trace,
                        CheckpointPlanInput* input) {
  input->snapshot = MakeLevelState(job.experts(), options.k_snapshot);
  input->persist = MakeLevelState(job.experts(), options.k_persist);
  input->counted = trace.has_value();
  if (!trace) return {};
  SW_TRY_ASSIGN(input->between, TokensAfter(*trace, 0));
  SW_TRY(CountTokens(&input->snapshot, input->between));
  return CountTokens(&input->persist, input->between);
}

bool IsBudget(Policy policy) {
  return policy == Policy::kBudget || policy == Policy::kBudgetGlobal;
}

bool NeedsTokens(Policy policy) { return policy == Policy::kLoadAware || IsBudget(policy); }

Result<SelectionOptions> OptionsOf(const PlanAnswer& answer, Sink& sink,
                                   std::uint64_t* stall_bytes) {
  const PlanRequest& request = answer.request;
  const Job& job = answer.job;
  SelectionOptions options;
  const std::uint32_t most = job.most_experts();
  options.policy = request.policy;
  options.k_snapshot = static_cast<std::uint32_t>(std::min<std::uint64_t>(request.k, most));
  if (request.k > most) {
    sink.Warn(StrCat("--k ", request.k, " is above the ", most,
                     " experts of a layer; all experts are saved"));
  }
  options.k_persist = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(request.k_persist.value_or(request.k), options.k_snapshot));
  if (request.policy == Policy::kFull) options.k_snapshot = options.k_persist = most;
  if (request.max_age) options.max_age = *request.max_age;
  options.budget = std::uint64_t{options.k_snapshot} * job.experts().size();
  options.replay.full_every = request.full_every;
  if (request.policy == Policy::kReplay) {
    options.k_persist = options.k_snapshot;
    options.replay.budget_bytes = request.budget_bytes;
  } else if (answer.levels) {
    options.budget = answer.levels->local.budget.experts;
    *stall_bytes = answer.levels->local.budget.stall_bytes;
  } else if (request.budget_bytes > 0) {
    SW_TRY_ASSIGN(const ExpertBudget budget, BudgetOf(request.budget_bytes, job.model, job.keep));
    options.budget = budget.experts;
    *stall_bytes = budget.stall_bytes;
  }
  return options;
}

Result<std::string> SelectionRecord(const PlanAnswer& answer) {
  std::vector<TwoLevelSelection> sets;
  for (const PlannedCheckpoint& one : answer.checkpoints) {
    sets.push_back({one.snapshot.selection, one.stored().selection});
  }
  std::optional<std::uint32_t> k_persist;
  if (answer.options.k_persist != answer.options.k_snapshot) k_persist = answer.options.k_persist;
  return SelectionRecord(answer.job.map, answer.options.k_snapshot, k_persist, sets);
}

Result<BudgetAnswer> BudgetFor(const PlanAnswer& answer, const CheckpointPlanInput& input,
                               std::uint64_t stall_bytes) {
  BudgetAnswer budget;
  const Counts& tokens = answer.checkpoints.front().unsaved;
  budget.stall_bytes = stall_bytes;
  SW_TRY_ASSIGN(budget.layers,
                SelectByLayerShares(tokens, input.persist.version, answer.options.budget));
  SW_TRY_ASSIGN(budget.global,
                SelectGlobally(tokens, input.persist.version, answer.options.budget));
  const bool by_layers = answer.options.policy == Policy::kBudget;
  budget.record = BudgetRecord(tokens, by_layers ? budget.layers : budget.global);
  return budget;
}

/// Limits the workers, because PlaceReplicas and CopyBytes may compare every pair of them.
Status CheckWorkers(const PlanAnswer& answer, const char* flag) {
  const std::uint64_t stages = answer.request.pipeline_stages;
  if (answer.job.ranks.dp <= kMostWorkers / stages) return {};
  return Fail(Errc::kLimit, flag, ": ", answer.job.ranks.dp, " x ", stages,
              " workers: expected at most ", kMostWorkers);
}

/// Warns if the experts of a level are never copied.
void WarnIfEmpty(const LevelBudget& level, const char* flag, const char* effect, Sink& sink) {
  const ExpertBudget& budget = level.budget;
  if (budget.experts > 0) return;
  sink.Warn(StrCat(flag, ": a budget of ", FormatBytes(level.bytes),
                   " per iteration holds no expert of ", FormatBytes(budget.expert_bytes),
                   " in addition to ", FormatBytes(budget.nonexpert_bytes),
                   " of other modules; no expert is ", effect));
}

/// Completes the budgets of both levels.
/// \param remote  versions and tokens of the copies on other nodes, before the plan
Status PlanLevels(const CheckpointPlanInput& input, LevelState remote, const StopCheck& stop,
                  Sink& sink, PlanAnswer* answer) {
  const PlanRequest& request = answer->request;
  LevelBudget& local = answer->levels->local;
  local.bottleneck_bytes = answer->checkpoints.front().snapshot.shares.adaptive.bottleneck;
  WarnIfEmpty(local, request.agent ? "--agent" : "--host-bandwidth", "copied to host memory", sink);
  if (request.network_bandwidth == 0) return {};
  SW_TRY(CheckWorkers(*answer, "--network-bandwidth"));
  const std::uint64_t workers = std::uint64_t{answer->job.ranks.dp} * request.pipeline_stages;
  RemoteInput level;
  level.bandwidth = request.network_bandwidth;
  level.iteration_s = request.job.iteration_s;
  level.copies = std::min(request.copies.value_or(1), std::max<std::uint64_t>(workers - 1, 1));
  level.zero_stage = static_cast<std::uint32_t>(request.zero_stage);
  level.spread = request.policy == Policy::kBudget ? BudgetSpread::kLayers : BudgetSpread::kGlobal;
  level.state = std::move(remote);
  level.between = input.between;
  level.iteration = input.iteration;
  SW_TRY_ASSIGN(answer->levels->remote,
                PlanRemote(answer->job, std::move(level), answer->checkpoints, stop));
  WarnIfEmpty(answer->levels->remote->level, "--network-bandwidth", "sent to other nodes", sink);
  return {};
}

Result<CopiesAnswer> PlanCopies(const PlanAnswer& answer, const StopCheck& stop) {
  const Job& job = answer.job;
  const PlanRequest& request = answer.request;
  const std::uint64_t stages = request.pipeline_stages;
  SW_TRY(CheckWorkers(answer, "--copies"));
  CopiesAnswer copies;
  SW_TRY_ASSIGN(copies.grid, StageMajorGrid(job.ranks.dp, static_cast<std::uint32_t>(stages),
                                            job.ranks_per_node));
  SW_TRY_ASSIGN(copies.plan,
                PlaceReplicas(copies.grid, static_cast<std::uint32_t>(*request.copies), stop));
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> bytes,
                CopyBytes(copies.grid, job.map, job.model, answer.SentExperts(0), job.keep,
                          static_cast<std::uint32_t>(request.zero_stage)));
  copies.sends.assign(bytes.size(), 0);
  copies.receives.assign(bytes.size(), 0);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (const std::uint32_t holder : copies.plan.holders[i]) {
      for (std::uint64_t* sum : {&copies.sends[i], &copies.receives[holder], &copies.all_bytes}) {
        SW_TRY_ASSIGN(*sum, CheckedAdd(*sum, bytes[i]));
      }
    }
  }
  const std::uint64_t most =
      std::max(*std::max_element(copies.sends.begin(), copies.sends.end()),
               *std::max_element(copies.receives.begin(), copies.receives.end()));
  if (request.copy_bandwidth > 0) {
    copies.longest_s = static_cast<double>(most) / static_cast<double>(request.copy_bandwidth);
  }
  return copies;
}

/// Returns the iterations until every expert is saved once, with `taken` experts per checkpoint.
Result<std::uint64_t> WindowOf(const PlanAnswer& answer, std::uint64_t taken) {
  const std::uint64_t interval = answer.request.interval;
  const LayerExperts experts = answer.job.experts();
  std::uint64_t all = 0;
  for (const std::uint32_t n : experts) all += n;
  // --full-every limits the length of a chain, however few experts a checkpoint takes.
  const std::uint64_t most = answer.request.full_every / interval + 1;
  const std::uint64_t rounds = taken == 0 ? most : std::min(most, CeilDiv(all, taken));
  return CheckedMul(interval, rounds);
}

/// Computes the size of the gradient log up to the first planned checkpoint.
Result<LogAnswer> PlanLog(const PlanAnswer& answer) {
  const Job& job = answer.job;
  if (!job.no_replay.empty()) {
    return Fail(Errc::kUsage, "--policy gradient-log: ", job.no_replay);
  }
  const std::uint64_t interval = answer.request.interval;
  const std::uint64_t checkpoint = answer.checkpoints.front().stored().size.bytes;
  LogAnswer log;
  SW_TRY_ASSIGN(log.bytes, LogBytes(job.model.expert));
  // Experts of the checkpoint at the end of the interval are not logged.
  const Selection& taken = answer.checkpoints.front().stored().selection;
  for (std::size_t m = 0; m < taken.size(); ++m) {
    for (const std::uint32_t e : taken[m]) log.bytes -= LogBytes(job.model.expert[m][e]);
  }
  log.rank_bytes = CeilDiv(log.bytes, job.ranks.dp);
  SW_TRY_ASSIGN(log.interval_bytes, CheckedMul(log.bytes, interval));
  SW_TRY_ASSIGN(log.interval_bytes, CheckedAdd(log.interval_bytes, checkpoint));
  SW_TRY_ASSIGN(log.window, WindowOf(answer, SizeOf(taken)));
  if (log.bytes > 0) log.pays_up_to = (answer.full.bytes - checkpoint) / log.bytes;
  return log;
}

/// Plans the snapshots as consecutive transfers to a receiver that keeps all earlier ones.
Result<std::vector<GradientAnswer>> PlanGradients(const PlanAnswer& answer, const StopCheck& stop) {
  std::vector<GradientAnswer> list;
  const std::uint64_t interval = answer.request.interval;
  GradientOptions options;
  options.interval = interval;
  options.full_every = answer.request.full_every;
  options.budget_bytes = answer.request.gradient_budget;
  if (options.budget_bytes > 0) options.rule = GradientRule::kLeast;
  GradientChains chains = GradientChains::Make(answer.job.experts());
  for (std::size_t t = 0; t < answer.checkpoints.size(); ++t) {
    SW_TRY(CheckStop(stop));
    const Selection& selection = answer.SentExperts(t);
    SW_TRY_ASSIGN(const std::uint64_t iteration, CheckedMul(t + 1, interval));
    GradientAnswer& one = list.emplace_back();
    SW_TRY_ASSIGN(one.plan,
                  PlanTransfers(chains, answer.job.model.expert, selection, iteration, options));
    SW_TRY(EnterTransfers(&chains, one.plan));
    SW_TRY_ASSIGN(one.window, CheckedAdd(LongestChain(chains), interval));
    for (std::size_t m = 0; m < selection.size(); ++m) {
      for (const std::uint32_t e : selection[m]) {
        SW_TRY_ASSIGN(const std::uint64_t bytes, TotalBytes(answer.job.model.expert[m][e]));
        SW_TRY_ASSIGN(one.state_bytes, CheckedAdd(one.state_bytes, bytes));
      }
    }
  }
  return list;
}

/// Lists the modules that the rank with the largest share of a snapshot saves, with their bytes.
void NameModules(const Job& job, const SavedModel& saved, const SavePlan& plan,
                 BubblesAnswer* bubbles) {
  bubbles->rank = static_cast<std::uint32_t>(
      std::max_element(plan.rank_bytes.begin(), plan.rank_bytes.end()) - plan.rank_bytes.begin());
  std::uint64_t rest = plan.rank_bytes[bubbles->rank];
  const auto add = [&](std::string name, std::uint64_t bytes) {
    if (bytes == 0) return;
    bubbles->names.push_back(std::move(name));
    bubbles->bytes.push_back(bytes);
    rest -= bytes;
  };
  for (const ExpertOwner& owner : plan.experts) {
    if (owner.rank != bubbles->rank) continue;
    const auto m = static_cast<std::size_t>(owner.module.layer);
    const auto e = static_cast<std::size_t>(owner.module.expert);
    add(StrCat("expert ", e, " of layer ", job.layer_id[m]), saved.expert_bytes[m][e].cut);
  }
  for (const ShardPiece& piece : plan.nonexpert.pieces) {
    if (piece.rank == bubbles->rank) add(job.names[piece.module], piece.last - piece.first);
  }
  add("state shared by ranks", rest);
}

Result<BubblesAnswer> PlanBubbles(const PlanAnswer& answer, const SavedModel& saved) {
  const PlanRequest& request = answer.request;
  const PipelineTimes pipeline{static_cast<std::uint32_t>(request.pipeline_stages),
                               static_cast<std::uint32_t>(*request.micro_batches),
                               static_cast<std::uint32_t>(request.chunks), request.forward_s,
                               request.backward_s};
  BubblesAnswer bubbles;
  for (std::uint32_t stage = 0; stage < pipeline.stages; ++stage) {
    SW_TRY_ASSIGN(const BubbleTimes times, BubblesOf(pipeline, stage));
    bubbles.stage.push_back(times);
  }
  const double bubble_s = bubbles.stage.front().bubble_s;
  NameModules(answer.job, saved, answer.checkpoints.front().snapshot.shares.adaptive, &bubbles);
  SW_TRY_ASSIGN(
      bubbles.snapshot,
      FillBubble(bubbles.bytes, 1, static_cast<double>(request.job.snapshot_bandwidth), bubble_s));
  if (answer.copies && request.copy_bandwidth > 0) {
    const auto& sends = answer.copies->sends;
    SW_TRY_ASSIGN(bubbles.copies,
                  FillBubble({*std::max_element(sends.begin(), sends.end())}, 1,
                             static_cast<double>(request.copy_bandwidth), bubble_s));
  }
  return bubbles;
}

Result<ExtraCapacityAnswer> PlanExtraCapacity(const PlanRequest& request) {
  const std::uint64_t capacity = *request.capacity;
  ExtraCapacityAnswer answer;
  SW_TRY_ASSIGN(answer.least, IterationsToMakeUp(request.lost_tokens, capacity));
  // One expert has tokens for twice its capacity, another has none: the device has enough capacity.
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> step,
                TokensToMakeUp({{capacity, 2 * capacity, request.lost_tokens}, {capacity, 0, 0}}));
  answer.extra = step.front();
  answer.iterations = answer.extra == 0 ? 0 : CeilDiv(request.lost_tokens, answer.extra);
  return answer;
}

Result<WastedAnswer> PlanWasted(const PlanAnswer& answer) {
  const PlanRequest& request = answer.request;
  const auto share =
      static_cast<double>(answer.checkpoints.front().snapshot.shares.adaptive.bottleneck);
  WastedAnswer wasted;
  wasted.checkpoint_s =
      request.checkpoint_s.value_or(share / static_cast<double>(request.job.snapshot_bandwidth));
  SW_TRY_ASSIGN(wasted.wasted_s,
                WastedWork(wasted.checkpoint_s, *request.retrieval_s,
                           static_cast<double>(request.interval), request.job.iteration_s));
  return wasted;
}

Result<DynamicKAnswer> PlanDynamicK(const PlanAnswer& answer) {
  const PlanRequest& request = answer.request;
  const std::uint32_t most = answer.job.most_experts();
  const double share = answer.job.LostShare(request.lost_share);
  const auto cost = [&](std::uint32_t k) -> Result<double> {
    SW_TRY_ASSIGN(const double loss,
                  SteadyLossTwoLevels(most, std::max(answer.options.k_snapshot, k), k,
                                      static_cast<double>(request.interval), share));
    return ExpectedPlt(1, loss, static_cast<double>(request.iterations));
  };
  DynamicKAnswer dynamic;
  SW_TRY_ASSIGN(dynamic.state, MakeDynamicK(most, answer.options.k_persist, *request.dynamic_limit,
                                            request.dynamic_predicts));
  SW_TRY(cost(answer.options.k_persist));  // if this K succeeds, so does any other
  dynamic.levels = LevelsAhead(dynamic.state, [&](std::uint32_t k) { return *cost(k); });
  return dynamic;
}

Status AnswerSections(const SavedModel& saved, const StopCheck& stop, PlanAnswer* answer) {
  const PlanRequest& request = answer->request;
  if (request.copies) {
    SW_TRY_ASSIGN(answer->copies, PlanCopies(*answer, stop));
  }
  if (request.policy == Policy::kReplay) {
    SW_TRY_ASSIGN(answer->log, PlanLog(*answer));
  }
  if (request.gradients) {
    SW_TRY_ASSIGN(answer->gradients, PlanGradients(*answer, stop));
  }
  if (request.micro_batches) {
    SW_TRY_ASSIGN(answer->bubbles, PlanBubbles(*answer, saved));
  }
  if (request.capacity) {
    SW_TRY_ASSIGN(answer->extra_capacity, PlanExtraCapacity(request));
  }
  if (request.retrieval_s) {
    SW_TRY_ASSIGN(answer->wasted, PlanWasted(*answer));
  }
  if (request.dynamic_limit) {
    SW_TRY_ASSIGN(answer->dynamic_k, PlanDynamicK(*answer));
  }
  return {};
}

/// Sets `uneven` and `phases` if eq 9 applies: ring policy, one level, equally large layers.
void TellEvenness(PlanAnswer* answer) {
  const LayerExperts experts = answer->job.experts();
  const bool ring = !NeedsTokens(answer->options.policy) &&
                    answer->options.k_persist == answer->options.k_snapshot;
  const bool equal = std::all_of(experts.begin(), experts.end(),
                                 [&](std::uint32_t n) { return n == experts.front(); });
  if (!ring || !equal || !answer->job.ranks.excluded.empty()) return;
  answer->uneven = IsUneven(answer->options.k_persist, experts.size(), answer->job.ranks.dp);
  answer->phases = PhaseCount(answer->options.k_persist, answer->job.map.ep);
}

/// Sets the bandwidths of a rank from those that an agent has measured for all ranks.
void UseMeasured(const SaveRanks& ranks, PlanRequest* request) {
  if (!request->agent) return;
  const AgentBandwidths& agent = *request->agent;
  if (agent.host_bytes_per_s) {
    request->host_bandwidth = BandwidthOfRank(*agent.host_bytes_per_s, ranks.dp);
  }
  if (agent.network_bytes_per_s && request->network_bandwidth == 0) {
    request->network_bandwidth = BandwidthOfRank(*agent.network_bytes_per_s, ranks.dp);
  }
}

}  // namespace

Result<PlanAnswer> PlanCheckpoints(const PlanRequest& request, Sink& sink) {
  const Interruptible planning(sink);
  const StopCheck stop = StopOf(sink);
  std::optional<token_counts::TokenTrace> trace;
  std::optional<TraceShape> shape;
  if (!request.tokens.empty()) {
    SW_TRY_ASSIGN(trace, token_counts::ReadLoads(request.tokens));
    for (const std::string& warning : trace->warnings) sink.Warn(warning);
    shape = TraceShape{trace->experts, trace->layer_id};
  }
  PlanAnswer answer;
  answer.request = request;
  SW_TRY_ASSIGN(answer.job, ReadJob(request.job, shape));
  Job& job = answer.job;
  job.ranks.excluded = request.dead_ranks;
  UseMeasured(job.ranks, &answer.request);
  if (const std::uint64_t host = answer.request.host_bandwidth; host > 0) {
    answer.levels.emplace();
    SW_TRY_ASSIGN(answer.levels->local, LocalBudget(job, host, request.job.iteration_s));
  }
  std::uint64_t stall_bytes = 0;
  SW_TRY_ASSIGN(answer.options, OptionsOf(answer, sink, &stall_bytes));
  CheckpointPlanInput input;
  input.options = answer.options;
  input.checkpoints = request.checkpoints;
  input.interval = request.interval;
  input.model = job.model;
  input.keep = job.keep;
  SW_TRY_ASSIGN(input.saved, SavedModelOf(job.model, job.keep, job.map, job.ranks,
                                          static_cast<std::uint32_t>(request.zero_stage)));
  input.saved.options.split_above = request.split_above;
  SW_TRY(job.newest ? StartFromStore(job, request.tokens, trace, &input)
                    : StartFromNothing(job, answer.options, trace, &input));
  if (NeedsTokens(request.policy) && !input.counted) {
    return Fail(Errc::kUsage, "--policy ", Name(request.policy),
                " needs the tokens per expert: pass --tokens, or a store with "
                "token counts");
  }
  // Storage stands for the other nodes, because a store does not record their versions. The
  // checkpoints of the plan are local copies.
  LevelState remote = input.persist;
  if (answer.levels) input.persist = input.snapshot;
  SW_TRY_ASSIGN(answer.full, SizeOfCheckpoint(job.model, SelectAll(job.experts()), job.keep));
  SW_TRY_ASSIGN(answer.checkpoints, PlanCheckpoints(input, stop));
  SW_TRY_ASSIGN(answer.selection_record, SelectionRecord(answer));
  if (IsBudget(request.policy)) {
    SW_TRY_ASSIGN(answer.budget, BudgetFor(answer, input, stall_bytes));
  }
  if (answer.levels) SW_TRY(PlanLevels(input, std::move(remote), stop, sink, &answer));
  TellEvenness(&answer);
  SW_TRY(AnswerSections(input.saved, stop, &answer));
  return answer;
}

}  // namespace shardwright::partial
