#include "pec/restore/restore.h"

#include <utility>

#include <nlohmann/json.hpp>

#include "os/dir.h"
#include "pec/restore/restore_internal.h"
#include "pec/store/save_tokens.h"

namespace shardwright::pec {
namespace restore {
namespace {

/// The memory level has nothing that storage has not: it goes on from what was restored. Its
/// cursors stay, so that the rotation goes on.
void TakePersisted(SelectionState* state) {
  std::vector<std::uint64_t> cursor = std::move(state->snapshot.cursor);
  state->snapshot = state->persist;
  state->snapshot.cursor = std::move(cursor);
}

}  // namespace

/// Tokens that are lost, and the counters from which selection goes on.
Status Restoring::TakeLoss() {
  if (model_.experts.empty()) return {};
  SW_TRY_ASSIGN(const std::optional<RecoveryRecord> last, store_->LastRecovery());
  state_ = at_->state;
  if (last && at_->sequence != 0 && last->manifest == at_->sequence) state_ = last->state;
  SW_TRY(Validate(state_.persist, model_.experts));
  // What was spent since the checkpoint that is restored stays spent.
  SW_TRY_ASSIGN(state_.dynamic_k, NewestDynamicK(*store_, all_, last));
  SW_TRY_ASSIGN(const Counts versions, ExpertVersions(plan_, model_.experts));
  std::optional<TokenHistory> history;
  if (state_.counted_to) {
    SW_TRY_ASSIGN(history, ReadHistory(*store_, at_->sequence));
  }
  for (std::size_t m = 0; m < versions.size(); ++m) {
    for (std::size_t e = 0; e < versions[m].size(); ++e) {
      std::uint64_t& held = state_.persist.version[m][e];
      if (versions[m][e] >= held) continue;
      // An older version than the level thinks: what came between is unsaved again.
      const std::uint64_t between = history ? history->Between(m, e, versions[m][e], held) : 0;
      state_.persist.covered[m][e] -= std::min(between, state_.persist.covered[m][e]);
      held = versions[m][e];
    }
  }
  TakePersisted(&state_);
  if (last) ledger_ = last->ledger;
  if (!history) return EnterLoss(std::nullopt);
  if (!ledger_) ledger_ = LossLedger::Make(model_.experts);
  RestoreLoss loss;
  SW_TRY_ASSIGN(loss.fault, ledger_->Charge(*history, versions, plan_.resume));
  const std::uint64_t run = state_.dynamic_k ? state_.dynamic_k->iterations : 0;
  SW_TRY_ASSIGN(const LayerTokens tokens, TokensOfRun(*history, plan_.resume, run));
  SW_TRY_ASSIGN(loss.run, SummarizeLoss(ledger_->layer_lost, tokens));
  SW_TRY_ASSIGN(const LossSummary now, SummarizeLoss(loss.fault.layer, tokens));
  loss.plt = now.plt;
  loss.faults = ledger_->resumes.size();
  SW_TRY(ForgetLost(&state_.persist, loss.fault.lost));
  SW_TRY(ForgetLost(&state_.snapshot, loss.fault.lost));
  report_.loss = std::move(loss);
  return EnterLoss(report_.loss->plt);
}

/// The recovery's share of the budget of dynamic K. The record of this recovery holds the state, so
/// that it is entered when training goes on from here, and once.
Status Restoring::EnterLoss(std::optional<double> plt) {
  if (!state_.dynamic_k) return {};
  SW_TRY(CheckExperts(*state_.dynamic_k, model_.experts));
  if (plt) {
    SW_TRY(EnterRecovery(&*state_.dynamic_k, *plt));
  } else {
    report_.unknown_spent = true;
  }
  const std::uint64_t interval = IntervalBefore(all_, at_->iteration);
  report_.dynamic_k = ReportOf(*state_.dynamic_k, model_.experts, interval, at_->iteration);
  return {};
}

Status Restoring::Write() {
  const dialect::Dialect& format = *options_.format;
  SW_TRY_ASSIGN(const dialect::Layout layout, format.resolve(options_.target, input_.checkpoint));
  SW_TRY_ASSIGN(dialect::Written written,
                ucp::WriteLayout(format, input_.checkpoint, layout, sink_));
  nlohmann::ordered_json head = ucp::ManifestHead("pec-restore", std::string(format.name), input_);
  head["layout"] = ucp::ToJson(layout);
  head["iteration"] = report_.iteration;
  if (!written.not_carried.empty()) head["not_carried"] = written.not_carried;
  // What an output of stale experts is must not be forgotten with the report.
  head["versions"] = nlohmann::ordered_json::object();
  for (const RestoredModule& module : report_.modules) {
    if (module.version != report_.iteration) head["versions"][module.name] = module.version;
  }
  SW_TRY_ASSIGN(report_.convert,
                ucp::RunPlan(comm_, input_, input_.checkpoint.map, written.target, *input_.bytes,
                             head.dump(), "pec " + head["layout"].dump(), options_.write, sink_));
  report_.convert.source = input_.checkpoint.layout;
  report_.convert.target = layout;
  report_.convert.not_carried = std::move(written.not_carried);
  report_.wrote = !options_.write.dry_run;
  return {};
}

Status Restoring::Record() {
  if (options_.read_only || options_.write.dry_run) return {};
  return comm_.OnRoot([&]() -> Status {
    SW_TRY_ASSIGN(const std::optional<RecoveryRecord> last, store_->LastRecovery());
    RecoveryRecord recovery;
    recovery.sequence = last ? last->sequence + 1 : 1;
    recovery.manifest = at_->sequence;
    recovery.resume = plan_.resume;
    for (const StoredCheckpoint& one : all_) {
      // Also those whose place a newer one has taken: they must not come back when it goes.
      if (IsNewer(one)) recovery.abandoned.push_back(one.sequence);
    }
    recovery.state = state_;
    recovery.ledger = ledger_;
    SW_TRY(store_->AddRecovery(recovery));
    return lock_.Release();
  });
}

/// Before agents write anything: a store that cannot be seen must not be made again.
Status Restoring::FindStore() {
  return comm_.OnRoot([&]() -> Status {
    SW_TRY_ASSIGN(const bool there, os::Exists(options_.store));
    if (there || !options_.begin) {
      SW_TRY(Store::HasNoCheckpoint(options_.store));
      return {};
    }
    SW_TRY(ExpectNoCopies());
    if (!options_.write.dry_run) return Store::Begin(options_.store);
    SW_TRY(os::SplitOutput(options_.store));
    return {};
  });
}

Result<bool> Restoring::IsEmptyStore() {
  const auto look = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(const bool there, os::Exists(options_.store));
    if (!there) return "empty";  // a dry run has not made it
    os::Lock lock;
    if (!options_.write.dry_run && !options_.read_only) {
      // A save may be about to complete the first checkpoint.
      SW_TRY_ASSIGN(lock, os::Lock::Take(options_.store + "/lock", "pec-restore"));
    }
    SW_TRY_ASSIGN(const bool empty, Store::HasNoCheckpoint(options_.store));
    SW_TRY(lock.Release());
    if (!empty) return "";
    if (copies_.empty()) return "empty";
    return Fail(Errc::kNotFound, options_.store +
                                     ": has no checkpoint, but an agent has iteration " +
                                     std::to_string(copies_.front().manifest.iteration));
  };
  SW_TRY_ASSIGN(const std::string text, comm_.OnRootText(look));
  return !text.empty();
}

Result<RestoreReport> Restoring::Go() {
  if (options_.allow_empty) SW_TRY(FindStore());
  SW_TRY(AskAgents());
  sink_.Pass("choose");
  if (options_.allow_empty) {
    SW_TRY_ASSIGN(report_.empty, IsEmptyStore());
    if (report_.empty) return std::move(report_);
  }
  if (!options_.write.dry_run && !options_.read_only) {
    // Nothing may be collected or saved between the choice and its record.
    SW_TRY(comm_.OnRoot([&]() -> Status {
      SW_TRY_ASSIGN(const Store store, Store::Open(options_.store));
      SW_TRY_ASSIGN(lock_, store.LockForWriting("pec-restore"));
      return {};
    }));
  }
  if (!options_.restart_missing.empty()) {
    ucp::InputOptions other{{options_.restart_missing}, options_.pattern_files, false};
    SW_TRY_ASSIGN(other_, ucp::OpenInput(comm_, other, sink_));
    SW_TRY_ASSIGN(other_iteration_, other_->checkpoint.iteration);
  }
  const auto choose = [&]() -> Status {
    SW_TRY(OpenStore());
    SW_TRY(DropGivenUp());
    SW_TRY(Choose());
    SW_TRY(TakeLoss());
    return BuildSource();
  };
  SW_TRY(comm_.Agree(choose()));
  for (const std::string& damage : report_.damaged) sink_.Warn(damage);
  if (report_.unknown_spent) {
    sink_.Warn(options_.store +
               ": the tokens were not counted: what this recovery loses is not entered into the "
               "budget of dynamic K");
  }
  if (options_.format != nullptr) SW_TRY(Write());
  SW_TRY(Record());
  return std::move(report_);
}

}  // namespace restore

Result<RestoreReport> RestoreStore(comm::Comm& comm, const RestoreOptions& options, Sink& sink) {
  return restore::Restoring(comm, options, sink).Go();
}

}  // namespace shardwright::pec
