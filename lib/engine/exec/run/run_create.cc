// SPDX-License-Identifier: Apache-2.0
// The pass of a run that creates all output files.

#include <atomic>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/exec/run/run_internal.h"
#include "support/base/system.h"
#include "support/os/dir.h"
#include "support/os/io_threads.h"

namespace shardwright::exec {

namespace {

/// With more files than this, one sync of the file system replaces syncs of single
/// files: 1197 atoms took 3 s of single syncs on a disk that writes their 4 GB in 2 s.
constexpr std::size_t kFilesSyncedOneByOne = 64;

tl::unexpected<Error> TwoOutputs(const std::string& path) {
  return Fail(
      Errc::kUnsupported, path,
      ": two output files have the same name on this file system, which may ignore case or dots "
      "at the end of a name; write to another file system");
}

/// Checks that an output path stays inside the output. This is the
/// last check before files are created, for paths from all sources.
Status CheckPath(std::string_view path) {
  for (std::size_t first = 0; first <= path.size();) {
    const std::size_t last = std::min(path.find('/', first), path.size());
    if (Status safe = os::SafeName(path.substr(first, last - first)); !safe) {
      return Within("output file \"" + std::string(path) + "\"", std::move(safe).error());
    }
    first = last + 1;
  }
  return {};
}

}  // namespace

Status Runner::CreateFiles() {
  std::set<std::string> folders;
  for (const plan::OutputFile& file : plan_.target().files) {
    SW_TRY(CheckPath(file.path));
    if (std::string folder = FolderOf(file.path); !folder.empty()) {
      folders.insert(std::move(folder));
    }
  }
  SW_TRY_ASSIGN(const std::string created, comm_.OnRootText([&]() -> Result<std::string> {
    if (resumed_) SW_TRY(BeginCreating());
    return created_ ? "yes" : "";
  }));
  created_ = !created.empty();
  if (!created_) noted_.clear();
  SW_TRY(comm_.OnRoot([&] { return OfOutput(directory_.MakeAllDirs(folders)); }));
  SW_TRY(ChooseSync());
  SW_TRY(MakeClones());
  SW_TRY(comm_.OnRoot([&] { return CheckSpace(); }));
  SW_TRY(comm_.Agree(CreateMyFiles()));
  return comm_.OnRoot(
      [&] { return created_ ? Status() : journals_.WriteWholeFile(kCreatedName, ""); });
}

/// Restarts a run that was stopped while it created its files. Removes all of them, because
/// only creating a file here proves that no other output has the same name on this file system.
Status Runner::BeginCreating() {
  SW_TRY_ASSIGN(created_, journals_.Exists(kCreatedName));
  if (created_) return OfOutput(RemoveUnplanned(directory_, plan_.target()));
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, directory_.List());
  for (const os::Entry& entry : entries) {
    if (entry.name != os::kJournalDir) SW_TRY(directory_.RemoveTree(entry.name));
  }
  return {};
}

/// Selects one sync for all files if there are many and the file systems of all ranks support it.
Status Runner::ChooseSync() {
  if (plan_.target().files.size() <= kFilesSyncedOneByOne) return {};
  // The descriptor is older than all writes, so a sync of the file system reports their errors.
  SW_TRY_ASSIGN(const std::uint64_t without,
                comm_.AllReduceSum(directory_.CanSyncFileSystem() ? 0 : 1));
  // It does not report a write of the stopped run that failed, if another program has seen that.
  sync_at_once_ = without == 0 && !resumed_;
  return {};
}

/// Makes all clones and links on the root, because they take no space and little
/// time. Runs before CheckSpace, which checks the space for the other files.
Status Runner::MakeClones() {
  is_clone_.assign(plan_.target().files.size(), std::byte{0});
  SW_TRY(comm_.OnRoot([&]() -> Status {
    for (std::uint32_t index = 0; index < is_clone_.size(); ++index) {
      if (plan_.target().files[index].clone == plan::CloneMode::kCopy) continue;
      if (sink_.stop_requested()) {
        return Fail(Errc::kStopped, "stopped on request; the same command continues");
      }
      SW_TRY_ASSIGN(const bool made, MakeClone(index));
      is_clone_[index] = std::byte{made};
    }
    return {};
  }));
  SW_TRY(comm_.Bcast(is_clone_));
  for (std::uint32_t index = 0; index < is_clone_.size(); ++index) {
    if (IsClone(index)) clone_sources_.insert(plan_.target().files[index].clone_of);
  }
  return {};
}

/// \returns false if the file must be copied: no support for clones, or the source has grown
Result<bool> Runner::MakeClone(std::uint32_t index) {
  const plan::OutputFile& file = plan_.target().files[index];
  const std::string& source = plan_.source().files[file.clone_of];
  const std::string& path = PathOf(index);
  SW_TRY_ASSIGN(const os::File from, source_.Open(file.clone_of));
  if (file.clone == plan::CloneMode::kLink) {
    // A stopped run may have left any file with this name. A new link costs nothing.
    SW_TRY_ASSIGN(const bool there, directory_.Exists(path));
    if (there && !created_) return TwoOutputs(directory_.PathOf(path));
    if (there) SW_TRY(directory_.RemoveFile(path));
    SW_TRY(directory_.HardLink(source, from, path));
  } else {
    SW_TRY_ASSIGN(const os::Directory folder, OpenFolder(index));
    SW_TRY_ASSIGN(const os::File to, OpenOutput(folder, index));
    SW_TRY_ASSIGN(const bool cloned, os::CloneInto(from, to));
    if (!cloned) {
      SW_TRY(directory_.RemoveFile(path));  // CreateFile creates it again
      return false;
    }
  }
  SW_TRY_ASSIGN(const bool grown, source_.Recheck(file.clone_of));
  if (grown) {
    SW_TRY(directory_.RemoveFile(path));
    return false;
  }
  if (!sync_at_once_) SW_TRY(directory_.SyncFile(path));
  return true;
}

Status Runner::CheckSpace() {
  if (resumed_) return {};
  std::uint64_t bytes = 0;
  std::uint64_t files = 0;
  for (std::uint32_t index = 0; index < is_clone_.size(); ++index) {
    if (IsClone(index)) continue;
    bytes += plan_.target().files[index].bytes;
    ++files;
  }
  return OfOutput(exec::CheckSpace(options_.output, directory_.path(), bytes, files));
}

Result<os::File> Runner::OpenOutput(const os::Directory& folder, std::uint32_t index) const {
  const std::string name = PathOf(index).substr(PathOf(index).rfind('/') + 1);
  if (created_) {
    SW_TRY_ASSIGN(const std::optional<os::NameStatus> there, folder.Look(name));
    if (there && folder.IsOwnFile(*there)) return folder.OpenWrite(name);
    // Never write into a file of another user or with further hard links: replace it.
    if (there) SW_TRY(folder.RemoveFile(name));
  }
  Result<os::File> made = folder.Create(name, plan_.target().files[index].executable);
  if (!made && made.error().code == Errc::kBusy) return TwoOutputs(folder.PathOf(name));
  return made;
}

/// Creates the files of this rank. Opens a folder once for several of its files.
Status Runner::CreateMyFiles() {
  constexpr std::size_t kFilesOfOpen = 8;  // threads share the files of a large folder
  std::vector<std::vector<std::uint32_t>> parts;
  std::string last;
  std::uint64_t count = 0;
  for (std::uint32_t file = 0; file < plan_.target().files.size(); ++file) {
    if (!Mine(file) || IsClone(file)) continue;
    std::string folder = FolderOf(PathOf(file));
    if (parts.empty() || folder != last || parts.back().size() == kFilesOfOpen) {
      parts.emplace_back();
      last = std::move(folder);
    }
    parts.back().push_back(file);
    ++count;
  }
  std::atomic<std::uint64_t> done = 0;
  return os::ForEachFile(parts.size(), options_.io_threads, [&](std::uint64_t i) -> Status {
    SW_TRY_ASSIGN(const os::Directory folder, OpenFolder(parts[i].front()));
    for (const std::uint32_t file : parts[i]) {
      SW_TRY(CreateFile(folder, file));
      sink_.Files(done.fetch_add(1, std::memory_order_relaxed) + 1, count);
    }
    return {};
  });
}

/// Opens the folder of an output file.
Result<os::Directory> Runner::OpenFolder(std::uint32_t index) const {
  const std::string folder = FolderOf(PathOf(index));
  if (folder.empty()) return directory_;
  return OfOutput(directory_.OpenDir(folder));
}

/// Returns whether other ranks write units of a file.
bool Runner::IsShared(std::uint32_t index) const {
  const std::uint64_t units = plan_.unit_count(index);
  if (units == 0) return false;
  const std::uint64_t first = plan_.first_unit(index, 0);
  return first < first_ || first + units > last_;
}

Status Runner::CreateFile(const os::Directory& folder, std::uint32_t index) {
  SW_TRY_ASSIGN(os::File out, OfOutput(OpenOutput(folder, index)));
  const std::uint64_t bytes = plan_.target().files[index].bytes;
  const bool shared = IsShared(index);
  if (created_ || shared) {
    // An interrupted write may have left another size. NFS clients write zeros behind the end of
    // the file that they know, so ranks on other nodes need the full size.
    SW_TRY(out.Allocate(bytes));
  } else if (!IsWhole(index)) {
    SW_TRY(out.Reserve(bytes));  // units and the frame fill the file, so writes set its size
  }
  // On a network file system a file that stays open does not show the writes of other ranks.
  if (shared) return out.Close();
  output_.Keep(index, std::move(out));
  return {};
}

}  // namespace shardwright::exec
