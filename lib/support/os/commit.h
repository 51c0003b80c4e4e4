// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"
#include "support/base/run_options.h"
#include "support/base/sink.h"
#include "support/os/directory.h"
#include "support/os/lock.h"

namespace shardwright::os {

/// Directory inside a stage that contains the journals of a run. It is never part of an output.
inline constexpr const char* kJournalDir = ".journal";

struct StageOptions {
  bool force = false;  ///< replace an existing output
  Resume resume = Resume::kIfSame;
  std::string run_id;      ///< 1 to 64 of a-z A-Z 0-9 _ -
  bool take_over = false;  ///< as Lock::Take
};

/// Parts of a stage that the caller has synced before a commit. The commit syncs the rest.
enum class Synced : std::uint8_t {
  kNothing,
  kFiles,  ///< every file of the stage, each on the machine that wrote it
  kAll,    ///< files and the names of all directories (Directory::SyncFileSystem)
};

/// Optional and required actions of Commit between writing and renaming.
struct CommitSteps {
  Synced synced = Synced::kNothing;
  /// Writes and syncs the manifest (WriteWholeFile or ReplaceFile) in the stage directory.
  /// In a resumed run the manifest may already exist.
  std::function<Status(const Directory& stage)> write_manifest;
  /// Reads the stage again before it becomes the output. May be empty.
  std::function<Status(const Directory& stage)> verify;
};

/// Makes a unique run id of 16 hexadecimal digits. \error kInternal without random bytes
Result<std::string> MakeRunId();

/// An output directory that is being written. It is the sibling OUTPUT.partial-<run> of
/// OUTPUT, and is renamed to OUTPUT when it is complete. Until then an older OUTPUT stays
/// unchanged, and only the user can enter the stage. Of several ranks, one has the Stage. The
/// others get path() from it and call OpenStage. All calls are local.
class Stage {
 public:
  /// Takes the lock and finds the stage of a stopped run, or creates one.
  /// First restores an output that a killed run had moved aside. A stage of a stopped run for
  /// the same OUTPUT is continued; the caller has to check that the run was the same. With
  /// Resume::kNever it is removed, with a note. Directories of other users, and those that
  /// others may have put there (Directory::WhyShared), are kept, with a note. Directories
  /// that cannot be removed are kept, with a warning.
  /// \error kBusy if OUTPUT exists without force or cannot be renamed, if another run has the
  ///        lock, if several stopped runs could be continued, or if others may write to
  ///        the stage; with kIfSameOrDone if the only stage is another user's;
  ///        kNotFound if the parent is missing; kUsage for a bad name or run id; kIo
  static Result<Stage> Begin(const std::string& output, const StageOptions& options);

  Stage(Stage&&) noexcept = default;
  Stage& operator=(Stage&&) noexcept = delete;
  /// Calls Abandon(true) unless the stage was committed or abandoned.
  ~Stage() = default;

  /// Makes the stage the output (see the steps in commit.cc). After an error the stage is
  /// unchanged, unless the message states that the output is in place. Abandon may follow.
  /// \pre  write_manifest is set, and Commit was not called before
  /// \error kIo; errors of the callbacks; kBusy if OUTPUT was created meanwhile without
  ///        force, or another run has taken over the lock
  Status Commit(const CommitSteps& steps);

  /// Discards the stage, or does nothing after a commit. A run that took over the lock keeps it.
  /// \param keep  leave the stage for a later resume instead of removing it
  /// \error kIo if the stage cannot be removed
  Status Abandon(bool keep);

  /// Path of the stage: OUTPUT.partial-<run>.
  const std::string& path() const { return path_; }
  /// Path of OUTPUT, with its parent resolved.
  const std::string& output() const { return output_; }
  /// The stage directory, open.
  const Directory& directory() const { return directory_; }
  std::string journal_dir() const { return path_ + "/" + kJournalDir; }
  /// Run id, which is the stopped run's id after a resume.
  const std::string& run_id() const { return run_id_; }
  bool resumed() const { return resumed_; }
  bool committed() const { return committed_; }
  /// Messages for the user, such as removed leftovers or an output that was moved aside.
  const std::vector<std::string>& notes() const { return notes_; }
  /// Directories that could not be removed, with their sizes.
  const std::vector<std::string>& warnings() const { return warnings_; }
  /// Sends notes and warnings to `sink`, each text once.
  void Print(Sink& sink);

 private:
  Stage() = default;
  Status Recover();
  Status Enter(const StageOptions& options);
  Status RefuseImmovable();
  Status SyncAll(Synced synced) const;
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
  std::uint32_t output_mode_ = 0;  // permissions of the output
  std::string old_;  // name of the replaced output until it is removed; empty if there was none
  int left_alone_ = 0;
  std::vector<std::string> notes_;
  std::vector<std::string> warnings_;
  std::size_t notes_printed_ = 0;
  std::size_t warnings_printed_ = 0;
  Lock lock_;
};

/// Opens a stage, or the remains of one, on a rank that does not have the Stage.
/// \error kNotFound; kBusy if it is another user's or others may write to it
/// Local.
Result<Directory> OpenStage(const std::string& path);

/// Writes an output file atomically. It writes FILE.partial under the lock FILE.lock,
/// syncs it, and renames it to FILE in one step.
/// \param take_over  as Lock::Take
/// \error kBusy if FILE exists without force, is not a regular file, or another run has the
///        lock; kNotFound if the parent is missing; kUsage for a bad name; kIo
/// Local.
Status CommitFile(const std::string& file, std::string_view text, bool force,
                  bool take_over = false);

}  // namespace shardwright::os
