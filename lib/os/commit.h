#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "os/lock.h"

namespace shardwright::os {

/// Directory inside a stage that holds the journals of a run; never part of a committed output.
inline constexpr const char* kJournalDir = ".journal";

struct StageOptions {
  bool force = false;   ///< replace an existing output
  bool resume = false;  ///< continue in the directory that a stopped run left
  std::string run_id;   ///< 1 to 64 of a-z A-Z 0-9 _ -
};

/// What Commit does between writing and renaming.
struct CommitSteps {
  /// The caller has synced every file that is in the stage (SyncFiles), each on the machine that
  /// wrote it. Otherwise Commit syncs them one by one.
  bool files_synced = false;
  /// Writes and syncs the manifest (WriteWholeFile or ReplaceFile) into the directory it is given.
  /// After a resumed run a manifest may be there already.
  std::function<Status(const std::string& stage)> write_manifest;
  /// Re-reads the stage before it becomes the output; may be empty.
  std::function<Status(const std::string& stage)> verify;
};

/// A new run id that no other run has: 16 hexadecimal digits. \error kInternal without randomness
Result<std::string> MakeRunId();

/// An output directory while it is made. It lives beside OUTPUT as OUTPUT.partial-<run> and takes
/// OUTPUT's name only when it is complete; until then an older OUTPUT stays whole. With several
/// ranks one rank owns the Stage and the others learn path(). All calls are local.
class Stage {
 public:
  /// Takes the lock and makes (or, with resume, finds) the stage.
  /// A fresh run removes what killed runs for the same OUTPUT left, and notes it; an output that a
  /// killed run had moved aside is put back first.
  /// \error kBusy if OUTPUT exists and force is off, or another run holds the lock; kNotFound if
  ///        the parent is missing; kUsage for a bad name or run id; kIo
  static Result<Stage> Begin(const std::string& output, const StageOptions& options);

  Stage(Stage&&) noexcept = default;
  Stage& operator=(Stage&&) noexcept = delete;
  /// Unless committed or abandoned: as Abandon(true).
  ~Stage() = default;

  /// Makes the stage the output (see the steps in commit.cc). After an error the stage is as it
  /// was, except when the message says that the output is in place; Abandon may follow.
  /// \pre  write_manifest is set; not called before
  /// \error kIo; what the callbacks return; kBusy if OUTPUT appeared meanwhile and force is off
  Status Commit(const CommitSteps& steps);

  /// Gives up; after a commit it does nothing.
  /// \param keep  leave the stage for a later resume instead of removing it
  /// \error kIo if it cannot be removed
  Status Abandon(bool keep);

  /// Where to write: OUTPUT.partial-<run>.
  const std::string& path() const { return path_; }
  /// OUTPUT, with its parent resolved.
  const std::string& output() const { return output_; }
  std::string journal_dir() const { return path_ + "/" + kJournalDir; }
  /// The stopped run's id when resumed.
  const std::string& run_id() const { return run_id_; }
  bool resumed() const { return resumed_; }
  bool committed() const { return committed_; }
  /// What the user should hear: leftovers removed, an output moved aside. One line each.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  Stage() = default;
  Status Recover();
  Status Enter(const StageOptions& options);
  Status SyncAll(bool files_synced) const;
  Status Swap();
  Status Name();
  Status Replace();
  Status Finish();

  std::string parent_;
  std::string name_;
  std::string output_;
  std::string path_;
  std::string run_id_;
  bool force_ = false;
  bool resumed_ = false;
  bool committed_ = false;
  std::string old_;  // where the replaced output is until it is removed; empty if there was none
  std::vector<std::string> notes_;
  Lock lock_;
};

/// The same promise for an output that is one file: made beside its name as FILE.partial under the
/// lock FILE.lock, synced, and then given its name in one step.
/// \error kBusy if FILE exists and force is off, is no regular file, or another run holds the lock;
///        kNotFound if the parent is missing; kUsage for a bad name; kIo
/// Local.
Status CommitFile(const std::string& file, std::string_view text, bool force);

}  // namespace shardwright::os
