// SPDX-License-Identifier: Apache-2.0
#include "partial/restore/restore.h"

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "partial/restore/restore_internal.h"
#include "partial/store/undo.h"
#include "support/base/text.h"
#include "support/os/dir.h"
#include "support/os/lock.h"

namespace shardwright::partial {
namespace restore {
namespace {

/// Checks the parent directory of the output before agents and the store are read.
/// \error kNotFound  it does not exist
/// Collective.
Status CheckParent(const Job& job) {
  return job.comm.OnRoot([&]() -> Status {
    SW_TRY(os::SplitOutput(job.options.write.output));
    return {};
  });
}

/// Checks the store before agents write: one that is not visible must not be created again.
/// Collective.
Status FindStore(const Job& job) {
  const RestoreOptions& options = job.options;
  return job.comm.OnRoot([&]() -> Status {
    SW_TRY_ASSIGN(const bool there, os::Exists(options.store));
    if (there || !options.begin) {
      SW_TRY(Store::HasNoCheckpoint(options.store));
      return {};
    }
    SW_TRY(ExpectNoCopies(job));
    if (!options.write.dry_run) return Store::Begin(options.store);
    SW_TRY(os::SplitOutput(options.store));
    return {};
  });
}

/// Returns true if neither the store nor an agent has a checkpoint yet.
/// \error kNotFound  an agent has one and the store has none
/// Collective.
Result<bool> IsEmptyStore(const Job& job, const Agents& agents) {
  const std::string& path = job.options.store;
  const auto look = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(const bool there, os::Exists(path));
    if (!there) return "empty";  // a dry run has not made it
    os::Lock lock;
    if (job.notes()) {
      // A save may be about to complete the first checkpoint.
      SW_TRY_ASSIGN(lock,
                    os::Lock::Take(path + "/lock", "pec-restore", job.options.write.take_over));
    }
    SW_TRY_ASSIGN(const bool empty, Store::HasNoCheckpoint(path));
    SW_TRY(lock.Release());
    if (!empty) return "";
    if (agents.copies.empty()) return "empty";
    return Fail(Errc::kNotFound, path, ": the store has no checkpoint, but an agent has iteration ",
                agents.copies.front().manifest.iteration, "; check the path of the store");
  };
  SW_TRY_ASSIGN(const std::string text, job.comm.OnRootText(look));
  return !text.empty();
}

/// Locks the store so that nothing is collected or saved between the choice and its
/// record. Locks nothing on ranks other than the root, or if nothing is recorded.
/// Collective.
Result<os::Lock> LockStore(const Job& job) {
  os::Lock lock;
  if (!job.notes()) return lock;
  SW_TRY(job.comm.OnRoot([&]() -> Status {
    SW_TRY_ASSIGN(const Store store, Store::Open(job.options.store));
    SW_TRY_ASSIGN(lock, store.LockForWriting("pec-restore", job.options.write.take_over));
    return {};
  }));
  return lock;
}

/// Collective.
Result<std::optional<Restart>> OpenRestart(const Job& job) {
  if (job.options.restart_missing.empty()) return std::optional<Restart>();
  convert::InputOptions other;
  other.source_paths = {job.options.restart_missing};
  other.pattern_files = job.options.pattern_files;
  Restart restart;
  SW_TRY_ASSIGN(restart.input, convert::OpenInput(job.comm, other, job.sink));
  SW_TRY_ASSIGN(restart.iteration, restart.input->checkpoint.iteration);
  return std::optional<Restart>(std::move(restart));
}

Result<Base> OpenStore(const Job& job) {
  SW_TRY_ASSIGN(Store store, Store::Open(job.options.store));
  SW_TRY_ASSIGN(std::vector<StoredCheckpoint> all, store.List());
  return Base{std::move(store), std::move(all)};
}

/// Describes a restored module.
/// \param restart_iteration  iteration of the checkpoint that provides restarted experts
RestoredModule RestoredOf(const Module& module, const ChosenModule& chosen,
                          const std::shared_ptr<const ReplayedModule>& replayed,
                          std::uint64_t resume, std::uint64_t restart_iteration) {
  RestoredModule out;
  out.name = module.name;
  out.id = module.id;
  out.version = chosen.restarted ? restart_iteration : resume;
  out.source = chosen.source;
  for (const Component component : kAllComponents) {
    const std::optional<StoredComponent>& held = chosen.of(component);
    if (!held) continue;
    RestoredPart part{held->version, held->blob.bytes, false};
    const bool replays = replayed != nullptr && replayed->makes(component);
    if (component == Component::kWeights && RoundsMaster(chosen, replayed, resume)) {
      part = {chosen.of(Component::kMaster)->version, 0, true};
      if (replayed != nullptr) part.version = resume;
    } else if (replays) {
      part.version = resume;
    }
    out.version = std::min(out.version, part.version);
    out.parts[static_cast<std::size_t>(component)] = part;
  }
  out.replayed_in_memory = chosen.replayed_from;
  if (replayed != nullptr) {
    out.replayed = ReplayedChain{replayed->version, replayed->chain.size(), replayed->bytes};
  }
  return out;
}

/// Makes the part of the report that is known before writing, without the loss.
RestoreReport ReportOf(const Base& base, const std::optional<Restart>& restart,
                       const Chosen& chosen, const Replays& replays) {
  RestoreReport report;
  report.iteration = chosen.plan.resume;
  report.sequence = chosen.at.sequence;
  report.tag = chosen.at.tag;
  report.layer_id = chosen.described.model.layer_id;
  for (std::size_t i = 0; i < chosen.modules.size(); ++i) {
    const ChosenModule& from = chosen.modules[i];
    RestoredModule module = RestoredOf(chosen.described.model.modules[i], from, replays.of(i),
                                       report.iteration, restart ? restart->iteration : 0);
    for (std::size_t c = 0; c < kComponents; ++c) {
      if (!module.parts[c]) continue;
      std::uint64_t& bytes = from.agent[c] == nullptr              ? report.storage_bytes
                             : from.agent[c]->address().is_local() ? report.memory_bytes
                                                                   : report.peer_bytes;
      bytes += module.parts[c]->bytes;
    }
    report.stale_modules += module.version < report.iteration ? 1 : 0;
    report.restarted_modules += from.restarted ? 1 : 0;
    report.modules.push_back(std::move(module));
  }
  for (const StoredCheckpoint& one : base.all) {
    if (!one.abandoned && IsNewer(one, chosen)) report.abandoned.push_back(one.iteration);
  }
  report.damaged = chosen.damaged;
  report.replay = replays.report;
  report.replay.in_memory = static_cast<std::uint64_t>(std::ranges::count_if(
      chosen.modules, [](const ChosenModule& module) { return module.replayed_from.has_value(); }));
  return report;
}

Status RefuseStale(const std::string& store, const RestoreReport& report) {
  std::vector<std::string> names;
  for (const RestoredModule& module : report.modules) {
    if (module.version < report.iteration) {
      names.push_back(StrCat(module.name, " (", module.version, ")"));
    }
  }
  if (names.empty()) return {};
  return Fail(Errc::kMismatch, store, ": ", Plural(names.size(), "module"),
              names.size() == 1 ? " is" : " are", " older than iteration ", report.iteration, ": ",
              FirstFew(names));
}

/// Makes the store's record that training resumes from
/// here. Its sequence is assigned when it is written.
RecoveryRecord RecordOf(const Base& base, const Chosen& chosen, const RestoreReport& report,
                        const Loss& loss) {
  RecoveryRecord record;
  record.manifest = chosen.at.sequence;
  record.resume = chosen.plan.resume;
  for (const StoredCheckpoint& one : base.all) {
    // Also replaced ones of the same iteration: they must not reappear later.
    if (IsNewer(one, chosen)) record.abandoned.push_back(one.sequence);
  }
  record.state = loss.state;
  record.ledger = loss.ledger;
  record.older.emplace();
  for (const RestoredModule& module : report.modules) {
    if (module.version < report.iteration) (*record.older)[module.name] = module.version;
  }
  return record;
}

/// Results that every rank computes itself before anything is written.
struct Prepared {
  Base base;
  RestoreReport report;
  RecoveryRecord record;
  std::unique_ptr<convert::Input> source;
};

/// Runs the passes in which ranks do not wait for each other.
/// Local.
Result<Prepared> Prepare(const Job& job, const std::optional<Restart>& restart,
                         std::vector<AgentCopy> copies) {
  SW_TRY_ASSIGN(Base base, OpenStore(job));
  SW_TRY_ASSIGN(Candidates candidates, FindCandidates(job, base, std::move(copies)));
  SW_TRY_ASSIGN(Chosen chosen, Choose(job, base, restart, std::move(candidates)));
  SW_TRY_ASSIGN(const Replays replays, FindReplays(job, base, &chosen));
  RestoreReport report = ReportOf(base, restart, chosen, replays);
  if (job.options.require_complete) SW_TRY(RefuseStale(job.options.store, report));
  SW_TRY_ASSIGN(const Loss loss, CountLoss(base, chosen));
  report.loss = loss.loss;
  report.dynamic_k = loss.dynamic_k;
  report.unknown_spent = loss.unknown_spent;
  RecoveryRecord record = RecordOf(base, chosen, report, loss);
  SW_TRY_ASSIGN(BlobMap blobs, MapBlobs(job, base, restart, chosen, replays));
  auto source =
      SourceOf(job, std::move(chosen.described.input), std::move(blobs), restart, replays);
  return Prepared{std::move(base), std::move(report), std::move(record), std::move(source)};
}

/// Warns about problems that do not stop the restore.
void Warn(const Job& job, const RestoreReport& report) {
  for (const std::string& damage : report.damaged) job.sink.Warn(damage);
  for (const std::string& torn : report.replay.torn) job.sink.Warn(torn);
  if (!report.replay.refused.empty()) {
    job.sink.Warn(StrCat(job.options.store, ": not replayed: ", FirstFew(report.replay.refused)));
  }
  if (report.loss && report.loss->run.plt > kPltLimit) {
    job.sink.Warn(
        StrCat(job.options.store, ": the run has lost ", Fixed(100 * report.loss->run.plt, 3),
               " % of its tokens, more than ", Fixed(100 * kPltLimit, 3),
               " %, above which accuracy suffers: save more experts (--k) or more often"));
  }
  if (report.unknown_spent) {
    job.sink.Warn(job.options.store +
                  ": the tokens lost by this restore are unknown, because the saves had no token "
                  "counts; the budget of dynamic K does not include them");
  }
}

/// Writes the source in the requested layout.
/// Collective.
Result<convert::ConvertReport> Write(const Job& job, const RestoreReport& report,
                                     convert::Input& source) {
  const checkpoints::Format& format = *job.options.format;
  SW_TRY_ASSIGN(const checkpoints::Layout layout,
                format.resolve(job.options.target, source.checkpoint));
  SW_TRY_ASSIGN(checkpoints::Written written,
                convert::WriteLayout(format, source.checkpoint, layout, job.sink));
  SW_TRY(convert::CheckCarried(job.options.write, written.not_carried));
  convert::WarnIfNoConfig(format, written.target, job.sink);
  const auto no_config = []() -> Result<std::string> { return std::string(); };
  SW_TRY_ASSIGN(const convert::OtherNames names,
                convert::FindOtherNames(source.checkpoint, source.patterns, format,
                                        job.options.target, no_config));
  if (!names.flags.empty()) {
    job.sink.Warn(StrCat(names.what,
                         "; restore without --format, then run ucp-load on the output "
                         "with --format ",
                         format.name, " ", Joined(names.flags, " or ")));
  }
  nlohmann::ordered_json head =
      convert::ManifestHead("pec-restore", std::string(format.name), source);
  convert::DescribeLayout(layout, &head);
  head["iteration"] = report.iteration;
  if (!written.not_carried.empty()) head["not_carried"] = written.not_carried;
  // The output must record the versions of stale experts permanently.
  head["versions"] = nlohmann::ordered_json::object();
  for (const RestoredModule& module : report.modules) {
    if (module.version != report.iteration) head["versions"][module.name] = module.version;
    if (!module.replayed) continue;
    if (!head.contains("replayed")) head["replayed"] = nlohmann::ordered_json::object();
    head["replayed"][module.name] = module.replayed->version;
  }
  exec::Identity identity = convert::RunIdentity(source);
  convert::AddLayout(format, layout, &identity);
  SW_TRY_ASSIGN(
      convert::ConvertReport done,
      convert::RunPlan(job.comm, source, source.checkpoint.map, written.target, *source.bytes,
                       head.dump(), std::move(identity), job.options.write, job.sink));
  done.source = source.checkpoint.layout;
  done.target = layout;
  done.not_carried = std::move(written.not_carried);
  return done;
}

/// Explains the effect of a restart at the report's iteration on newer checkpoints.
void ExplainRestart(const Job& job, const RestoreReport& report) {
  const std::string& store = job.options.store;
  const bool newer = !report.abandoned.empty();
  if (job.recorded()) {
    if (!newer) return;
    job.sink.Warn(AbandonedText(store, report.iteration, report.abandoned));
    return;
  }
  job.sink.Note(
      store +
          ": the restart is recorded when the next save confirms it; --restart records it "
          "at once, --read-only never" +
          (newer ? "; it would abandon the newer checkpoints " + FewIterations(report.abandoned)
                 : ""),
      newer ? 0 : 1);
}

/// Records the restart, or a pending restore, and unlocks the store.
/// Collective.
Status Note(const Job& job, const Store& store, RecoveryRecord record, const RestoreReport& report,
            os::Lock* lock) {
  if (!job.notes()) return {};
  return job.comm.OnRoot([&]() -> Status {
    SW_TRY(lock->Check());
    SW_TRY(job.recorded() ? store.AddRestart(std::move(record)) : store.PutPending(record));
    ExplainRestart(job, report);
    return lock->Release();
  });
}

/// A restore with its plan, and the lock of its store. The plan refers to `restart`.
struct Begun {
  os::Lock lock;
  std::optional<Restart> restart;
  std::optional<Prepared> prepared;  ///< set
};

/// Locks the store and plans the restore. Asks the agents again if one has meanwhile replaced a
/// copy that it had listed, as it does when another agent sends it a newer one. Collective.
Result<std::unique_ptr<Begun>> Begin(const Job& job, Agents* agents) {
  constexpr int kTries = 5;
  for (int i = 1;; ++i) {
    auto begun = std::make_unique<Begun>();
    SW_TRY_ASSIGN(begun->lock, LockStore(job));
    SW_TRY_ASSIGN(begun->restart, OpenRestart(job));
    const bool copies = !agents->copies.empty();
    const auto prepare = [&] {
      const Interruptible planning(job.sink);
      return Prepare(job, begun->restart, std::move(agents->copies));
    };
    Result<Prepared> prepared = job.comm.Agree(prepare());
    if (prepared) {
      begun->prepared = *std::move(prepared);
      return begun;
    }
    if (!copies || prepared.error().code != Errc::kNotFound || i == kTries) {
      return tl::unexpected<Error>(std::move(prepared).error());
    }
    // Agents lock the store before they answer.
    SW_TRY(job.comm.Agree(begun->lock.Release()));
    SW_TRY_ASSIGN(*agents, AskAgents(job));
  }
}

}  // namespace
}  // namespace restore

std::string_view Name(ReplayMode mode) {
  switch (mode) {
    case ReplayMode::kAuto:
      return "auto";
    case ReplayMode::kNever:
      return "never";
    case ReplayMode::kRequire:
      break;
  }
  return "require";
}

Result<RestoreReport> RestoreStore(comm::Comm& comm, const RestoreOptions& options, Sink& sink,
                                   const UseRestored& use) {
  const restore::Job job{comm, options, sink};
  if (options.format != nullptr) SW_TRY(restore::CheckParent(job));
  if (options.allow_empty) SW_TRY(restore::FindStore(job));
  SW_TRY_ASSIGN(restore::Agents agents, restore::AskAgents(job));
  sink.Pass("choose");
  RestoreReport report;
  if (options.allow_empty) {
    SW_TRY_ASSIGN(report.empty, restore::IsEmptyStore(job, agents));
  }
  if (!report.empty) {
    SW_TRY_ASSIGN(const std::unique_ptr<restore::Begun> begun, restore::Begin(job, &agents));
    restore::Prepared& prepared = *begun->prepared;
    // Ranks have read the store separately, and it may have grown in between.
    const std::string seen = convert::FingerprintText(*prepared.source);
    SW_TRY_ASSIGN(const std::string of_root,
                  comm.OnRootText([&]() -> Result<std::string> { return seen; }));
    SW_TRY(comm.Agree(seen == of_root ? Status()
                                      : Fail(Errc::kMismatch, options.store,
                                             ": ranks read different versions or gradients, "
                                             "because the store changed; run the command again")));
    report = std::move(prepared.report);
    report.recorded = job.notes() && job.recorded();
    restore::Warn(job, report);
    if (options.format != nullptr) {
      SW_TRY_ASSIGN(report.convert, restore::Write(job, report, *prepared.source));
      report.wrote = !options.write.dry_run;
    }
    if (use) SW_TRY(use(std::move(prepared.source), report));
    SW_TRY(
        restore::Note(job, prepared.base.store, std::move(prepared.record), report, &begun->lock));
  }
  report.lost_nodes = std::move(agents.lost_nodes);
  report.lost_agents = std::move(agents.lost_agents);
  return report;
}

}  // namespace shardwright::partial
