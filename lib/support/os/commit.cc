// SPDX-License-Identifier: Apache-2.0
// The commit protocol. Each step has a fault point of the same name, passed before the step.
//
//   1 commit.lock         lock OUTPUT.lock; restore an output that a killed run moved aside; fail
//                         if OUTPUT exists without --force
//   2 commit.stage        find or remove the stage of a stopped run; without one make
//                         OUTPUT.partial-<run>, for this user only, and its .journal. The caller
//                         then writes into it
//   3 commit.sync         sync each file and each directory, as far as the caller has not
//   4 commit.manifest     write and sync the manifest, sync the directory that contains it
//   5 commit.verify       read the stage again, if requested
//   6 commit.rename       move .journal out, to OUTPUT.partial-<run>.journal; give the stage the
//                         permissions of .journal, which are those of new directories here, and
//                         OUTPUT's name. If OUTPUT exists, both names are exchanged in one call. If
//                         the file system cannot do that, OUTPUT is renamed to
//                         OUTPUT.partial-<run>.old first
//   7 commit.sync_parent  sync the parent
//   8 commit.release      remove the old output and the journal, remove and free the lock
//
// After a kill before step 6, a stage with .journal remains, which the next run continues. Later
// the directory of that name is the finished stage or, after an exchange, the old output. If OUTPUT
// is missing, it is the stage and gets its journal back. Otherwise Recover removes it. If there are
// OUTPUT, the stage and an old output that was moved aside, then OUTPUT is another program's.
//
// If other users can write to the parent, any of these names may be theirs. A run never continues,
// restores, removes or writes to their files (Directory::WhyForeign, WhyShared).

#include "support/os/commit.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "support/base/bytes.h"
#include "support/base/system.h"
#include "support/os/dir.h"
#include "support/os/directory.h"
#include "support/os/fault.h"
#include "support/os/io_threads.h"
#include "support/os/sys_internal.h"

namespace shardwright::os {

namespace {

constexpr std::string_view kPartial = ".partial-";
constexpr std::string_view kOld = ".old";
constexpr std::string_view kJournal = ".journal";
constexpr std::uint32_t kOwnMode = 0700;

bool IsRunId(std::string_view id) {
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
  };
  return !id.empty() && id.size() <= 64 && std::all_of(id.begin(), id.end(), fits);
}

Status RefuseOddOutput(const Directory& parent, const std::string& name, bool force) {
  SW_TRY_ASSIGN(const std::optional<NameStatus> there, parent.Look(name));
  if (!there) return {};
  const std::string output = parent.PathOf(name);
  if (there->type == EntryType::kSymlink) {
    return Fail(Errc::kBusy, output,
                ": is a symbolic link, which is never replaced; choose another name");
  }
  if (there->type != EntryType::kDir) {
    return Fail(Errc::kBusy, output,
                ": already exists and is not a directory; choose another name");
  }
  if (!force) return Fail(Errc::kBusy, output, ": already exists; pass --force to replace it");
  return {};
}

Status RefuseOddFile(const Directory& parent, const std::string& name, bool force) {
  SW_TRY_ASSIGN(const std::optional<NameStatus> there, parent.Look(name));
  if (!there) return {};
  const std::string file = parent.PathOf(name);
  if (there->type != EntryType::kFile) {
    return Fail(Errc::kBusy, file,
                ": already exists and is not a regular file; choose another name");
  }
  if (!force) return Fail(Errc::kBusy, file, ": already exists; pass --force to replace it");
  return {};
}

/// Opens a stage that belongs to this user and that others may not write to.
Result<Directory> OpenOwnStage(const Directory& parent, const std::string& name) {
  SW_TRY_ASSIGN(Directory stage, parent.OpenDir(name));
  SW_TRY_ASSIGN(const NameStatus self, stage.Self());
  std::string why = parent.WhyForeign(self);
  if (!why.empty()) {
    why += "; without --resume the run starts again and leaves it alone";
  } else if (why = parent.WhyExposed(self); !why.empty()) {
    why += "; check it and close it with chmod go-w, or pass --no-resume to start again";
  }
  if (why.empty()) return stage;
  return Fail(Errc::kBusy, stage.path(), ": not resumed: ", why);
}

}  // namespace

Result<std::string> MakeRunId() {
  auto id = RandomHex(8);
  if (!id) return Within("run id", std::move(id).error());
  return id;
}

Result<Stage> Stage::Begin(const std::string& output, const StageOptions& options) {
  if (!IsRunId(options.run_id)) {
    return Fail(Errc::kUsage, "run id ", EscapedName(options.run_id),
                " is not 1 to 64 letters, digits, \"_\" or \"-\"");
  }
  SW_TRY_ASSIGN(const ParentName split, SplitOutput(output));
  Stage stage;
  stage.name_ = split.name;
  stage.output_ = split.Path();
  stage.run_id_ = options.run_id;
  stage.force_ = options.force;
  const std::size_t longest =
      split.name.size() + kPartial.size() + options.run_id.size() + kJournal.size();
  if (longest > kNameMax) {
    return Fail(Errc::kUsage, output,
                ": the name leaves no room for the suffixes of a stage: ", kNameMax,
                " bytes at most, needs ", longest);
  }
  SW_TRY_ASSIGN(stage.parent_, Directory::Open(split.parent));
  SW_TRY(FaultPoint("commit.lock"));
  SW_TRY_ASSIGN(stage.lock_, Lock::Take(stage.parent_, split.name + ".lock",
                                        "run " + options.run_id, options.take_over));
  SW_TRY(stage.Recover());
  SW_TRY(RefuseOddOutput(stage.parent_, stage.name_, options.force));
  SW_TRY(stage.Enter(options));
  SW_TRY(stage.RefuseImmovable());
  return stage;
}

/// A directory with the name of a stage, an old output or a journal of OUTPUT.
struct Stage::Leftover {
  std::string id;
  std::string name;
  std::string why;  // reason to keep it; empty if it is this user's
};

Result<std::vector<Stage::Leftover>> Stage::Leftovers(std::string_view suffix) const {
  SW_TRY_ASSIGN(const std::vector<Entry> entries, parent_.List());
  const std::string prefix = name_ + std::string(kPartial);
  std::vector<Leftover> found;
  std::optional<std::string> shared;
  for (const Entry& entry : entries) {
    std::string_view id = entry.name;
    if (entry.type != EntryType::kDir || !id.starts_with(prefix)) continue;
    id.remove_prefix(prefix.size());
    if (!id.ends_with(suffix)) continue;
    id.remove_suffix(suffix.size());
    if (!IsRunId(id)) continue;
    SW_TRY_ASSIGN(const std::optional<NameStatus> status, parent_.Look(entry.name));
    if (!status) continue;  // removed since it was listed
    std::string why = parent_.WhyForeign(*status);
    if (why.empty()) {
      if (!shared) {
        SW_TRY_ASSIGN(shared, parent_.WhyShared());
      }
      why = *shared;
    }
    found.push_back({std::string(id), entry.name, std::move(why)});
  }
  return found;
}

void Stage::NoteLeftAlone(const Leftover& leftover) {
  constexpr int kNoted = 3;  // another user can make any number of them
  ++left_alone_;
  if (left_alone_ > kNoted + 1) return;
  if (left_alone_ == kNoted + 1) {
    notes_.push_back("more of these directories were left alone");
    return;
  }
  notes_.push_back("left " + parent_.PathOf(leftover.name) + " alone: " + leftover.why);
}

/// Removes a directory that is not needed any more. A failure is only a warning.
bool Stage::RemoveOrWarn(const std::string& name) {
  const Status removed = parent_.RemoveTree(name);
  if (removed) return true;
  warnings_.push_back(StrCat(parent_.PathOf(name), " was not removed, ",
                             FormatBytes(parent_.TreeBytes(name)), ": ", removed.error().message));
  return false;
}

void Stage::Print(Sink& sink) {
  for (; notes_printed_ < notes_.size(); ++notes_printed_) sink.Note(notes_[notes_printed_], 0);
  for (; warnings_printed_ < warnings_.size(); ++warnings_printed_) {
    sink.Warn(warnings_[warnings_printed_]);
  }
}

// Undoes or finishes a commit that was interrupted in step 6 or later.
Status Stage::Recover() {
  SW_TRY_ASSIGN(const bool had_output, parent_.Exists(name_));
  SW_TRY_ASSIGN(const std::vector<Leftover> olds, Leftovers(kOld));
  const auto is_unfinished = [&](const std::string& id) {
    return std::ranges::any_of(olds,
                               [&](const Leftover& o) { return o.why.empty() && o.id == id; });
  };
  SW_TRY_ASSIGN(const std::vector<Leftover> journals, Leftovers(kJournal));
  for (const Leftover& journal : journals) {
    if (!journal.why.empty()) {
      NoteLeftAlone(journal);
      continue;
    }
    const std::string stage = name_ + std::string(kPartial) + journal.id;
    SW_TRY_ASSIGN(const std::optional<NameStatus> status, parent_.Look(stage));
    bool staged = status && status->type == EntryType::kDir &&
                  (!had_output || is_unfinished(journal.id)) && parent_.WhyForeign(*status).empty();
    if (staged) {
      SW_TRY_ASSIGN(const auto inside, parent_.Look(stage + "/" + kJournalDir));
      staged = !inside;
    }
    if (!staged) {
      RemoveOrWarn(journal.name);
      continue;
    }
    SW_TRY_ASSIGN(const Directory directory, parent_.OpenDir(stage));
    SW_TRY(directory.SetMode(kOwnMode));
    SW_TRY(parent_.MoveNew(journal.name, directory, kJournalDir));
  }
  for (const Leftover& old : olds) {
    if (!old.why.empty()) {
      NoteLeftAlone(old);
      continue;
    }
    const std::string path = parent_.PathOf(old.name);
    SW_TRY_ASSIGN(const bool present, parent_.Exists(name_));
    SW_TRY_ASSIGN(const bool unfinished, parent_.Exists(name_ + std::string(kPartial) + old.id));
    if (present && unfinished) {
      if (!force_) continue;  // Begin fails, because OUTPUT exists
      const std::string kept = name_ + std::string(kOld) + "-" + old.id;
      SW_TRY(parent_.RenameNew(old.name, kept));
      warnings_.push_back(output_ +
                          " was made by another program after a stopped run had moved the output "
                          "of before to " +
                          parent_.PathOf(kept) + ", which stays");
    } else if (present) {
      if (!RemoveOrWarn(old.name)) continue;
      notes_.push_back("removed " + path + ", an output that a stopped run had replaced");
    } else {
      SW_TRY(parent_.RenameNew(old.name, name_));
      SW_TRY(parent_.Sync());
      notes_.push_back("restored " + output_ + " from " + path +
                       ", where a stopped run had moved it");
    }
  }
  return {};
}

// Creates the directory to write into, or finds that of a stopped run.
Status Stage::Enter(const StageOptions& options) {
  SW_TRY(FaultPoint("commit.stage"));
  SW_TRY_ASSIGN(const std::vector<Leftover> left, Leftovers(""));
  std::vector<std::string> resumable;
  std::string refused;
  for (const Leftover& one : left) {
    const std::string path = parent_.PathOf(one.name);
    if (!one.why.empty()) {
      NoteLeftAlone(one);
      if (refused.empty()) {
        refused = path + ": not resumed: " + one.why +
                  "; without --resume the run starts again and leaves it alone";
      }
      continue;
    }
    if (options.resume != Resume::kNever) {
      SW_TRY_ASSIGN(const auto journal, parent_.Look(one.name + "/" + kJournalDir));
      if (journal && journal->type == EntryType::kDir) {
        resumable.push_back(one.id);
        continue;
      }
    }
    if (!RemoveOrWarn(one.name)) continue;
    notes_.push_back("removed " + path + ", left by a stopped run");
  }
  if (resumable.size() > 1) {
    return Fail(Errc::kBusy, output_, ": several stopped runs can be continued (", resumable[0],
                ", ", resumable[1], "): remove all but one ", output_, kPartial,
                "<run>, or pass --no-resume to start again");
  }
  resumed_ = !resumable.empty();
  if (options.resume == Resume::kIfSameOrDone && !resumed_ && !refused.empty()) {
    return Fail(Errc::kBusy, refused);
  }
  if (resumed_) run_id_ = resumable[0];
  stage_name_ = name_ + std::string(kPartial) + run_id_;
  path_ = parent_.PathOf(stage_name_);
  if (resumed_) {
    SW_TRY_ASSIGN(directory_, OpenOwnStage(parent_, stage_name_));
  } else {
    SW_TRY(parent_.MakeDir(stage_name_, true));
    SW_TRY_ASSIGN(directory_, parent_.OpenDir(stage_name_));
    SW_TRY(directory_.MakeDir(kJournalDir));
  }
  SW_TRY_ASSIGN(const std::optional<NameStatus> journal, directory_.Look(kJournalDir));
  output_mode_ = journal ? journal->mode : kOwnMode;
  return {};
}

/// Fails before anything is written, if the commit could not replace an existing output.
Status Stage::RefuseImmovable() {
  SW_TRY_ASSIGN(const std::optional<NameStatus> there, parent_.Look(name_));
  if (!there) return {};
  SW_TRY_ASSIGN(const std::string why, parent_.WhyImmovable(name_, *there, stage_name_));
  if (why.empty()) return {};
  if (!resumed_) SW_TRY(parent_.RemoveTree(stage_name_));
  return Fail(Errc::kBusy, output_, ": --force cannot replace it: ", why,
              "; choose another name, or a name inside it");
}

Status Stage::Commit(const CommitSteps& steps) {
  SW_CHECK(steps.write_manifest != nullptr && !committed_ && lock_.held());
  SW_TRY(FaultPoint("commit.sync"));
  SW_TRY(SyncAll(steps.synced));
  SW_TRY(FaultPoint("commit.manifest"));
  SW_TRY(steps.write_manifest(directory_));
  SW_TRY(directory_.Sync());
  SW_TRY(FaultPoint("commit.verify"));
  if (steps.verify) SW_TRY(steps.verify(directory_));
  SW_TRY(FaultPoint("commit.rename"));
  SW_TRY(lock_.Check());
  SW_TRY(Swap());
  return Finish();
}

Status Stage::SyncAll(Synced synced) const {
  if (synced == Synced::kAll) return {};
  SW_TRY_ASSIGN(Tree tree, directory_.Walk());
  const auto in_journal = [journal = std::string(kJournalDir)](const std::string& name) {
    return name == journal || name.starts_with(journal + "/");
  };
  std::erase_if(tree.files, in_journal);
  std::erase_if(tree.dirs, in_journal);
  if (synced == Synced::kNothing) {
    SW_TRY(ForEachFile(tree.files.size(), kIoThreads,
                       [&](std::uint64_t i) { return directory_.SyncFile(tree.files[i]); }));
  }
  return ForEachFile(tree.dirs.size(), kIoThreads, [&](std::uint64_t i) -> Status {
    if (tree.dirs[i].empty()) return directory_.Sync();
    SW_TRY_ASSIGN(const Directory below, directory_.OpenDir(tree.dirs[i]));
    return below.Sync();
  });
}

Status Stage::Swap() {
  const std::string journal = stage_name_ + std::string(kJournal);
  SW_TRY(directory_.MoveNew(kJournalDir, parent_, journal));
  Status named = directory_.SetMode(output_mode_);
  if (named) named = Name();
  if (named) {
    committed_ = true;
    return named;
  }
  Status back = directory_.SetMode(kOwnMode);
  if (back) back = parent_.MoveNew(journal, directory_, kJournalDir);
  if (!back) named.error().message += "; the run cannot be resumed: " + back.error().message;
  return named;
}

Status Stage::Name() {
  SW_TRY(directory_.Sync());
  SW_TRY_ASSIGN(const bool present, parent_.Exists(name_));
  if (!present) return parent_.RenameNew(stage_name_, name_);
  SW_TRY(RefuseOddOutput(parent_, name_, force_));
  return Replace();
}

Status Stage::Replace() {
  SW_TRY_ASSIGN(const bool exchanged, parent_.Exchange(stage_name_, name_));
  if (exchanged) {
    old_ = stage_name_;
    return {};
  }
  const std::string aside = stage_name_ + std::string(kOld);
  SW_TRY(parent_.Rename(name_, aside));
  if (Status named = parent_.RenameNew(stage_name_, name_); !named) {
    if (Status back = parent_.RenameNew(aside, name_); !back) {
      named.error().message += "; the old output is now " + parent_.PathOf(aside);
    }
    return named;
  }
  old_ = aside;
  notes_.push_back("the file system cannot exchange names: the old output was moved to " +
                   parent_.PathOf(aside) + " for a moment");
  return {};
}

Status Stage::Finish() {
  Status durable = FaultPoint("commit.sync_parent");
  if (durable) durable = parent_.Sync();
  if (!durable) {
    Error error = std::move(durable).error();
    error.message += "; " + output_ + " is in place but may not survive a power failure";
    return tl::unexpected<Error>(std::move(error));
  }
  // From here on the output is durable. Later failures are warnings, as the run has succeeded.
  if (const Status point = FaultPoint("commit.release"); point) {
    if (!old_.empty()) RemoveOrWarn(old_);
    RemoveOrWarn(stage_name_ + std::string(kJournal));
  } else {
    warnings_.push_back(point.error().message);
  }
  if (Status released = lock_.Release(); !released) warnings_.push_back(released.error().message);
  return {};
}

Status Stage::Abandon(bool keep) {
  if (!lock_.held()) return {};  // committed or abandoned before
  Status status;
  if (!keep && !committed_ && lock_.Check()) status = parent_.RemoveTree(stage_name_);
  Status released = lock_.Release();
  if (!status) return status;
  return released;
}

Result<Directory> OpenStage(const std::string& path) {
  SW_TRY_ASSIGN(const ParentName split, SplitOutput(path));
  SW_TRY_ASSIGN(const Directory parent, Directory::Open(split.parent));
  return OpenOwnStage(parent, split.name);
}

Status CommitFile(const std::string& file, std::string_view text, bool force, bool take_over) {
  SW_TRY_ASSIGN(const ParentName split, SplitOutput(file));
  SW_TRY_ASSIGN(const Directory parent, Directory::Open(split.parent));
  SW_TRY_ASSIGN(Lock lock,
                Lock::Take(parent, split.name + ".lock", "writes " + split.name, take_over));
  const auto commit = [&]() -> Status {
    SW_TRY(RefuseOddFile(parent, split.name, force));
    std::string partial = split.name + ".partial";
    SW_TRY_ASSIGN(const std::optional<NameStatus> stale, parent.Look(partial));
    // Left by a killed run.
    if (stale && (!parent.WhyForeign(*stale).empty() || !parent.RemoveFile(partial))) {
      SW_TRY_ASSIGN(const std::string id, MakeRunId());
      partial.append("-").append(id);
    }
    SW_TRY(parent.WriteWholeFile(partial, text));
    SW_TRY(lock.Check());
    Status named =
        force ? parent.Rename(partial, split.name) : parent.RenameNew(partial, split.name);
    if (named) return parent.Sync();
    static_cast<void>(parent.RemoveFile(partial).has_value());
    return named;
  };
  Status committed = commit();
  Status released = lock.Release();
  if (!committed) return committed;
  return released;
}

}  // namespace shardwright::os
