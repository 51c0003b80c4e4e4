// The commit protocol. Each step has a fault point of the same name, passed before the step.
//
//   1 commit.lock         flock OUTPUT.lock; put back what a killed run moved aside; refuse an
//                         existing OUTPUT unless forced; drop or adopt leftovers
//   2 commit.stage        make OUTPUT.partial-<run> and its .journal; the caller writes into it
//   3 commit.sync         sync each file, then each directory, children first
//   4 commit.manifest     write and sync the manifest, sync the directory that holds it
//   5 commit.verify       re-read, if asked
//   6 commit.rename       move .journal out, to OUTPUT.partial-<run>.journal; give the stage
//                         OUTPUT's name. If OUTPUT exists the two names are exchanged in one call;
//                         where the file system cannot, OUTPUT becomes OUTPUT.partial-<run>.old
//                         first
//   7 commit.sync_parent  sync the parent
//   8 commit.release      remove the old output and the journal, remove and free the lock
//
// What a kill leaves: up to step 6 a stage with .journal, which a resumed run continues. Later the
// directory of that name is the finished stage or, after an exchange, the old output. Without
// OUTPUT it must be the stage and gets its journal back; otherwise it is removed, never continued.

#include "os/commit.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <string_view>
#include <utility>

#include "base/system.h"
#include "os/dir.h"
#include "os/fault.h"
#include "os/sys_internal.h"

namespace shardwright::os {

namespace {

constexpr std::string_view kPartial = ".partial-";
constexpr std::string_view kOld = ".old";
constexpr std::string_view kJournal = ".journal";

bool IsRunId(std::string_view id) {
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
  };
  return !id.empty() && id.size() <= 64 && std::all_of(id.begin(), id.end(), fits);
}

// Run ids of OUTPUT's directories in the parent that end in `suffix`.
Result<std::vector<std::string>> Leftovers(const std::string& parent, const std::string& name,
                                           std::string_view suffix) {
  SW_TRY_ASSIGN(const std::vector<Entry> entries, ListDir(parent));
  const std::string prefix = name + std::string(kPartial);
  std::vector<std::string> ids;
  for (const Entry& entry : entries) {
    std::string_view rest = entry.name;
    if (entry.type != EntryType::kDir || rest.substr(0, prefix.size()) != prefix) continue;
    rest.remove_prefix(prefix.size());
    if (rest.size() < suffix.size() || rest.substr(rest.size() - suffix.size()) != suffix) continue;
    rest.remove_suffix(suffix.size());
    if (IsRunId(rest)) ids.emplace_back(rest);
  }
  return ids;
}

Status RefuseOddOutput(const std::string& output, bool force) {
  struct stat info {};
  if (sys::StatAt(AT_FDCWD, output.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return {};
    return SysFail(Errc::kNotFound, output, "cannot stat", errno);
  }
  if (S_ISLNK(info.st_mode)) {
    return Fail(Errc::kBusy, output + ": is a symbolic link, which is never replaced");
  }
  if (!S_ISDIR(info.st_mode)) {
    return Fail(Errc::kBusy, output + ": exists and is not a directory");
  }
  if (!force) return Fail(Errc::kBusy, output + ": exists (--force replaces it)");
  return {};
}

Status RefuseOddFile(const std::string& file, bool force) {
  struct stat info {};
  if (sys::StatAt(AT_FDCWD, file.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return {};
    return SysFail(Errc::kNotFound, file, "cannot stat", errno);
  }
  if (!S_ISREG(info.st_mode)) {
    return Fail(Errc::kBusy, file + ": exists and is no regular file, which is never replaced");
  }
  if (!force) return Fail(Errc::kBusy, file + ": exists (--force replaces it)");
  return {};
}

}  // namespace

Result<std::string> MakeRunId() {
  auto id = RandomHex(8);
  if (!id) return Within("run id", std::move(id).error());
  return id;
}

Result<Stage> Stage::Begin(const std::string& output, const StageOptions& options) {
  if (!IsRunId(options.run_id)) {
    return Fail(Errc::kUsage, "run id " + EscapedName(options.run_id) +
                                  " is not 1 to 64 letters, digits, \"_\" or \"-\"");
  }
  SW_TRY_ASSIGN(const ParentName split, SplitOutput(output));
  Stage stage;
  stage.parent_ = split.parent;
  stage.name_ = split.name;
  stage.output_ = split.Path();
  stage.run_id_ = options.run_id;
  stage.force_ = options.force;
  const std::size_t longest =
      split.name.size() + kPartial.size() + options.run_id.size() + kJournal.size();
  if (longest > kNameMax) {
    return Fail(Errc::kUsage, output + ": the name leaves no room for the suffixes of a stage: " +
                                  std::to_string(kNameMax) + " bytes at most, needs " +
                                  std::to_string(longest));
  }
  SW_TRY(FaultPoint("commit.lock"));
  SW_TRY_ASSIGN(stage.lock_, Lock::Take(stage.output_ + ".lock", "run " + options.run_id));
  SW_TRY(stage.Recover());
  SW_TRY(RefuseOddOutput(stage.output_, options.force));
  SW_TRY(stage.Enter(options));
  return stage;
}

// Undoes or finishes a commit that was cut in step 6 or later.
Status Stage::Recover() {
  SW_TRY_ASSIGN(const bool had_output, Exists(output_));
  SW_TRY_ASSIGN(const std::vector<std::string> journals, Leftovers(parent_, name_, kJournal));
  for (const std::string& id : journals) {
    const std::string stage = output_ + std::string(kPartial) + id;
    SW_TRY_ASSIGN(const bool staged, IsDir(stage));
    if (staged && !had_output) {
      SW_TRY(RenameNew(stage + std::string(kJournal), stage + "/" + kJournalDir));
    } else {
      SW_TRY(RemoveTree(stage + std::string(kJournal), parent_));
    }
  }
  SW_TRY_ASSIGN(const std::vector<std::string> olds, Leftovers(parent_, name_, kOld));
  for (const std::string& id : olds) {
    const std::string old = output_ + std::string(kPartial) + id + std::string(kOld);
    SW_TRY_ASSIGN(const bool present, Exists(output_));
    if (present) {
      SW_TRY(RemoveTree(old, parent_));
      notes_.push_back("removed " + old + ", an output that a stopped run had replaced");
    } else {
      SW_TRY(RenameNew(old, output_));
      SW_TRY(SyncDir(parent_));
      notes_.push_back("restored " + output_ + " from " + old +
                       ", where a stopped run had moved it");
    }
  }
  return {};
}

// Makes or adopts the directory to write into.
Status Stage::Enter(const StageOptions& options) {
  SW_TRY(FaultPoint("commit.stage"));
  SW_TRY_ASSIGN(const std::vector<std::string> ids, Leftovers(parent_, name_, ""));
  std::vector<std::string> resumable;
  for (const std::string& id : ids) {
    const std::string left = output_ + std::string(kPartial) + id;
    if (options.resume) {
      SW_TRY_ASSIGN(const bool journal, IsDir(left + "/" + kJournalDir));
      if (journal) {
        resumable.push_back(id);
        continue;
      }
    }
    SW_TRY(RemoveTree(left, parent_));
    notes_.push_back("removed " + left + ", left by a stopped run");
  }
  if (resumable.size() > 1) {
    return Fail(Errc::kBusy, output_ + ": several stopped runs can be resumed (" + resumable[0] +
                                 ", " + resumable[1] + "): remove all but one " + output_ +
                                 std::string(kPartial) + "<run>");
  }
  resumed_ = !resumable.empty();
  if (resumed_) run_id_ = resumable[0];
  path_ = output_ + std::string(kPartial) + run_id_;
  if (resumed_) return {};
  SW_TRY(MakeDir(path_));
  return MakeDir(journal_dir());
}

Status Stage::Commit(const CommitSteps& steps) {
  SW_CHECK(steps.write_manifest != nullptr && !committed_ && lock_.held());
  SW_TRY(FaultPoint("commit.sync"));
  SW_TRY(SyncAll(steps.files_synced));
  SW_TRY(FaultPoint("commit.manifest"));
  SW_TRY(steps.write_manifest(path_));
  SW_TRY(SyncDir(path_));
  SW_TRY(FaultPoint("commit.verify"));
  if (steps.verify) SW_TRY(steps.verify(path_));
  SW_TRY(FaultPoint("commit.rename"));
  SW_TRY(Swap());
  return Finish();
}

Status Stage::SyncAll(bool files_synced) const {
  SW_TRY_ASSIGN(const Tree tree, WalkTree(path_));
  const std::string journal = journal_dir();
  const auto in_journal = [&](const std::string& path) {
    return path == journal || path.rfind(journal + "/", 0) == 0;
  };
  if (!files_synced) {
    for (const std::string& file : tree.files) {
      if (!in_journal(file)) SW_TRY(SyncFiles({&file, 1}));
    }
  }
  for (const std::string& dir : tree.dirs) {
    if (!in_journal(dir)) SW_TRY(SyncDir(dir));
  }
  return {};
}

Status Stage::Swap() {
  const std::string journal = path_ + std::string(kJournal);
  SW_TRY(RenameNew(journal_dir(), journal));
  Status named = Name();
  if (named) {
    committed_ = true;
  } else if (Status back = RenameNew(journal, journal_dir()); !back) {
    named.error().message += "; the run cannot be resumed: " + back.error().message;
  }
  return named;
}

Status Stage::Name() {
  SW_TRY(SyncDir(path_));
  SW_TRY_ASSIGN(const bool present, Exists(output_));
  if (!present) return RenameNew(path_, output_);
  SW_TRY(RefuseOddOutput(output_, force_));
  return Replace();
}

Status Stage::Replace() {
  SW_TRY_ASSIGN(const bool exchanged, Exchange(path_, output_));
  if (exchanged) {
    old_ = path_;
    return {};
  }
  const std::string aside = path_ + std::string(kOld);
  SW_TRY(Rename(output_, aside));
  if (Status named = RenameNew(path_, output_); !named) {
    if (Status back = RenameNew(aside, output_); !back) {
      named.error().message += "; the old output is now " + aside;
    }
    return named;
  }
  old_ = aside;
  notes_.push_back("the file system cannot exchange names: the old output was moved to " + aside +
                   " for a moment");
  return {};
}

Status Stage::Finish() {
  Status durable = FaultPoint("commit.sync_parent");
  if (durable) durable = SyncDir(parent_);
  if (!durable) {
    Error error = std::move(durable).error();
    error.message += "; " + output_ + " is in place but may not survive a power failure";
    return tl::unexpected<Error>(std::move(error));
  }
  // From here on the output is durable: what fails below is reported, but the run has succeeded.
  Status tidy = FaultPoint("commit.release");
  if (tidy && !old_.empty()) tidy = RemoveTree(old_, parent_);
  if (tidy) tidy = RemoveTree(path_ + std::string(kJournal), parent_);
  if (!tidy) notes_.push_back("what was replaced is not all removed: " + tidy.error().message);
  if (Status released = lock_.Release(); !released) notes_.push_back(released.error().message);
  return {};
}

Status Stage::Abandon(bool keep) {
  if (!lock_.held()) return {};  // committed or given up before
  Status status;
  if (!keep && !committed_) status = RemoveTree(path_, parent_);
  Status released = lock_.Release();
  if (!status) return status;
  return released;
}

Status CommitFile(const std::string& file, std::string_view text, bool force) {
  SW_TRY_ASSIGN(const ParentName split, SplitOutput(file));
  const std::string output = split.Path();
  const std::string partial = output + ".partial";
  SW_TRY_ASSIGN(Lock lock, Lock::Take(output + ".lock", "writes " + split.name));
  const auto commit = [&]() -> Status {
    SW_TRY(RefuseOddFile(output, force));
    SW_TRY_ASSIGN(const bool stale, Exists(partial));  // of a run that was killed here
    if (stale) SW_TRY(RemoveFile(partial));
    SW_TRY(WriteWholeFile(partial, text));
    Status named = force ? Rename(partial, output) : RenameNew(partial, output);
    if (named) return SyncDir(split.parent);
    sys::UnlinkAt(AT_FDCWD, partial.c_str());
    return named;
  };
  Status committed = commit();
  Status released = lock.Release();
  if (!committed) return committed;
  return released;
}

}  // namespace shardwright::os
