// SPDX-License-Identifier: Apache-2.0
// Selects the experts of a save.

#include <algorithm>
#include <set>
#include <utility>

#include "partial/save/save_internal.h"
#include "partial/select/budget.h"
#include "partial/store/token_log.h"
#include "support/base/bytes.h"

namespace shardwright::partial::save {
namespace {

bool Has(const std::vector<std::uint32_t>& experts, std::uint32_t expert) {
  return std::find(experts.begin(), experts.end(), expert) != experts.end();
}

/// Returns the iterations since the checkpoint that this one continues; 0 if there is none.
std::uint64_t Interval(const Subject& subject, const Base& base) {
  const Manifest* parent = base.parent();
  return parent == nullptr ? 0 : subject.iteration - parent->iteration;
}

/// Returns the run's state of dynamic K: that of the newest checkpoint or recovery,
/// not of the parent, because losses stay charged if a checkpoint is rolled back.
Result<std::optional<DynamicK>> DynamicKNow(const Job& job, const Subject& subject,
                                            const Base& base,
                                            const std::optional<RecoveryRecord>& last) {
  std::optional<DynamicK> stored;
  if (base.newest) {
    const bool recovered = last && last->manifest >= base.newest->head.sequence;
    stored = recovered ? last->state.dynamic_k : base.newest->head.state.dynamic_k;
  }
  if (!job.options.dynamic_k) return stored;
  const DynamicKOptions& asked = *job.options.dynamic_k;
  const LayerExperts& experts = subject.model.experts;
  if (job.options.tokens == nullptr) {
    return Fail(Errc::kUsage,
                "--dynamic-k requires --tokens, because only token counts show lost tokens");
  }
  if (!stored) {
    const std::uint32_t most = *std::max_element(experts.begin(), experts.end());
    SW_TRY_ASSIGN(stored, MakeDynamicK(most, job.options.k_snapshot, asked.limit, asked.predict));
  }
  DynamicK& now = *stored;
  SW_TRY(CheckExperts(now, experts));
  if (now.limit != asked.limit || now.predict != asked.predict) {
    const auto text = [](double limit, bool predict) {
      return std::to_string(limit) + " in mode " + (predict ? "predict" : "react");
    };
    return Fail(Errc::kMismatch, job.options.store, ": expected dynamic K with a limit of ",
                text(now.limit, now.predict), ", found ", text(asked.limit, asked.predict));
  }
  if (asked.iterations > 0) now.iterations = asked.iterations;
  const std::uint64_t interval = Interval(subject, base);
  if (interval > 0) {
    const std::uint64_t run = now.iterations > 0 ? now.iterations : subject.iteration;
    RaiseAhead(&now, EvenFaultCost(experts, interval, run));
  }
  return stored;
}

/// Returns the iterations of versions in an agent's
/// memory, including snapshots that never reached storage.
std::set<std::uint64_t> MemoryVersions(const SaveRequest& options) {
  std::set<std::uint64_t> versions;
  if (options.snapshotted == nullptr) return versions;
  for (const auto& layer : options.snapshotted->level.version) {
    versions.insert(layer.begin(), layer.end());
  }
  return versions;
}

/// Determines map, state of both levels, K and tokens: everything but the selection.
Result<Chosen> TakeState(const Job& job, const Subject& subject, const Base& base) {
  const SaveRequest& options = job.options;
  const LayerExperts& experts = subject.model.experts;
  Chosen chosen;
  chosen.k_snapshot = options.k_snapshot;
  chosen.k_persist = options.k_persist.value_or(options.k_snapshot);
  if (experts.empty()) {
    if (!options.dynamic_k) return chosen;
    return Fail(Errc::kUsage, "--dynamic-k: ", job.input.checkpoint.tag,
                " is a checkpoint of a model without experts");
  }
  SW_TRY_ASSIGN(
      chosen.map,
      EvenExpertMap(experts, static_cast<std::uint32_t>(job.input.checkpoint.layout.mesh.ep)));
  std::optional<RecoveryRecord> last;
  if (base.newest) {
    SW_TRY_ASSIGN(last, base.store->LastRecovery());
  }
  const Manifest* parent = base.parent();
  SelectionState& state = chosen.state;
  if (parent == nullptr) {
    state.snapshot = MakeLevelState(experts, options.k_snapshot);
    state.persist = MakeLevelState(experts, options.k_snapshot);
  } else {
    state = last && last->manifest == parent->sequence ? last->state : parent->state;
    SW_TRY(Validate(state.snapshot, experts));
    SW_TRY(Validate(state.persist, experts));
  }
  SW_TRY_ASSIGN(std::optional<DynamicK> now, DynamicKNow(job, subject, base, last));
  if (base.newest || options.dynamic_k) state.dynamic_k = now;
  if (options.dynamic_k) {
    chosen.k_snapshot = chosen.k_persist = state.dynamic_k->k;
    chosen.dynamic_k =
        ReportOf(*state.dynamic_k, experts, Interval(subject, base), subject.iteration);
  }
  if (options.tokens == nullptr) {
    state.counted_to.reset();
    return chosen;
  }
  const bool chained = state.counted_to.has_value();
  SW_TRY_ASSIGN(const auto trace, options.tokens->After(state.counted_to.value_or(0)));
  for (const std::string& warning : trace->warnings) job.sink.Warn(warning);
  SW_TRY_ASSIGN(TokenRecord record, CountUpTo(*trace, options.tokens->path(), subject.iteration,
                                              experts, &state, MemoryVersions(options)));
  record.parent = chained && parent != nullptr ? parent->sequence : 0;
  chosen.tokens = std::move(record);
  return chosen;
}

/// Returns the snapshot level of an agent, with tokens counted up to this checkpoint.
Result<LevelState> OwnLevel(const Job& job, const Subject& subject, SelectionState level) {
  if (job.options.tokens == nullptr) {
    level.counted_to.reset();
  } else {
    TokenLog& log = *job.options.tokens;
    SW_TRY_ASSIGN(const auto trace, log.After(level.counted_to.value_or(0)));
    for (const std::string& warning : trace->warnings) job.sink.Warn(warning);
    SW_TRY(CountUpTo(*trace, log.path(), subject.iteration, subject.model.experts, &level));
  }
  SW_TRY(Validate(level.snapshot, subject.model.experts));
  return std::move(level.snapshot);
}

Result<std::uint64_t> BudgetExperts(const Job& job, const ModelBytes& bytes, const Base& base) {
  const SaveRequest& options = job.options;
  if (!options.budget_bytes) return std::uint64_t{options.k_snapshot} * bytes.expert.size();
  const Keep keep{base.keeps(Component::kWeights), base.keeps(Component::kMaster),
                  base.keeps(Component::kMoments)};
  SW_TRY_ASSIGN(const ExpertBudget budget, BudgetOf(*options.budget_bytes, bytes, keep));
  if (budget.stall_bytes > 0) {
    job.sink.Warn(StrCat("--budget ", FormatBytes(*options.budget_bytes),
                         ": the non-expert part exceeds the budget by ",
                         FormatBytes(budget.stall_bytes), "; it is saved without any expert"));
  }
  return budget.experts;
}

/// Makes the input of policy gradient-log.
Result<ReplayPoint> ReplayPointOf(const Job& job, const Subject& subject, const Base& base,
                                  const ModelBytes& bytes) {
  const Manifest* const parent = base.parent();
  const std::uint64_t stored = parent == nullptr ? 0 : parent->iteration;
  const std::uint64_t before = job.options.replay.before.value_or(stored);
  const std::uint64_t now = subject.iteration;
  return ReplayPoint{now,
                     // At least 1, for an iteration that is saved again.
                     std::max<std::uint64_t>(now > before ? now - before : 1, 1),
                     job.options.replay.logged_since, job.options.replay.full_every,
                     job.options.budget_bytes.value_or(0), &bytes};
}

/// Warns if gradients are missing, or if the selection exceeds the budget.
void TellReplay(const Job& job, const TransferPlan& plan) {
  if (!job.options.replay.logged_since) {
    return job.sink.Warn(
        "--policy gradient-log: the trainer did not submit all gradients since the previous "
        "checkpoint; every expert is saved (set lossless=True, docs/lossless.md)");
  }
  if (plan.over_bytes == 0) return;
  job.sink.Warn(StrCat("--budget ", FormatBytes(*job.options.budget_bytes), ": exceeded by ",
                       FormatBytes(plan.over_bytes), " in the ", plan.interval,
                       " iterations since the previous checkpoint"));
}

/// Selects experts for both levels by the policy.
Result<TwoLevelSelection> Select(const Job& job, const Subject& subject, const Base& base,
                                 const Chosen& chosen) {
  const SaveRequest& options = job.options;
  SelectionOptions select;
  select.policy = options.policy;
  select.k_snapshot = chosen.k_snapshot;
  select.k_persist = chosen.k_persist;
  select.max_age = options.max_age;
  const bool all = base.parent() == nullptr && !options.partial_start;
  if (!all) SW_TRY(CheckTokens(options));
  const ModelBytes bytes = BytesOf(subject.model);
  if (all) select.policy = Policy::kFull;
  if (select.policy == Policy::kReplay) {
    if (std::ranges::any_of(base.keep, [](bool kept) { return kept; })) {
      return Fail(Errc::kMismatch, options.store, ": the store keeps ", KeepText(base.keep),
                  " of all experts in every checkpoint; --policy gradient-log requires that all "
                  "components of an expert have one version");
    }
    if (options.snapshotted == nullptr) {
      SW_TRY_ASSIGN(const ReplayPoint point, ReplayPointOf(job, subject, base, bytes));
      SW_TRY_ASSIGN(
          const TransferPlan plan,
          SelectReplay(chosen.map, chosen.state.snapshot.cursor,
                       ChainStarts(chosen.state.snapshot, chosen.state.persist, point.logged_since),
                       chosen.k_snapshot, point));
      TellReplay(job, plan);
      return TwoLevelSelection{plan.full, plan.full};
    }
  } else {
    SW_TRY_ASSIGN(select.budget, BudgetExperts(job, bytes, base));
  }
  if (options.snapshotted == nullptr) {
    return SelectTwoLevels(chosen.map, chosen.state.snapshot, chosen.state.persist, select);
  }
  TwoLevelSelection selection;
  selection.snapshot = options.snapshotted->selection;
  SW_TRY(Validate(selection.snapshot, subject.model.experts));
  const bool some = select.policy == Policy::kSequential || select.policy == Policy::kLoadAware;
  selection.persist =
      some ? SelectPersist(chosen.map, chosen.state.persist, selection.snapshot, select.k_persist)
           : selection.snapshot;
  return selection;
}

/// Returns true if the newest checkpoint has an expert completely in
/// the version that is being saved, not only its kept components.
Result<bool> IsSavedAlready(const Subject& subject, std::uint32_t module, Base* base) {
  SW_TRY_ASSIGN(const StoredModule held, NewestOf(base, subject.model, module));
  for (const Component component : kAllComponents) {
    const auto& one = held[static_cast<std::size_t>(component)];
    if (one && one->version == subject.iteration && !base->keeps(component)) return true;
  }
  return false;
}

/// Saves every expert again that the store has of this iteration, because the checkpoint may
/// differ from the one saved before, and a version must identify one state of all modules.
Result<TwoLevelSelection> WithSavedAlready(const Job& job, const Subject& subject,
                                           TwoLevelSelection selection, Base* base) {
  if (!base->newest || base->newest->head.iteration != subject.iteration) return selection;
  const Model& model = subject.model;
  std::uint64_t added = 0;
  for (std::size_t m = 0; m < selection.persist.size(); ++m) {
    std::vector<std::uint32_t>& persist = selection.persist[m];
    std::vector<std::uint32_t>& snapshot = selection.snapshot[m];
    for (std::uint32_t e = 0; e < model.experts[m]; ++e) {
      if (Has(persist, e)) continue;
      const std::uint32_t module = model.expert_module(m, e);
      SW_TRY_ASSIGN(const bool saved, IsSavedAlready(subject, module, base));
      if (!saved) continue;
      if (job.options.snapshotted != nullptr && !Has(snapshot, e)) {
        return Fail(Errc::kMismatch, job.options.store, ": iteration ", subject.iteration,
                    " was saved with ", model.modules[module].name,
                    ", which the agent's snapshot of this iteration lacks");
      }
      persist.push_back(e);
      if (!Has(snapshot, e)) snapshot.push_back(e);
      ++added;
    }
  }
  if (added > 0 && job.comm.rank() == 0) {
    job.sink.Note(StrCat("iteration ", subject.iteration, " was saved before with ", added,
                         " more experts; they are saved again"),
                  0);
  }
  return selection;
}

/// Selects also experts with a missing blob in the store, because no later restore could read it.
TwoLevelSelection WithLost(const Job& job, const Subject& subject, TwoLevelSelection selection,
                           const Base& base) {
  const Model& model = subject.model;
  std::uint64_t added = 0;
  std::uint64_t absent = 0;
  for (std::size_t m = 0; m < selection.persist.size(); ++m) {
    std::vector<std::uint32_t>& persist = selection.persist[m];
    std::vector<std::uint32_t>& snapshot = selection.snapshot[m];
    for (std::uint32_t e = 0; e < model.experts[m]; ++e) {
      const std::uint32_t module = model.expert_module(m, e);
      if (!std::ranges::binary_search(base.lost, module) || Has(persist, e)) continue;
      if (!Has(snapshot, e)) {
        if (job.options.snapshotted != nullptr) {
          ++absent;
          continue;
        }
        snapshot.push_back(e);
      }
      persist.push_back(e);
      ++added;
    }
  }
  if (added + absent == 0 || job.comm.rank() != 0) return selection;
  std::string text = StrCat(job.options.store, ": blobs of ", added + absent,
                            " experts that this save does not select are missing; check whether "
                            "another program, such as a purge of old files, deletes files here");
  if (added > 0) text += StrCat("; ", added, " of these experts are saved as well");
  if (absent > 0) {
    text += StrCat("; ", absent,
                   " of these experts are not in this snapshot, so checkpoints cannot be restored "
                   "until the next save has them");
  }
  job.sink.Warn(text);
  return selection;
}

}  // namespace

Result<Chosen> Choose(const Job& job, const Subject& subject, const SelectionState* level,
                      Base* base) {
  SW_TRY_ASSIGN(Chosen chosen, TakeState(job, subject, *base));
  if (subject.model.experts.empty()) return chosen;
  if (level != nullptr) {
    SW_TRY_ASSIGN(chosen.state.snapshot, OwnLevel(job, subject, *level));
  }
  SW_TRY_ASSIGN(TwoLevelSelection selection, Select(job, subject, *base, chosen));
  if (job.options.snapshotted != nullptr) chosen.state.snapshot = job.options.snapshotted->level;
  SW_TRY_ASSIGN(selection, WithSavedAlready(job, subject, std::move(selection), base));
  chosen.selection = WithLost(job, subject, std::move(selection), *base);
  if (job.options.tokens != nullptr) {
    SW_TRY_ASSIGN(chosen.at_risk, RiskOf(Unsaved(chosen.state.persist), chosen.selection.persist));
  }
  return chosen;
}

Status CheckTokens(const SaveRequest& options) {
  const bool counts = options.policy == Policy::kLoadAware || options.policy == Policy::kBudget ||
                      options.policy == Policy::kBudgetGlobal;
  if (!counts || options.tokens != nullptr) return {};
  return Fail(Errc::kUsage, "--policy ", Name(options.policy),
              " needs the tokens per expert: pass --tokens");
}

}  // namespace shardwright::partial::save
