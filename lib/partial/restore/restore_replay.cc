// SPDX-License-Identifier: Apache-2.0
// Modules that are older than X, and the gradients to replay them.

#include <algorithm>
#include <utility>

#include "partial/restore/restore_internal.h"
#include "support/base/text.h"
#include "support/os/dir.h"

namespace shardwright::partial::restore {
namespace {

bool IsOlder(const ChosenModule& chosen, std::uint64_t resume) {
  return std::ranges::any_of(chosen.held, [&](const std::optional<StoredComponent>& held) {
    return held && held->version < resume;
  });
}

/// Opens the log of the store.
/// \returns null if there is none, or if a damaged one is skipped with a report
Result<std::shared_ptr<ReplayLog>> OpenTheLog(const Job& job, const Base& base,
                                              ReplayReport* report) {
  const bool required = job.options.replay == ReplayMode::kRequire;
  const std::string folder = base.store.path() + "/logs";
  SW_TRY_ASSIGN(const bool there, os::Exists(folder));
  if (!there) {
    if (!required) return std::shared_ptr<ReplayLog>();
    return Fail(Errc::kMismatch, folder,
                ": modules are older than the restored iteration, and "
                "the store has no gradient log to replay");
  }
  report->log = true;
  Result<GradientLog> log =
      GradientLog::Open(folder, base.store.head().fingerprint, job.options.write.threads);
  if (!log) {
    // An unreadable log may be readable later; a damaged one stays damaged.
    if (required || log.error().code == Errc::kIo) {
      return tl::unexpected<Error>(std::move(log).error());
    }
    report->refused.push_back(log.error().message);
    return std::shared_ptr<ReplayLog>();
  }
  for (const TornTail& tail : log->torn()) {
    report->torn.push_back(StrCat(tail.path, ": ignored the last ", tail.bytes,
                                  " bytes, which are a truncated record"));
  }
  SW_TRY_ASSIGN(std::vector<RecoveryRecord> recoveries, base.store.RecoveriesAfter(0));
  return std::make_shared<ReplayLog>(ReplayLog{*std::move(log), folder, std::move(recoveries), {}});
}

}  // namespace

bool RoundsMaster(const ChosenModule& chosen, const std::shared_ptr<const ReplayedModule>& replayed,
                  std::uint64_t resume) {
  const std::optional<StoredComponent>& weights = chosen.of(Component::kWeights);
  if (replayed == nullptr || !replayed->makes(Component::kMaster)) return chosen.rounds_master();
  return weights && weights->version < resume;
}

Result<Replays> FindReplays(const Job& job, const Base& base, Chosen* chosen) {
  Replays replays;
  replays.modules.resize(chosen->modules.size());
  replays.report.mode = job.options.replay;
  std::vector<std::size_t> older;
  for (std::size_t i = 0; i < chosen->modules.size(); ++i) {
    if (chosen->modules[i].restarted) continue;
    if (IsOlder(chosen->modules[i], chosen->plan.resume)) older.push_back(i);
  }
  if (older.empty() || job.options.replay == ReplayMode::kNever) return replays;
  SW_TRY_ASSIGN(const std::shared_ptr<ReplayLog> log, OpenTheLog(job, base, &replays.report));
  if (log == nullptr) return replays;
  bool damaged = false;
  for (const std::size_t i : older) {
    const std::string& name = chosen->described.model.modules[i].name;
    Result<ReplayedModule> one =
        FindChain(chosen->described.input.checkpoint, chosen->described.model.modules[i],
                  chosen->modules[i].held, chosen->plan.resume, log.get());
    if (!one) {
      if (one.error().code == Errc::kIo) return tl::unexpected<Error>(std::move(one).error());
      damaged = damaged || one.error().code == Errc::kBadInput;
      replays.report.refused.push_back(name + ": " + one.error().message);
      continue;
    }
    ++replays.report.modules;
    replays.report.bytes += one->bytes;
    replays.modules[i] = std::make_shared<const ReplayedModule>(*std::move(one));
    for (ModuleVersion& version : chosen->plan.versions) {
      if (chosen->described.model.index_of(version.module) == i) {
        version.version = chosen->plan.resume;
      }
    }
  }
  if (job.options.replay == ReplayMode::kRequire && !replays.report.refused.empty()) {
    return Fail(damaged ? Errc::kBadInput : Errc::kMismatch, job.options.store, ": ",
                Plural(replays.report.refused.size(), "module"),
                " cannot be replayed to iteration ", chosen->plan.resume, ": ",
                FirstFew(replays.report.refused));
  }
  replays.log = log;
  return replays;
}

}  // namespace shardwright::partial::restore
