// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/os/directory.h"
#include "support/os/lock.h"

namespace shardwright::os {

/// Directory inside a stage that holds the journals of a run; never part of a committed output.
inline constexpr const char* kJournalDir = ".journal";

struct StageOptions {
  bool force = false;      ///< replace an existing output
  bool resume = false;     ///< continue in the directory that a stopped run left
  std::string run_id;      ///< 1 to 64 of a-z A-Z 0-9 _ -
  bool take_over = false;  ///< as Lock::Take
};

/// What Commit does between writing and renaming.
struct CommitSteps {
  /// The caller has synced every file that is in the stage (SyncFiles), each on the machine that
  /// wrote it. Otherwise Commit syncs them one by one.
  bool files_synced = false;
  /// Writes and syncs the manifest (WriteWholeFile or ReplaceFile) into the directory it is given.
  /// After a resumed run a manifest may be there already.
  std::function<Status(const Directory& stage)> write_manifest;
  /// Re-reads the stage before it becomes the output; may be empty.
  std::function<Status(const Directory& stage)> verify;
};

/// A new run id that no other run has: 16 hexadecimal digits. \error kInternal without randomness
Result<std::string> MakeRunId();

/// An output directory while it is made. It lives beside OUTPUT as OUTPUT.partial-<run> and takes
/// OUTPUT's name only when it is complete; until then an older OUTPUT stays whole. Only the user
/// can enter it before that. With several ranks one rank owns the Stage and the others learn path()
/// and call OpenStage. All calls are local.
class Stage {
 public:
  /// Takes the lock and makes (or, with resume, finds) the stage.
  /// A fresh run removes what killed runs for the same OUTPUT left, and notes it; an output that a
  /// killed run had moved aside is put back first. Directories of other users, and those that
  /// others may have put there (Directory::WhyShared), are left alone and noted. Others that cannot
  /// be removed stay, with a warning.
  /// \error kBusy if OUTPUT exists and force is off or cannot be renamed, another run holds the
  ///        lock, or the only run to resume is not this user's or is open to others; kNotFound if
  ///        the parent is missing; kUsage for a bad name or run id; kIo
  static Result<Stage> Begin(const std::string& output, const StageOptions& options);

  Stage(Stage&&) noexcept = default;
  Stage& operator=(Stage&&) noexcept = delete;
  /// Unless committed or abandoned: as Abandon(true).
  ~Stage() = default;

  /// Makes the stage the output (see the steps in commit.cc). After an error the stage is as it
  /// was, except when the message says that the output is in place; Abandon may follow.
  /// \pre  write_manifest is set; not called before
  /// \error kIo; what the callbacks return; kBusy if OUTPUT appeared meanwhile and force is off, or
  ///        another run has taken the lock over
  Status Commit(const CommitSteps& steps);

  /// Gives up; after a commit it does nothing. A run that has taken the lock over keeps the stage.
  /// \param keep  leave the stage for a later resume instead of removing it
  /// \error kIo if it cannot be removed
  Status Abandon(bool keep);

  /// Where to write: OUTPUT.partial-<run>.
  const std::string& path() const { return path_; }
  /// OUTPUT, with its parent resolved.
  const std::string& output() const { return output_; }
  /// The same, open.
  const Directory& directory() const { return directory_; }
  std::string journal_dir() const { return path_ + "/" + kJournalDir; }
  /// The stopped run's id when resumed.
  const std::string& run_id() const { return run_id_; }
  bool resumed() const { return resumed_; }
  bool committed() const { return committed_; }
  /// Events that the user should know of: leftovers removed, an output moved aside.
  const std::vector<std::string>& notes() const { return notes_; }
  /// Directories that could not be removed and stay, with their sizes.
  const std::vector<std::string>& warnings() const { return warnings_; }
  /// Prints both, each text once.
  void Print(Sink& sink);

 private:
  Stage() = default;
  Status Recover();
  Status Enter(const StageOptions& options);
  Status RefuseImmovable();
  Status SyncAll(bool files_synced) const;
  Status Swap();
  Status Name();
  Status Replace();
  Status Finish();
  struct Leftover;
  Result<std::vector<Leftover>> Leftovers(std::string_view suffix) const;
  void NoteLeftAlone(const Leftover& leftover);
  bool RemoveOrWarn(const std::string& name);

  Directory parent_;
  Directory directory_;
  std::string name_;
  std::string stage_name_;  // in the parent
  std::string output_;
  std::string path_;
  std::string run_id_;
  bool force_ = false;
  bool resumed_ = false;
  bool committed_ = false;
  std::uint32_t output_mode_ = 0;  // permissions that the stage gets with its name
  std::string old_;  // name of the replaced output until it is removed; empty if there was none
  int left_alone_ = 0;
  std::vector<std::string> notes_;
  std::vector<std::string> warnings_;
  std::size_t notes_printed_ = 0;
  std::size_t warnings_printed_ = 0;
  Lock lock_;
};

/// Opens a stage, or what was left of one, on another rank than the one that has the Stage.
/// \error kNotFound; kBusy if it is not this user's or others may write to it
/// Local.
Result<Directory> OpenStage(const std::string& path);

/// The same promise for an output that is one file: made beside its name as FILE.partial under the
/// lock FILE.lock, synced, and then given its name in one step.
/// \param take_over  as Lock::Take
/// \error kBusy if FILE exists and force is off, is no regular file, or another run holds the lock;
///        kNotFound if the parent is missing; kUsage for a bad name; kIo
/// Local.
Status CommitFile(const std::string& file, std::string_view text, bool force,
                  bool take_over = false);

}  // namespace shardwright::os
