#include "pec/save.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/bytes.h"
#include "exec/gather.h"
#include "os/dir.h"
#include "pec/budget.h"
#include "pec/save_internal.h"
#include "pec/save_tokens.h"

namespace shardwright::pec {
namespace save {
namespace {

/// The checkpoint that a new one continues, by number; 0 stands for none.
struct Base {
  std::uint64_t sequence = 0;
  std::uint64_t iteration = 0;
  std::uint64_t next = 1;
};

std::string Pack(const Base& base) {
  return std::to_string(base.sequence) + " " + std::to_string(base.iteration) + " " +
         std::to_string(base.next);
}

bool Has(const std::vector<std::uint32_t>& experts, std::uint32_t expert) {
  return std::find(experts.begin(), experts.end(), expert) != experts.end();
}

Base Unpack(const std::string& text) {
  unsigned long long a = 0;
  unsigned long long b = 0;
  unsigned long long c = 0;
  SW_CHECK(std::sscanf(text.c_str(), "%llu %llu %llu", &a, &b, &c) == 3);
  return {a, b, c};
}

}  // namespace

/// What is kept must be there, and something must be left to select.
Status Saving::CheckKeep() const {
  if (!options_.keep || model_.experts.empty()) return {};
  bool selects = false;
  for (const Component component : kAllComponents) {
    bool any = false;
    for (std::size_t i = model_.nonexpert_count; i < model_.modules.size(); ++i) {
      any = any || model_.modules[i].part(component).bytes > 0;
    }
    const bool kept = (*options_.keep)[static_cast<std::size_t>(component)];
    if (kept && !any) {
      return Fail(Errc::kUsage, "--keep " + std::string(Name(component)) + ": the experts of " +
                                    input_.checkpoint.tag + " have no " +
                                    std::string(Name(component)));
    }
    selects = selects || (any && !kept);
  }
  if (selects) return {};
  return Fail(Errc::kUsage, "--keep " + KeepText(*options_.keep) +
                                ": nothing is left to select; use --policy full");
}

Status Saving::CheckModel() {
  const StoreHead& head = store_->head();
  if (head.fingerprint != model_.fingerprint) {
    std::string what = "fingerprint " + exec::Hex(head.fingerprint) + " expected, found " +
                       exec::Hex(model_.fingerprint);
    if (base_) {
      SW_TRY_ASSIGN(const dialect::SourceSet set, store_->ReadCatalogue(base_->head));
      const auto before = dialect::ReadCheckpoint(set, input_.patterns);
      if (before) what += ": " + FirstDifference(*before, input_.checkpoint);
    }
    return Fail(Errc::kMismatch,
                options_.store + " and " + input_.checkpoint.tag + ": another model: " + what);
  }
  if (options_.keep && *options_.keep != head.keep) {
    return Fail(Errc::kMismatch, options_.store + ": made with --keep " + KeepText(head.keep) +
                                     ", now --keep " + KeepText(*options_.keep));
  }
  return {};
}

Status Saving::FindBase() {
  Base base;
  const auto look = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(const bool there, Store::IsStore(options_.store));
    if (!there && options_.dry_run) return Pack(base);
    StoreHead head{model_.fingerprint, model_.modules.size(), model_.experts, model_.layer_id,
                   options_.keep.value_or(KeptComponents{})};
    SW_TRY_ASSIGN(Store store, Store::OpenOrCreate(options_.store, head));
    if (!options_.dry_run) {
      SW_TRY_ASSIGN(lock_, store.LockForWriting("pec-save"));
    }
    SW_TRY(CheckPast(store));
    // Another model's store is refused below, and must not be touched before.
    if (options_.resumed_from && store.head().fingerprint == model_.fingerprint) {
      SW_TRY(AbandonNewer(store));
    }
    SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> checkpoints, store.List());
    for (const StoredCheckpoint& one : checkpoints) {
      if (one.abandoned || Dropped(one)) continue;
      base.sequence = one.sequence;
      base.iteration = one.iteration;
    }
    SW_TRY_ASSIGN(base.next, store.NextSequence());
    return Pack(base);
  };
  SW_TRY_ASSIGN(const std::string text, comm_.OnRootText(look));
  base = Unpack(text);
  report_.sequence = base.next;
  const auto read = [&]() -> Status {
    SW_TRY_ASSIGN(const bool there, Store::IsStore(options_.store));
    if (!there) return {};
    SW_TRY_ASSIGN(Store store, Store::Open(options_.store));
    store_.emplace(std::move(store));
    if (base.sequence != 0) {
      SW_TRY_ASSIGN(ManifestLines manifest,
                    store_->ReadManifestLines({base.sequence, base.iteration, false}));
      base_.emplace(std::move(manifest));
    }
    SW_TRY(CheckModel());
    SW_TRY(FindParent());
    if (base_ && base_->head.iteration > report_.iteration) {
      return Fail(Errc::kMismatch,
                  options_.store + ": holds iteration " + std::to_string(base_->head.iteration) +
                      ", this checkpoint is of iteration " + std::to_string(report_.iteration) +
                      ": restore the store with pec-restore, or say with --resumed-from where "
                      "training went on");
    }
    return {};
  };
  SW_TRY(comm_.Agree(read()));
  report_.first = parent_ == nullptr;
  return {};
}

/// Whether a snapshot is of the past that training goes on from. Recoveries are written under the
/// lock that this save holds, so that the answer stays until the manifest is there.
Status Saving::CheckPast(const Store& store) const {
  if (options_.snapshotted == nullptr) return {};
  return store.CheckPast(options_.snapshotted->recovery, report_.iteration, "the snapshot");
}

/// An iteration that is saved again repeats its selection: a job script may not know that a save
/// was complete when it was killed.
Status Saving::FindParent() {
  if (!base_) return {};
  if (base_->head.iteration != report_.iteration) {
    parent_ = &base_->head;
    return {};
  }
  if (base_->head.parent == 0) return {};
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> checkpoints, store_->List());
  for (const StoredCheckpoint& one : checkpoints) {
    if (one.sequence != base_->head.parent) continue;
    SW_TRY_ASSIGN(ManifestLines manifest, store_->ReadManifestLines(one));
    before_.emplace(std::move(manifest));
    parent_ = &before_->head;
    return {};
  }
  parent_ = &base_->head;  // collected since
  return {};
}

bool Saving::Dropped(const StoredCheckpoint& checkpoint) const {
  return options_.resumed_from && checkpoint.iteration > *options_.resumed_from;
}

Status Saving::AbandonNewer(const Store& store) const {
  if (options_.dry_run) return {};
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> checkpoints, store.List());
  Recovery recovery;
  std::optional<StoredCheckpoint> base;
  bool news = false;
  for (const StoredCheckpoint& one : checkpoints) {
    if (Dropped(one)) {
      recovery.abandoned.push_back(one.sequence);
      news = news || !one.abandoned;
    } else if (!one.abandoned) {
      base = one;
    }
  }
  // With nothing newer here, agents may hold something newer all the same.
  if (!news && !base) return {};
  SW_TRY_ASSIGN(const std::optional<Recovery> last, store.LastRecovery());
  recovery.sequence = last ? last->sequence + 1 : 1;
  recovery.resume = *options_.resumed_from;
  if (last) recovery.ledger = last->ledger;
  if (base) {
    recovery.manifest = base->sequence;
    if (last && last->manifest == base->sequence) {
      recovery.state = last->state;
    } else {
      SW_TRY_ASSIGN(const ManifestLines manifest, store.ReadManifestLines(*base));
      recovery.state = manifest.head.state;
    }
    SW_TRY_ASSIGN(recovery.state.dynamic_k, NewestDynamicK(store, checkpoints, last));
  }
  return store.AddRecovery(recovery);
}

/// Iterations since the checkpoint that this one continues; 0 if there is none.
std::uint64_t Saving::Interval() const {
  return parent_ == nullptr ? 0 : report_.iteration - parent_->iteration;
}

std::uint32_t Saving::k_snapshot() const {
  return options_.dynamic_k ? state_.dynamic_k->k : options_.k_snapshot;
}

std::uint32_t Saving::k_persist() const {
  return options_.dynamic_k ? k_snapshot() : options_.k_persist.value_or(options_.k_snapshot);
}

/// The budget is the run's: what it has spent is not forgotten with a checkpoint that is given up.
/// So it is that of the newest checkpoint or recovery, not that of the parent.
Status Saving::TakeDynamicK(const std::optional<Recovery>& last) {
  if (base_) {
    const bool recovered = last && last->manifest >= base_->head.sequence;
    state_.dynamic_k = recovered ? last->state.dynamic_k : base_->head.state.dynamic_k;
  }
  if (!options_.dynamic_k) return {};
  const DynamicKOptions& asked = *options_.dynamic_k;
  if (options_.tokens == nullptr) {
    return Fail(
        Errc::kUsage,
        "--dynamic-k: lost tokens are known from the tokens per expert only: give --tokens");
  }
  if (!state_.dynamic_k) {
    const std::uint32_t most = *std::max_element(model_.experts.begin(), model_.experts.end());
    SW_TRY_ASSIGN(state_.dynamic_k,
                  MakeDynamicK(most, options_.k_snapshot, asked.limit, asked.predict));
  }
  DynamicK& now = *state_.dynamic_k;
  SW_TRY(CheckExperts(now, model_.experts));
  if (now.limit != asked.limit || now.predict != asked.predict) {
    const auto text = [](double limit, bool predict) {
      return std::to_string(limit) + " in mode " + (predict ? "predict" : "react");
    };
    return Fail(Errc::kMismatch, options_.store + ": dynamic K with a limit of " +
                                     text(now.limit, now.predict) + ", now " +
                                     text(asked.limit, asked.predict));
  }
  if (asked.iterations > 0) now.iterations = asked.iterations;
  if (Interval() > 0) {
    const std::uint64_t run = now.iterations > 0 ? now.iterations : report_.iteration;
    RaiseAhead(&now, EvenFaultCost(model_.experts, Interval(), run));
  }
  report_.dynamic_k = ReportOf(now, model_.experts, Interval(), report_.iteration);
  return {};
}

Status Saving::TakeState() {
  if (model_.experts.empty()) {
    if (!options_.dynamic_k) return {};
    return Fail(Errc::kUsage,
                "--dynamic-k: " + input_.checkpoint.tag + " is of a model without experts");
  }
  SW_TRY_ASSIGN(map_, EvenExpertMap(model_.experts,
                                    static_cast<std::uint32_t>(input_.checkpoint.topology.ep)));
  std::optional<Recovery> last;
  if (base_) {
    SW_TRY_ASSIGN(last, store_->LastRecovery());
  }
  if (parent_ == nullptr) {
    state_.snapshot = MakeLevelState(model_.experts, options_.k_snapshot);
    state_.persist = MakeLevelState(model_.experts, options_.k_snapshot);
  } else {
    state_ = parent_->state;
    if (last && last->manifest == parent_->sequence) state_ = last->state;
    SW_TRY(Validate(state_.snapshot, model_.experts));
    SW_TRY(Validate(state_.persist, model_.experts));
  }
  SW_TRY(TakeDynamicK(last));
  if (options_.tokens == nullptr) {
    state_.counted_to.reset();
    return {};
  }
  const bool chained = state_.counted_to.has_value();
  SW_TRY_ASSIGN(TokenRecord record, CountUpTo(*options_.tokens, options_.tokens_path,
                                              report_.iteration, model_.experts, &state_));
  record.parent = chained && parent_ != nullptr ? parent_->sequence : 0;
  tokens_ = std::move(record);
  return {};
}

Status Saving::Select() {
  if (model_.experts.empty()) return {};
  SelectionOptions select;
  select.policy = options_.policy;
  select.k_snapshot = k_snapshot();
  select.k_persist = k_persist();
  select.max_age = options_.max_age;
  const bool counts = options_.policy == Policy::kLoadAware || options_.policy == Policy::kBudget ||
                      options_.policy == Policy::kBudgetGlobal;
  const bool all = report_.first && !options_.partial_start;
  if (counts && !all && options_.tokens == nullptr) {
    return Fail(Errc::kUsage, "--policy " + std::string(Name(options_.policy)) +
                                  " needs the tokens per expert: give --tokens");
  }
  SW_TRY_ASSIGN(select.budget, BudgetExperts());
  if (all) select.policy = Policy::kFull;
  if (options_.snapshotted != nullptr) {
    SW_TRY(Validate(options_.snapshotted->selection, model_.experts));
    report_.selection.snapshot = options_.snapshotted->selection;
    const bool some = select.policy == Policy::kSequential || select.policy == Policy::kLoadAware;
    report_.selection.persist =
        some ? SelectPersist(map_, state_.persist, report_.selection.snapshot, select.k_persist)
             : report_.selection.snapshot;
    state_.snapshot = options_.snapshotted->level;
  } else {
    SW_TRY_ASSIGN(report_.selection,
                  SelectTwoLevels(map_, state_.snapshot, state_.persist, select));
  }
  SW_TRY(SelectAgain());
  if (options_.tokens != nullptr) {
    SW_TRY_ASSIGN(report_.at_risk, RiskOf(Unsaved(state_.persist), report_.selection.persist));
  }
  return {};
}

/// Whether the newest checkpoint has an expert in the version that is being saved, not only what
/// the store keeps of it.
Result<bool> Saving::IsSavedAlready(std::uint32_t module) {
  SW_TRY_ASSIGN(const HeldModule held, BaseModule(module));
  for (const Component component : kAllComponents) {
    const auto& one = held[static_cast<std::size_t>(component)];
    if (one && one->version == report_.iteration && !Keeps(component)) return true;
  }
  return false;
}

/// Every expert that the store has of this iteration is saved again: the checkpoint may have other
/// content than the one that was saved before, and a version names one state of all modules.
Status Saving::SelectAgain() {
  if (!base_ || base_->head.iteration != report_.iteration) return {};
  TwoLevelSelection& selection = report_.selection;
  std::uint64_t added = 0;
  for (std::size_t m = 0; m < selection.persist.size(); ++m) {
    std::vector<std::uint32_t>& persist = selection.persist[m];
    std::vector<std::uint32_t>& snapshot = selection.snapshot[m];
    for (std::uint32_t e = 0; e < model_.experts[m]; ++e) {
      if (Has(persist, e)) continue;
      const std::uint32_t module = model_.expert_module(m, e);
      SW_TRY_ASSIGN(const bool saved, IsSavedAlready(module));
      if (!saved) continue;
      if (options_.snapshotted != nullptr && !Has(snapshot, e)) {
        return Fail(Errc::kMismatch, options_.store + ": iteration " +
                                         std::to_string(report_.iteration) + " was saved with " +
                                         model_.modules[module].name +
                                         ", which the snapshot of it does not have");
      }
      persist.push_back(e);
      if (!Has(snapshot, e)) snapshot.push_back(e);
      ++added;
    }
  }
  if (added > 0 && comm_.rank() == 0) {
    sink_.Note("iteration " + std::to_string(report_.iteration) + " was saved before with " +
                   std::to_string(added) + " experts more: they are saved again",
               0);
  }
  return {};
}

Result<std::uint64_t> Saving::BudgetExperts() const {
  if (!options_.budget_bytes) return std::uint64_t{options_.k_snapshot} * model_.experts.size();
  ModelBytes bytes;
  bytes.expert.resize(1);
  for (const Module& module : model_.modules) {
    (module.id.is_expert() ? bytes.expert[0] : bytes.nonexpert)
        .push_back({module.part(Component::kWeights).bytes, module.part(Component::kMaster).bytes,
                    module.part(Component::kMoments).bytes});
  }
  const Keep keep{Keeps(Component::kWeights), Keeps(Component::kMaster),
                  Keeps(Component::kMoments)};
  SW_TRY_ASSIGN(const ExpertBudget budget, BudgetOf(*options_.budget_bytes, bytes, keep));
  if (budget.stall_bytes > 0) {
    sink_.Warn("--budget " + FormatBytes(*options_.budget_bytes) + ": the non-expert part is " +
               FormatBytes(budget.stall_bytes) + " larger; it is saved, and no expert");
  }
  return budget.experts;
}

bool Saving::Keeps(Component component) const {
  const auto at = static_cast<std::size_t>(component);
  if (store_) return store_->head().keep[at];
  return options_.keep && (*options_.keep)[at];
}

Status Saving::Understand() {
  if (options_.memory_bytes < options_.threads * exec::kWorkspaceBytes) {
    return Fail(Errc::kLimit, "--memory " + FormatBytes(options_.memory_bytes) + ": " +
                                  std::to_string(options_.threads) + " threads need " +
                                  FormatBytes(options_.threads * exec::kWorkspaceBytes) +
                                  " of buffers");
  }
  if (!input_.file_owner.empty()) {
    return Fail(
        Errc::kUnsupported,
        input_.checkpoint.tag + ": --node-local: a save needs every rank to see every file");
  }
  sink_.Pass("select");
  const auto understand = [&]() -> Status {
    SW_TRY_ASSIGN(model_, DescribeModel(input_.checkpoint));
    if (options_.iteration) {
      report_.iteration = *options_.iteration;
    } else {
      SW_TRY_ASSIGN(report_.iteration, IterationOf(input_.checkpoint));
    }
    return CheckKeep();
  };
  return comm_.Agree(understand());
}

Result<SnapshotChoice> Saving::Choose(const SelectionState* level) {
  SW_TRY(Understand());
  SW_TRY(FindBase());
  const auto choose = [&]() -> Status {
    SW_TRY(TakeState());
    if (level != nullptr && !model_.experts.empty()) {
      SelectionState own = *level;
      if (options_.tokens == nullptr) {
        own.counted_to.reset();
      } else {
        SW_TRY(CountUpTo(*options_.tokens, options_.tokens_path, report_.iteration, model_.experts,
                         &own));
      }
      SW_TRY(Validate(own.snapshot, model_.experts));
      state_.snapshot = std::move(own.snapshot);
    }
    return Select();
  };
  SW_TRY(comm_.Agree(choose()));
  SnapshotChoice choice;
  choice.iteration = report_.iteration;
  for (const Component component : kAllComponents) {
    choice.keep[static_cast<std::size_t>(component)] = Keeps(component);
  }
  choice.model = std::move(model_);
  choice.selection = std::move(report_.selection.snapshot);
  choice.k_snapshot = k_snapshot();
  choice.k_persist = k_persist();
  choice.state = std::move(state_);
  return choice;
}

Result<SaveReport> Saving::Go() {
  if (options_.memory_bytes < options_.threads * exec::kWorkspaceBytes) {
    return Fail(Errc::kLimit, "--memory " + FormatBytes(options_.memory_bytes) + ": " +
                                  std::to_string(options_.threads) + " threads need " +
                                  FormatBytes(options_.threads * exec::kWorkspaceBytes) +
                                  " of buffers");
  }
  SW_TRY(Understand());
  SW_TRY(FindBase());
  SW_TRY(comm_.Agree(TakeState()));
  SW_TRY(comm_.Agree(Select()));
  ListJobs();
  SW_TRY(comm_.Agree(ShareJobs()));
  FillReport();
  if (options_.dry_run) return report_;
  Status written = Write();
  // Blobs that have no name yet are of no use to a later save.
  if (!written && comm_.rank() == 0 && !incoming_.empty()) {
    (void)os::RemoveTree(incoming_, options_.store);
  }
  SW_TRY(std::move(written));
  return report_;
}

}  // namespace save

std::string KeepText(const KeptComponents& keep) {
  std::string text;
  for (const Component component : kAllComponents) {
    if (!keep[static_cast<std::size_t>(component)]) continue;
    text += (text.empty() ? "" : ",") + std::string(Name(component));
  }
  return text.empty() ? "nothing" : text;
}

Result<SaveReport> Save(comm::Comm& comm, ucp::Input& input, const SaveRequest& options,
                        Sink& sink) {
  return save::Saving(comm, input, options, sink).Go();
}

Result<SnapshotChoice> ChooseSnapshot(comm::Comm& comm, ucp::Input& input,
                                      const SaveRequest& options, const SelectionState* level,
                                      Sink& sink) {
  SaveRequest look = options;
  look.dry_run = true;
  return save::Saving(comm, input, look, sink).Choose(level);
}

}  // namespace shardwright::pec
