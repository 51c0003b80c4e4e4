#include "pec-save/plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/bytes.h"
#include "base/checked.h"
#include "moe/load_trace.h"
#include "pec/boost.h"
#include "pec/lost_tokens.h"
#include "pec/overhead.h"
#include "pec/records.h"
#include "pec/save_tokens.h"
#include "pec/simulate.h"

namespace shardwright::apps {
namespace {

constexpr std::uint64_t kMostWorkers = 16'384;

/// Tokens of the records after an iteration.
Result<pec::Counts> TokensAfter(const moe::LoadTrace& trace, std::uint64_t iteration) {
  SW_TRY_ASSIGN(const std::vector<pec::Counts> tables, pec::CountsOfTrace(trace));
  pec::LevelState sum =
      pec::MakeLevelState(pec::LayerExperts(trace.layer_id.size(), trace.experts), 1);
  for (std::size_t i = 0; i < tables.size(); ++i) {
    if (trace.records[i].iteration > iteration) SW_TRY(pec::CountTokens(&sum, tables[i]));
  }
  return std::move(sum.tokens);
}

/// The levels as the store left them and the tokens since then.
Status StartFromStore(const Job& job, const std::string& tokens_path,
                      const std::optional<moe::LoadTrace>& trace, pec::ComingInput* input) {
  pec::SelectionState state = job.state;
  input->iteration = job.newest->iteration;
  if (trace) {
    const std::uint64_t last = trace->records.back().iteration;
    const std::uint64_t first = state.counted_to.value_or(job.newest->iteration);
    if (last < first) {
      return Fail(Errc::kUsage, tokens_path + ": ends at iteration " + std::to_string(last) +
                                    ", the store is at " + std::to_string(first));
    }
    SW_TRY(pec::CountUpTo(*trace, tokens_path, last, job.experts(), &state));
    SW_TRY_ASSIGN(input->between, TokensAfter(*trace, job.newest->iteration));
    input->iteration = std::max(input->iteration, last);
  }
  input->counted = state.counted_to.has_value();
  input->snapshot = std::move(state.snapshot);
  input->persist = std::move(state.persist);
  return {};
}

Status StartFromNothing(const Job& job, const pec::SelectionOptions& options,
                        const std::optional<moe::LoadTrace>& trace, pec::ComingInput* input) {
  input->snapshot = pec::MakeLevelState(job.experts(), options.k_snapshot);
  input->persist = pec::MakeLevelState(job.experts(), options.k_persist);
  input->counted = trace.has_value();
  if (!trace) return {};
  SW_TRY_ASSIGN(input->between, TokensAfter(*trace, 0));
  SW_TRY(pec::CountTokens(&input->snapshot, input->between));
  return pec::CountTokens(&input->persist, input->between);
}

bool NeedsTokens(pec::Policy policy) {
  return policy != pec::Policy::kSequential && policy != pec::Policy::kFull;
}

bool IsBudget(pec::Policy policy) {
  return policy == pec::Policy::kBudget || policy == pec::Policy::kBudgetGlobal;
}

Result<pec::SelectionOptions> OptionsOf(cli::Context& context, const SaveFlags& save,
                                        const Job& job, std::uint64_t* stall_bytes) {
  pec::SelectionOptions options;
  const pec::LayerExperts experts = job.experts();
  const std::uint32_t most = *std::max_element(experts.begin(), experts.end());
  options.policy = save.policy;
  options.k_snapshot = static_cast<std::uint32_t>(std::min<std::uint64_t>(save.k, most));
  if (save.k > most) {
    context.sink().Warn("--k " + std::to_string(save.k) + " is above the " + std::to_string(most) +
                        " experts of a layer: all are saved");
  }
  options.k_persist =
      save.k_persist == SaveFlags::kUnset
          ? options.k_snapshot
          : static_cast<std::uint32_t>(std::min<std::uint64_t>(save.k_persist, options.k_snapshot));
  if (save.policy == pec::Policy::kFull) options.k_snapshot = options.k_persist = most;
  if (save.max_age != SaveFlags::kUnset) options.max_age = save.max_age;
  options.budget = std::uint64_t{options.k_snapshot} * experts.size();
  if (save.budget > 0) {
    SW_TRY_ASSIGN(const pec::ExpertBudget budget, pec::BudgetOf(save.budget, job.model, job.keep));
    options.budget = budget.experts;
    *stall_bytes = budget.stall_bytes;
  }
  return options;
}

Result<std::string> SelectionText(const PlanAnswer& answer) {
  std::vector<pec::TwoLevelSelection> sets;
  for (const pec::ComingCheckpoint& one : answer.checkpoints) {
    sets.push_back({one.snapshot.selection, one.stored().selection});
  }
  std::optional<std::uint32_t> k_persist;
  if (answer.options.k_persist != answer.options.k_snapshot) k_persist = answer.options.k_persist;
  return pec::SelectionRecord(answer.job.map, answer.options.k_snapshot, k_persist, sets);
}

Result<BudgetAnswer> BudgetFor(const PlanAnswer& answer, const pec::ComingInput& input,
                               std::uint64_t stall_bytes) {
  BudgetAnswer budget;
  const pec::Counts& tokens = answer.checkpoints.front().unsaved;
  budget.stall_bytes = stall_bytes;
  SW_TRY_ASSIGN(budget.layers,
                pec::SelectByLayerShares(tokens, input.persist.version, answer.options.budget));
  SW_TRY_ASSIGN(budget.global,
                pec::SelectGlobally(tokens, input.persist.version, answer.options.budget));
  const bool by_layers = answer.options.policy == pec::Policy::kBudget;
  budget.record = pec::BudgetRecord(tokens, by_layers ? budget.layers : budget.global);
  return budget;
}

Result<CopiesAnswer> PlanCopies(const PlanAnswer& answer, const PlanFlags& flags) {
  const Job& job = answer.job;
  // Placing them by load compares all with all.
  if (job.ranks.dp > kMostWorkers / flags.pp) {
    return Fail(Errc::kLimit, "--copies: " + std::to_string(job.ranks.dp) + " x " +
                                  std::to_string(flags.pp) + " workers, at most " +
                                  std::to_string(kMostWorkers) + " are handled");
  }
  CopiesAnswer copies;
  SW_TRY_ASSIGN(copies.grid, pec::StageMajorGrid(job.ranks.dp, static_cast<std::uint32_t>(flags.pp),
                                                 job.ranks_per_node));
  SW_TRY_ASSIGN(copies.plan,
                pec::PlaceReplicas(copies.grid, static_cast<std::uint32_t>(flags.copies)));
  SW_TRY_ASSIGN(
      const std::vector<std::uint64_t> bytes,
      pec::CopyBytes(copies.grid, job.map, job.model, answer.checkpoints.front().snapshot.selection,
                     job.keep, static_cast<std::uint32_t>(flags.zero_stage)));
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
  if (flags.copy_bandwidth > 0) {
    copies.longest_s = static_cast<double>(most) / static_cast<double>(flags.copy_bandwidth);
  }
  return copies;
}

/// The snapshots of the plan as consecutive transfers; a receiver has all that was sent before.
Result<std::vector<GradientAnswer>> PlanGradients(const PlanAnswer& answer,
                                                  const PlanningFlags& flags) {
  std::vector<GradientAnswer> list;
  const std::uint64_t interval = std::max<std::uint64_t>(flags.interval, 1);
  const pec::GradientOptions options{interval, flags.plan.full_every};
  pec::GradientChains chains = pec::GradientChains::Make(answer.job.experts());
  for (std::size_t t = 0; t < answer.checkpoints.size(); ++t) {
    const pec::Selection& selection = answer.checkpoints[t].snapshot.selection;
    SW_TRY_ASSIGN(const std::uint64_t iteration, CheckedMul(t + 1, interval));
    GradientAnswer& one = list.emplace_back();
    SW_TRY_ASSIGN(one.plan, pec::PlanTransfers(chains, answer.job.model.expert, selection,
                                               iteration, options));
    SW_TRY(pec::EnterTransfers(&chains, one.plan));
    for (std::size_t m = 0; m < selection.size(); ++m) {
      for (const std::uint32_t e : selection[m]) {
        SW_TRY_ASSIGN(const std::uint64_t bytes, pec::TotalBytes(answer.job.model.expert[m][e]));
        SW_TRY_ASSIGN(one.state_bytes, CheckedAdd(one.state_bytes, bytes));
      }
    }
  }
  return list;
}

/// What the rank with most bytes saves of a snapshot, module by module.
void NameModules(const Job& job, const pec::SavedModel& saved, const pec::SavePlan& plan,
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
  for (const pec::ExpertOwner& owner : plan.experts) {
    if (owner.rank != bubbles->rank) continue;
    const auto m = static_cast<std::size_t>(owner.module.layer);
    const auto e = static_cast<std::size_t>(owner.module.expert);
    add("expert " + std::to_string(e) + " of layer " + std::to_string(job.layer_id[m]),
        saved.expert_bytes[m][e].cut);
  }
  for (const pec::ShardPiece& piece : plan.nonexpert.pieces) {
    if (piece.rank == bubbles->rank) add(job.names[piece.module], piece.last - piece.first);
  }
  add("state that ranks share", rest);
}

Result<BubblesAnswer> PlanBubbles(const PlanAnswer& answer, const pec::SavedModel& saved,
                                  const PlanningFlags& flags) {
  const PlanFlags& plan = flags.plan;
  const pec::PipelineTimes pipeline{
      static_cast<std::uint32_t>(plan.pp), static_cast<std::uint32_t>(plan.micro_batches),
      static_cast<std::uint32_t>(plan.chunks), plan.forward_s, plan.backward_s};
  BubblesAnswer bubbles;
  for (std::uint32_t stage = 0; stage < pipeline.stages; ++stage) {
    SW_TRY_ASSIGN(const pec::BubbleTimes times, pec::BubblesOf(pipeline, stage));
    bubbles.stage.push_back(times);
  }
  const double bubble_s = bubbles.stage.front().bubble_s;
  NameModules(answer.job, saved, answer.checkpoints.front().snapshot.shares.adaptive, &bubbles);
  SW_TRY_ASSIGN(bubbles.snapshot,
                pec::FillBubble(bubbles.bytes, 1, static_cast<double>(flags.job.snapshot_bandwidth),
                                bubble_s));
  if (answer.copies && plan.copy_bandwidth > 0) {
    const auto& sends = answer.copies->sends;
    SW_TRY_ASSIGN(bubbles.copies,
                  pec::FillBubble({*std::max_element(sends.begin(), sends.end())}, 1,
                                  static_cast<double>(plan.copy_bandwidth), bubble_s));
  }
  return bubbles;
}

Result<BoostAnswer> PlanBoost(const PlanFlags& flags) {
  BoostAnswer boost;
  SW_TRY_ASSIGN(boost.least, pec::BoostIterations(flags.lost_tokens, flags.capacity));
  // A device with room for all of it: the expert has tokens to spare, another has none.
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> step,
                pec::BoostStep({{flags.capacity, 2 * flags.capacity, flags.lost_tokens},
                                {flags.capacity, 0, 0}}));
  boost.extra = step.front();
  boost.iterations = boost.extra == 0 ? 0 : CeilDiv(flags.lost_tokens, boost.extra);
  return boost;
}

Result<WastedAnswer> PlanWasted(const PlanAnswer& answer, const PlanningFlags& flags) {
  WastedAnswer wasted;
  wasted.checkpoint_s = flags.plan.checkpoint_s;
  if (wasted.checkpoint_s < 0) {
    wasted.checkpoint_s =
        static_cast<double>(answer.checkpoints.front().snapshot.shares.adaptive.bottleneck) /
        static_cast<double>(flags.job.snapshot_bandwidth);
  }
  const double interval = static_cast<double>(std::max<std::uint64_t>(flags.interval, 1));
  SW_TRY_ASSIGN(wasted.wasted_s, pec::WastedWork(wasted.checkpoint_s, flags.plan.retrieval_s,
                                                 interval, flags.job.iteration_s));
  return wasted;
}

Result<DynamicKAnswer> PlanDynamicK(const PlanAnswer& answer, const SaveFlags& save) {
  const PlanningFlags& flags = save.planning;
  const pec::LayerExperts experts = answer.job.experts();
  const std::uint32_t most = *std::max_element(experts.begin(), experts.end());
  const double interval = static_cast<double>(std::max<std::uint64_t>(flags.interval, 1));
  const double share = flags.LostShare(answer.job);
  const auto cost = [&](std::uint32_t k) -> Result<double> {
    SW_TRY_ASSIGN(
        const double loss,
        pec::SteadyLossTwoLevels(most, std::max(answer.options.k_snapshot, k), k, interval, share));
    return pec::ExpectedPlt(1, loss, static_cast<double>(flags.iterations));
  };
  DynamicKAnswer dynamic;
  SW_TRY_ASSIGN(dynamic.state, pec::MakeDynamicK(most, answer.options.k_persist, save.dynamic_k,
                                                 save.dynamic_k_mode == "predict"));
  SW_TRY(cost(answer.options.k_persist));  // no other K fails where this one does not
  dynamic.levels = pec::LevelsAhead(dynamic.state, [&](std::uint32_t k) { return *cost(k); });
  return dynamic;
}

Status PlanSections(const cli::App& app, const SaveFlags& save, const pec::SavedModel& saved,
                    PlanAnswer* answer) {
  const PlanningFlags& flags = save.planning;
  if (app.Given("--copies")) {
    SW_TRY_ASSIGN(answer->copies, PlanCopies(*answer, flags.plan));
  }
  if (flags.plan.gradients) {
    SW_TRY_ASSIGN(answer->gradients, PlanGradients(*answer, flags));
  }
  if (app.Given("--micro-batches")) {
    SW_TRY_ASSIGN(answer->bubbles, PlanBubbles(*answer, saved, flags));
  }
  if (app.Given("--capacity")) {
    SW_TRY_ASSIGN(answer->boost, PlanBoost(flags.plan));
  }
  if (app.Given("--retrieval-time")) {
    SW_TRY_ASSIGN(answer->wasted, PlanWasted(*answer, flags));
  }
  if (app.Given("--dynamic-k")) {
    SW_TRY_ASSIGN(answer->dynamic_k, PlanDynamicK(*answer, save));
  }
  return {};
}

/// Eq 9 speaks of the ring, one level, and layers with equally many experts.
void TellEvenness(PlanAnswer* answer) {
  const pec::LayerExperts experts = answer->job.experts();
  const bool ring = !NeedsTokens(answer->options.policy) &&
                    answer->options.k_persist == answer->options.k_snapshot;
  const bool equal = std::all_of(experts.begin(), experts.end(),
                                 [&](std::uint32_t n) { return n == experts.front(); });
  if (!ring || !equal || !answer->job.ranks.excluded.empty()) return;
  answer->uneven = pec::IsUneven(answer->options.k_persist, experts.size(), answer->job.ranks.dp);
  answer->phases = pec::PhaseCount(answer->options.k_persist, answer->job.map.ep);
}

}  // namespace

Status Plan(cli::Context& context, const cli::App& app, const SaveFlags& save) {
  const PlanFlags& flags = save.planning.plan;
  std::optional<moe::LoadTrace> trace;
  std::optional<Shape> shape;
  if (!save.tokens.empty()) {
    SW_TRY_ASSIGN(trace, moe::ReadLoads(save.tokens));
    shape = Shape{trace->experts, trace->layer_id};
  }
  PlanAnswer answer;
  SW_TRY_ASSIGN(answer.job, save.planning.job.Read(app, save.keep, shape));
  Job& job = answer.job;
  if (!flags.dead_ranks.empty()) {
    auto dead = ParseRanks(flags.dead_ranks);
    if (!dead) return Within("--dead-ranks", std::move(dead).error());
    job.ranks.excluded = *std::move(dead);
  }
  std::uint64_t stall_bytes = 0;
  SW_TRY_ASSIGN(answer.options, OptionsOf(context, save, job, &stall_bytes));
  pec::ComingInput input;
  input.options = answer.options;
  input.checkpoints = flags.checkpoints;
  input.model = job.model;
  input.keep = job.keep;
  SW_TRY_ASSIGN(input.saved, pec::SavedModelOf(job.model, job.keep, job.map, job.ranks,
                                               static_cast<std::uint32_t>(flags.zero_stage)));
  input.saved.options.split_above = flags.split_above;
  SW_TRY(job.newest ? StartFromStore(job, save.tokens, trace, &input)
                    : StartFromNothing(job, answer.options, trace, &input));
  if (NeedsTokens(save.policy) && !input.counted) {
    return Fail(Errc::kUsage, "--policy " + std::string(pec::Name(save.policy)) +
                                  " needs the tokens per expert: give --tokens, or a store that "
                                  "counts them");
  }
  SW_TRY_ASSIGN(answer.full,
                pec::SizeOfCheckpoint(job.model, pec::SelectAll(job.experts()), job.keep));
  SW_TRY_ASSIGN(answer.checkpoints, pec::PlanComing(input));
  SW_TRY_ASSIGN(answer.selection_record, SelectionText(answer));
  if (IsBudget(save.policy)) {
    SW_TRY_ASSIGN(answer.budget, BudgetFor(answer, input, stall_bytes));
  }
  TellEvenness(&answer);
  SW_TRY(PlanSections(app, save, input.saved, &answer));
  SW_TRY_ASSIGN(nlohmann::json result, PlanJson(answer, save));
  context.SetResult(std::move(result));
  ShowPlan(context, answer, save);
  return {};
}

}  // namespace shardwright::apps
