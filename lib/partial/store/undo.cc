// SPDX-License-Identifier: Apache-2.0
#include "partial/store/undo.h"

#include <algorithm>
#include <set>
#include <utility>

#include "partial/store/dynamic_run.h"
#include "partial/store/store.h"
#include "support/base/text.h"

namespace shardwright::partial {
namespace {

/// Returns the restart that replaces `last`: at the newest
/// checkpoint that no earlier restart has abandoned.
Result<RecoveryRecord> WithoutEffect(const Store& store, const RecoveryRecord& last,
                                     const std::vector<StoredCheckpoint>& checkpoints) {
  RecoveryRecord out;
  out.sequence = last.sequence;
  std::set<std::uint64_t> before;
  SW_TRY_ASSIGN(const std::vector<RecoveryRecord> recoveries, store.RecoveriesAfter(0));
  for (const RecoveryRecord& one : recoveries) {
    if (one.sequence >= last.sequence) continue;
    before.insert(one.abandoned.begin(), one.abandoned.end());
    out.ledger = one.ledger;
  }
  for (const StoredCheckpoint& one : checkpoints) {
    if (before.contains(one.sequence)) continue;
    SW_TRY_ASSIGN(const ManifestLines manifest, store.ReadManifestLines(one));
    out.manifest = one.sequence;
    out.resume = one.iteration;
    out.state = manifest.head.state;
  }
  out.older.emplace();
  return out;
}

Result<Undone> UndoRecorded(const Store& store) {
  SW_TRY_ASSIGN(const std::optional<RecoveryRecord> last, store.LastRecovery());
  if (!last) return Fail(Errc::kNotFound, store.path(), ": no restore is recorded");
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> checkpoints, store.List());
  for (const StoredCheckpoint& one : checkpoints) {
    const bool older = one.sequence <= last->manifest ||
                       std::ranges::find(last->abandoned, one.sequence) != last->abandoned.end();
    if (older) continue;
    return Fail(Errc::kBusy, store.path(), ": iteration ", one.iteration,
                " was saved after the restart from iteration ", last->resume,
                "; to go back to an abandoned checkpoint, restore it from a copy of the store");
  }
  SW_TRY_ASSIGN(const RecoveryRecord replaced, WithoutEffect(store, *last, checkpoints));
  if (ToText(replaced) == ToText(*last)) {
    return Fail(Errc::kNotFound, store.path(),
                ": nothing to undo: the last restart is undone already, or it abandoned nothing");
  }
  SW_TRY(store.AddRecovery(replaced));
  Undone out;
  out.resume = last->resume;
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> now, store.List());
  out.reinstated = AbandonedOnlyIn(checkpoints, now);
  out.newest = NewestIteration(now);
  return out;
}

}  // namespace

std::string FewIterations(const std::vector<std::uint64_t>& iterations) {
  std::vector<std::string> words;
  words.reserve(iterations.size());
  for (const std::uint64_t one : iterations) words.push_back(std::to_string(one));
  return FirstFew(words);
}

std::string AbandonedText(const std::string& store, std::uint64_t resume,
                          const std::vector<std::uint64_t>& abandoned) {
  return StrCat(store, ": training restarts from iteration ", resume, "; the newer checkpoints ",
                FewIterations(abandoned), " are abandoned; pec-save undo reverts this");
}

std::vector<std::uint64_t> AbandonedOnlyIn(const std::vector<StoredCheckpoint>& list,
                                           const std::vector<StoredCheckpoint>& other) {
  std::set<std::uint64_t> usable;
  for (const StoredCheckpoint& one : other) {
    if (!one.abandoned) usable.insert(one.sequence);
  }
  std::vector<std::uint64_t> iterations;
  for (const StoredCheckpoint& one : list) {
    if (one.abandoned && usable.contains(one.sequence)) iterations.push_back(one.iteration);
  }
  std::sort(iterations.begin(), iterations.end());
  return iterations;
}

Result<Undone> UndoRestart(const std::string& path, bool take_over) {
  SW_TRY_ASSIGN(const Store store, Store::Open(path));
  SW_TRY_ASSIGN(os::Lock lock, store.LockForWriting("pec-save undo", take_over));
  SW_TRY_ASSIGN(const std::optional<RecoveryRecord> pending, store.Pending());
  Undone out;
  if (pending) {
    SW_TRY(store.DropPending());
    SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> checkpoints, store.List());
    out = {true, pending->resume, NewestIteration(checkpoints), {}, {}};
  } else {
    SW_TRY_ASSIGN(out, UndoRecorded(store));
  }
  SW_TRY(lock.Release());
  return out;
}

Result<Undone> ConfirmRestart(const std::string& path, bool take_over) {
  SW_TRY_ASSIGN(const Store store, Store::Open(path));
  SW_TRY_ASSIGN(os::Lock lock, store.LockForWriting("pec-save undo", take_over));
  SW_TRY_ASSIGN(const std::optional<RecoveryRecord> pending, store.Pending());
  if (!pending) return Fail(Errc::kNotFound, path, ": no restore waits to be confirmed");
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> before, store.List());
  SW_TRY(store.ConfirmPending());
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> after, store.List());
  SW_TRY(lock.Release());
  return Undone{true, pending->resume, pending->resume, {}, AbandonedOnlyIn(after, before)};
}

}  // namespace shardwright::partial
