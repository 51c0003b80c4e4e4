// SPDX-License-Identifier: Apache-2.0
// Reads the state of the store at the beginning of a save.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <utility>

#include "checkpoints/registry.h"
#include "partial/save/save_internal.h"
#include "partial/store/dynamic_run.h"
#include "partial/store/undo.h"

namespace shardwright::partial::save {
namespace {

/// Sequences of the checkpoint that a new one continues; 0: none.
struct Numbers {
  std::uint64_t sequence = 0;
  std::uint64_t iteration = 0;
  std::uint64_t next = 1;
};

std::string Pack(const Numbers& numbers) {
  return std::to_string(numbers.sequence) + " " + std::to_string(numbers.iteration) + " " +
         std::to_string(numbers.next);
}

Numbers Unpack(const std::string& text) {
  unsigned long long a = 0;
  unsigned long long b = 0;
  unsigned long long c = 0;
  SW_CHECK(std::sscanf(text.c_str(), "%llu %llu %llu", &a, &b, &c) == 3);
  return {a, b, c};
}

/// Returns the first difference between the models of a store's newest
/// checkpoint and a source; empty if that checkpoint cannot be read.
std::string DifferenceOf(const Store& store, const convert::Input& input) {
  const auto checkpoints = store.List();
  if (!checkpoints || checkpoints->empty()) return "";
  const auto newest = store.ReadManifestLines(checkpoints->back());
  if (!newest) return "";
  const auto set = store.ReadCatalogue(newest->head);
  if (!set) return "";
  const auto before = checkpoints::ReadCheckpoint(*set, input.patterns);
  return before ? ": " + FirstDifference(*before, input.checkpoint) : "";
}

Status CheckKeep(const Job& job, const StoreHead& head) {
  if (!job.options.keep || *job.options.keep == head.keep) return {};
  return Fail(Errc::kMismatch, job.options.store, ": the store was created with --keep ",
              KeepText(head.keep), ", found --keep ", KeepText(*job.options.keep));
}

/// Checks the flags of a save that decides whether training has restarted: it decides nothing if
/// they are wrong.
Status CheckFlags(const Job& job, const Store& store,
                  const std::vector<StoredCheckpoint>& checkpoints) {
  SW_TRY(CheckKeep(job, store.head()));
  const bool any = std::ranges::any_of(checkpoints, [](const auto& one) { return !one.abandoned; });
  return any && !store.head().experts.empty() ? CheckTokens(job.options) : Status();
}

/// Returns true if a restart at an iteration abandons a checkpoint.
bool Dropped(std::optional<std::uint64_t> resume, const StoredCheckpoint& checkpoint) {
  return resume && checkpoint.iteration > *resume;
}

/// Returns true if the save continues from an unconfirmed restore (Store::Pending).
/// \error kBusy  it may continue from the restore or from the newest checkpoint
Result<bool> ContinuesPending(const Job& job, const Subject& subject,
                              const std::vector<StoredCheckpoint>& checkpoints,
                              const RecoveryRecord& pending) {
  const SaveRequest& options = job.options;
  if (options.resumed_from) return *options.resumed_from == pending.resume;
  const std::uint64_t newest = NewestIteration(checkpoints);
  if (options.continues && *options.continues == newest) return false;
  if (subject.iteration <= pending.resume) return false;
  // An agent's snapshot is older than a restart recorded now, so it cannot confirm one.
  const bool can_confirm = options.snapshotted == nullptr;
  if (newest <= pending.resume) return can_confirm;
  if (subject.iteration <= newest && can_confirm) return true;
  return Fail(Errc::kBusy, options.store, ": iteration ", subject.iteration,
              " may continue iteration ", pending.resume,
              ", which pec-restore wrote last, or iteration ", newest,
              ", the newest checkpoint; if training restarted from iteration ", pending.resume,
              ", run pec-save undo --confirm ", options.store, ", otherwise pec-save undo ",
              options.store, "; pec-restore --restart or --read-only decides this in advance");
}

/// Reads the store's list again after a restart, and warns about the checkpoints that the restart
/// has abandoned.
Status ReadAfterRestart(const Job& job, const Store& store, std::uint64_t resume,
                        std::vector<StoredCheckpoint>* checkpoints) {
  SW_TRY_ASSIGN(std::vector<StoredCheckpoint> after, store.List());
  const std::vector<std::uint64_t> abandoned = AbandonedOnlyIn(after, *checkpoints);
  if (!abandoned.empty()) job.sink.Warn(AbandonedText(store.path(), resume, abandoned));
  *checkpoints = std::move(after);
  return {};
}

/// Confirms or discards an unconfirmed restore.
/// \param checkpoints  the store's list, which this updates
/// \returns the iteration that training resumed from, if this is the first save after that
/// \error as ContinuesPending
Result<std::optional<std::uint64_t>> DecidePending(const Job& job, const Subject& subject,
                                                   const Store& store,
                                                   std::vector<StoredCheckpoint>* checkpoints) {
  SW_TRY_ASSIGN(const std::optional<RecoveryRecord> pending, store.Pending());
  if (!pending) return std::optional<std::uint64_t>();
  SW_TRY_ASSIGN(const bool continues, ContinuesPending(job, subject, *checkpoints, *pending));
  // ReadBase rejects such a save, so it decides nothing.
  const bool too_old =
      !continues && !job.options.resumed_from && NewestIteration(*checkpoints) > subject.iteration;
  if (!job.options.dry_run && !too_old) {
    SW_TRY(continues ? store.ConfirmPending() : store.DropPending());
  }
  if (!continues) return std::optional<std::uint64_t>();
  SW_TRY(ReadAfterRestart(job, store, pending->resume, checkpoints));
  return std::optional(pending->resume);
}

/// Records that training has resumed from an iteration, as --resumed-from states.
/// \param checkpoints  the store's list, which this updates
Status AbandonNewer(const Job& job, const Store& store,
                    std::vector<StoredCheckpoint>* checkpoints) {
  const SaveRequest& options = job.options;
  if (options.dry_run) return {};
  RecoveryRecord recovery;
  std::optional<StoredCheckpoint> base;
  bool news = false;
  for (const StoredCheckpoint& one : *checkpoints) {
    if (Dropped(options.resumed_from, one)) {
      recovery.abandoned.push_back(one.sequence);
      news = news || !one.abandoned;
    } else if (!one.abandoned) {
      base = one;
    }
  }
  // The store has nothing newer, but agents may have newer checkpoints in memory.
  if (!news && !base) return {};
  SW_TRY_ASSIGN(const std::optional<RecoveryRecord> last, store.LastRecovery());
  recovery.sequence = last ? last->sequence + 1 : 1;
  recovery.resume = *options.resumed_from;
  if (last) recovery.ledger = last->ledger;
  if (base) {
    recovery.manifest = base->sequence;
    if (last && last->manifest == base->sequence) {
      recovery.state = last->state;
    } else {
      SW_TRY_ASSIGN(const ManifestLines manifest, store.ReadManifestLines(*base));
      recovery.state = manifest.head.state;
    }
    SW_TRY_ASSIGN(recovery.state.dynamic_k, NewestDynamicK(store, *checkpoints, last));
  }
  SW_TRY(store.AddRecovery(recovery));
  return ReadAfterRestart(job, store, recovery.resume, checkpoints);
}

/// Finds the modules of the newest checkpoint with a missing blob. Root.
Result<std::vector<std::uint32_t>> FindLost(const Subject& subject, Base* base) {
  std::vector<std::uint32_t> lost;
  if (!base->newest) return lost;
  std::vector<std::string> others;
  SW_TRY_ASSIGN(const std::vector<BlobFile> blobs, base->store->ListBlobs(&others));
  const std::set<BlobFile> there(blobs.begin(), blobs.end());
  for (std::uint32_t i = 0; i < subject.model.modules.size(); ++i) {
    SW_TRY_ASSIGN(const StoredModule module, NewestOf(base, subject.model, i));
    const bool whole = std::ranges::all_of(module, [&](const std::optional<StoredComponent>& part) {
      return !part || there.contains({part->blob.digest, part->blob.zstd}) ||
             there.contains({part->blob.digest, !part->blob.zstd});
    });
    if (!whole) lost.push_back(i);
  }
  return lost;
}

/// Runs the part of rank 0: opens or creates the store and locks it.
Result<Numbers> Look(const Job& job, const Subject& subject, os::Lock* lock) {
  const SaveRequest& options = job.options;
  const Model& model = subject.model;
  Numbers numbers;
  SW_TRY_ASSIGN(const bool there, Store::IsStore(options.store));
  SW_TRY(ExpectStore(options));
  if (!there && options.dry_run) return numbers;
  StoreHead head{model.fingerprint,
                 model.modules.size(),
                 model.experts,
                 model.layer_id,
                 options.keep.value_or(KeptComponents{}),
                 ""};
  SW_TRY_ASSIGN(Store store, Store::OpenOrCreate(options.store, head));
  if (!options.dry_run) {
    SW_TRY_ASSIGN(*lock, store.LockForWriting("pec-save", options.take_over));
  }
  SW_TRY(CheckPast(job, subject, store));
  SW_TRY_ASSIGN(std::vector<StoredCheckpoint> checkpoints, store.List());
  // ReadBase fails for another model's store, which must not be changed before.
  std::optional<std::uint64_t> resume = options.resumed_from;
  if (store.head().fingerprint == model.fingerprint) {
    SW_TRY(CheckFlags(job, store, checkpoints));
    SW_TRY_ASSIGN(const std::optional<std::uint64_t> confirmed,
                  DecidePending(job, subject, store, &checkpoints));
    if (confirmed) {
      resume = confirmed;
    } else if (options.resumed_from) {
      SW_TRY(AbandonNewer(job, store, &checkpoints));
    }
  }
  for (const StoredCheckpoint& one : checkpoints) {
    if (one.abandoned || Dropped(resume, one)) continue;
    numbers.sequence = one.sequence;
    numbers.iteration = one.iteration;
  }
  SW_TRY_ASSIGN(numbers.next, store.NextSequence());
  return numbers;
}

/// An iteration that is saved again repeats its selection, because
/// a job script may not know that a killed save was complete.
Status FindParent(const Subject& subject, Base* base) {
  if (!base->newest) return {};
  const Manifest& newest = base->newest->head;
  if (newest.iteration != subject.iteration) {
    base->continues_newest = true;
    return {};
  }
  if (newest.parent == 0) return {};
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> checkpoints, base->store->List());
  for (const StoredCheckpoint& one : checkpoints) {
    if (one.sequence != newest.parent) continue;
    SW_TRY_ASSIGN(base->earlier, base->store->ReadManifestLines(one));
    return {};
  }
  base->continues_newest = true;  // the parent was collected since
  return {};
}

/// Runs the part of every rank.
Status ReadBase(const Job& job, const Subject& subject, const Numbers& numbers, Base* base) {
  const std::string& path = job.options.store;
  SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
  if (!there) return {};
  SW_TRY_ASSIGN(Store store, Store::Open(path));
  base->store.emplace(std::move(store));
  base->keep = base->store->head().keep;
  if (numbers.sequence != 0) {
    SW_TRY_ASSIGN(base->newest,
                  base->store->ReadManifestLines({numbers.sequence, numbers.iteration, false}));
  }
  SW_TRY(ExpectModel(*base->store, job.input, subject.model));
  SW_TRY(FindParent(subject, base));
  if (base->newest && base->newest->head.iteration > subject.iteration) {
    return Fail(Errc::kMismatch, path, ": the store is at iteration ", base->newest->head.iteration,
                ", this checkpoint has iteration ", subject.iteration,
                "; restore the store with pec-restore, or pass --resumed-from with the iteration "
                "that training resumed from");
  }
  return {};
}

}  // namespace

Result<Base> FindBase(const Job& job, const Subject& subject) {
  Base base;
  base.keep = job.options.keep.value_or(KeptComponents{});
  const auto look = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(const Numbers numbers, Look(job, subject, &base.lock));
    return Pack(numbers);
  };
  SW_TRY_ASSIGN(const std::string text, job.comm.OnRootText(look));
  const Numbers numbers = Unpack(text);
  base.sequence = numbers.next;
  SW_TRY(job.comm.Agree(ReadBase(job, subject, numbers, &base)));
  const auto find = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(const std::vector<std::uint32_t> lost, FindLost(subject, &base));
    const auto* const bytes = reinterpret_cast<const char*>(lost.data());
    return std::string(bytes, lost.size() * sizeof(std::uint32_t));
  };
  SW_TRY_ASSIGN(const std::string lost, job.comm.OnRootText(find));
  base.lost.resize(lost.size() / sizeof(std::uint32_t));
  if (!lost.empty()) std::memcpy(base.lost.data(), lost.data(), lost.size());
  return base;
}

Status ExpectModel(const Store& store, const convert::Input& input, const Model& model) {
  const exec::Digest& expected = store.head().fingerprint;
  if (expected == model.fingerprint) return {};
  return Fail(Errc::kMismatch, store.path(), " and ", input.checkpoint.tag,
              ": another model: expected fingerprint ", exec::Hex(expected), ", found ",
              exec::Hex(model.fingerprint), DifferenceOf(store, input));
}

Result<StoredModule> NewestOf(Base* base, const Model& model, std::uint32_t module) {
  if (!base->newest) return StoredModule();
  const ManifestLines& newest = *base->newest;
  base->modules.resize(model.modules.size());
  std::optional<StoredModule>& held = base->modules[module];
  if (!held) {
    SW_TRY_ASSIGN(held, ParseModule(newest.lines[module], model.modules[module].name,
                                    base->store->ManifestPath(
                                        {newest.head.sequence, newest.head.iteration, false})));
  }
  return *held;
}

Status CheckPast(const Job& job, const Subject& subject, const Store& store) {
  if (job.options.snapshotted == nullptr) return {};
  return store.CheckPast(job.options.snapshotted->recovery, subject.iteration, "the snapshot");
}

}  // namespace shardwright::partial::save
