// SPDX-License-Identifier: Apache-2.0
// Passes of a run that process whole output files: create, frame, sync, read back, commit.

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "engine/exec/run/run_internal.h"
#include "support/base/bytes.h"
#include "support/os/dir.h"
#include "support/os/sha256.h"

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

Status NotAsWritten(const std::string& path) {
  return Fail(Errc::kIo, path, ": the data read back differs from the data written");
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

/// Writes a frame as its bytes arrive; merges small adjacent byte ranges into one write.
class FrameWriter {
 public:
  explicit FrameWriter(const os::File& file) : file_(file) {}

  Status Put(std::uint64_t offset, std::span<const std::byte> bytes) {
    digest_.Add(bytes);
    if (offset != first_ + held_.size() || held_.size() + bytes.size() > plan::kUnitBytes) {
      SW_TRY(Flush());
      first_ = offset;
    }
    if (bytes.size() > plan::kUnitBytes) {
      first_ = offset + bytes.size();
      return file_.WriteAt(offset, bytes);
    }
    held_.insert(held_.end(), bytes.begin(), bytes.end());
    return {};
  }

  /// \returns the digest of the whole frame
  Result<Digest> Finish() && {
    SW_TRY(Flush());
    return digest_.Finish();
  }

 private:
  Status Flush() {
    if (held_.empty()) return {};
    SW_TRY(file_.WriteAt(first_, held_));
    held_.clear();
    return {};
  }

  const os::File& file_;
  DigestStream digest_;
  std::uint64_t first_ = 0;  // offset of the buffered bytes
  std::vector<std::byte> held_;
};

}  // namespace

template <class Visit>
Status Runner::ForMyFiles(unsigned threads, Visit&& visit) {
  return os::ForEachFile(plan_.target().files.size(), threads, [&](std::uint64_t file) {
    return Mine(file) ? visit(static_cast<std::uint32_t>(file)) : Status();
  });
}

/// Returns the number of frames to make at the same time: many if they are small, because their
/// writes and syncs take longer than making them; few if they are large, to limit memory use.
unsigned Runner::FrameThreads() const {
  constexpr std::uint64_t kMemory = std::uint64_t{32} << 20;
  constexpr std::uint64_t kTimesFrame = 16;  // memory of an object graph per byte
  std::uint64_t largest = 1;
  for (const plan::OutputFile& file : plan_.target().files) {
    std::uint64_t frame = file.bytes;
    for (const plan::Payload& payload : file.payloads) frame -= payload.bytes;
    largest = std::max(largest, frame);
  }
  const std::uint64_t fit = kMemory / (kTimesFrame * largest);
  return static_cast<unsigned>(std::clamp<std::uint64_t>(
      fit, options_.threads, std::max(options_.threads, options_.io_threads)));
}

Status Runner::CreateFiles() {
  std::set<std::string> folders;
  for (const plan::OutputFile& file : plan_.target().files) {
    SW_TRY(CheckPath(file.path));
    if (const auto slash = file.path.rfind('/'); slash != std::string::npos) {
      folders.insert(file.path.substr(0, slash));
    }
  }
  SW_TRY_ASSIGN(const std::string created, comm_.OnRootText([&]() -> Result<std::string> {
    if (resumed_) SW_TRY(BeginCreating());
    return created_ ? "yes" : "";
  }));
  created_ = !created.empty();
  if (!created_) noted_.clear();
  SW_TRY(comm_.OnRoot([&]() -> Status {
    for (const std::string& folder : folders) SW_TRY(OfOutput(directory_.MakeDirs(folder)));
    return {};
  }));
  SW_TRY(ChooseSync());
  SW_TRY(MakeClones());
  SW_TRY(comm_.OnRoot([&] { return CheckSpace(); }));
  SW_TRY(comm_.Agree(ForMyFiles(options_.io_threads, [&](std::uint32_t file) {
    return IsClone(file) ? Status() : CreateFile(file);
  })));
  return comm_.OnRoot(
      [&] { return created_ ? Status() : journals_.WriteWholeFile(kCreatedName, ""); });
}

/// Restarts a run that was stopped while it created its files. Removes all of them, because
/// only creating a file here proves that no other output has the same name on this file system.
Status Runner::BeginCreating() {
  SW_TRY_ASSIGN(created_, journals_.Exists(kCreatedName));
  if (created_) return {};
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
  sync_at_once_ = without == 0;
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
    SW_TRY_ASSIGN(const os::File to, OpenOutput(index));
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

Result<os::File> Runner::OpenOutput(std::uint32_t index) const {
  const std::string& path = PathOf(index);
  SW_TRY_ASSIGN(const std::optional<os::NameStatus> there, directory_.Look(path));
  if (there && !created_) return TwoOutputs(directory_.PathOf(path));
  if (there) {
    if (directory_.IsOwnFile(*there)) return directory_.OpenWrite(path);
    // Never write into a file of another user or with further hard links: replace it.
    SW_TRY(directory_.RemoveFile(path));
  }
  Result<os::File> made = directory_.Create(path, plan_.target().files[index].executable);
  if (!made && made.error().code == Errc::kBusy) return TwoOutputs(directory_.PathOf(path));
  return made;
}

Status Runner::CreateFile(std::uint32_t index) {
  SW_TRY_ASSIGN(os::File out, OfOutput(OpenOutput(index)));
  SW_TRY(out.Allocate(plan_.target().files[index].bytes));
  return out.Close();
}

Status Runner::WriteFrame(std::uint32_t index) {
  const plan::OutputFile& file = plan_.target().files[index];
  if (IsClone(index) || !file.digests.files.empty()) return {};
  const auto sums =
      std::span<const UnitSum>(sums_).subspan(plan_.first_unit(index, 0), plan_.unit_count(index));
  SW_TRY_ASSIGN(const std::vector<std::uint32_t> crcs,
                SumPayloads(plan_, index, sums, options_.verify != Verify::kNone));
  std::vector<Digest> digests;
  digests.reserve(sums.size());
  for (const UnitSum& sum : sums) digests.push_back(sum.digest);
  SW_TRY_ASSIGN(const auto out, output_.Get(index));
  FrameWriter frame(*out);
  SW_TRY(file.frame(crcs, [&](std::uint64_t offset, std::string_view bytes) {
    return frame.Put(offset, std::as_bytes(std::span(bytes)));
  }));
  SW_TRY_ASSIGN(const Digest digest, std::move(frame).Finish());
  std::uint64_t payload_bytes = 0;
  for (const plan::Payload& payload : file.payloads) payload_bytes += payload.bytes;
  writes_.Add(file.bytes - payload_bytes);
  file_sums_[index] = {FileDigest(digests, digest), CombinedCrc32(sums)};
  return sync_at_once_ ? Status() : out->Sync();
}

Status Runner::WriteText(std::uint32_t index, const std::string& text) {
  SW_CHECK(text.size() == plan_.target().files[index].bytes);
  SW_TRY_ASSIGN(const auto out, output_.Get(index));
  FrameWriter frame(*out);
  SW_TRY(frame.Put(0, std::as_bytes(std::span(text))));
  SW_TRY_ASSIGN(const Digest digest, std::move(frame).Finish());
  writes_.Add(text.size());
  file_sums_[index] = {FileDigest({}, digest), 0};
  return sync_at_once_ ? Status() : out->Sync();
}

/// Computes the digests of listed files on the ranks that completed them, then writes the lists.
Status Runner::WriteDigestLists() {
  const std::vector<plan::OutputFile>& files = plan_.target().files;
  std::vector<std::string> sums(files.size());
  std::vector<std::byte> listed(files.size());
  bool any = false;
  for (const plan::OutputFile& file : files) {
    for (const std::uint32_t other : file.digests.files) listed[other] = std::byte{1};
    any = any || !file.digests.files.empty();
  }
  if (!any) return {};
  SW_TRY(comm_.Agree(ForMyFiles(options_.threads, [&](std::uint32_t file) -> Status {
    if (listed[file] == std::byte{0}) return {};
    SW_TRY_ASSIGN(const os::File read, OfOutput(directory_.OpenRead(PathOf(file))));
    SW_TRY_ASSIGN(sums[file], os::Sha256Of(read));
    return {};
  })));
  std::string mine;
  for (std::size_t file = 0; file < sums.size(); ++file) {
    if (!sums[file].empty()) mine += std::to_string(file) + " " + sums[file] + "\n";
  }
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts,
                comm_.AllGather(std::as_bytes(std::span(mine))));
  for (const comm::Bytes& part : parts) {
    std::istringstream lines(std::string(reinterpret_cast<const char*>(part.data()), part.size()));
    std::size_t file = 0;
    for (std::string sum; lines >> file >> sum;) sums[file] = sum;
  }
  return comm_.Agree(ForMyFiles(options_.threads, [&](std::uint32_t file) -> Status {
    const plan::DigestList& list = files[file].digests;
    if (list.files.empty()) return {};
    std::vector<std::string> of_list;
    for (const std::uint32_t other : list.files) of_list.push_back(sums[other]);
    return WriteText(file, list.text(of_list));
  }));
}

Status Runner::SyncWritten() {
  // On a network file system only the machine that wrote a page can sync it, so
  // every rank syncs the files of its units before other ranks complete them.
  std::vector<std::uint32_t> files;
  for (std::uint64_t index = first_; index < last_; ++index) {
    const std::uint32_t file = plan_.unit(index).file;
    if (!IsClone(file) && (files.empty() || files.back() != file)) files.push_back(file);
  }
  return comm_.Agree(
      os::ForEachFile(files.size(), options_.io_threads, [&](std::uint64_t i) -> Status {
        SW_TRY_ASSIGN(const auto file, output_.Get(files[i]));
        return file->Sync();
      }));
}

Status Runner::WriteFrames() {
  sink_.Pass("finish");
  if (comm_.size() > 1 && !sync_at_once_) SW_TRY(SyncWritten());
  file_sums_.resize(plan_.target().files.size());
  SW_TRY(comm_.Agree(
      ForMyFiles(FrameThreads(), [&](std::uint32_t file) { return WriteFrame(file); })));
  SW_TRY(WriteDigestLists());
  if (sync_at_once_) SW_TRY(comm_.Agree(SyncFileSystem()));
  return CloseFiles();
}

/// Syncs the whole file system. If that fails, syncs this rank's files one by one to find the file
/// and the reason, because a sync of a file system reports a full quota as an input/output error.
Status Runner::SyncFileSystem() {
  Status all = directory_.SyncFileSystem();
  if (all) return all;
  const auto sync = [&](std::uint32_t file) -> Status {
    if (IsClone(file)) return {};
    SW_TRY_ASSIGN(const auto out, output_.Get(file));
    return out->Sync();
  };
  SW_TRY(ForMyFiles(options_.io_threads, sync));
  return all;
}

/// Closes all files before the output is renamed, because some file
/// systems report only at close that they could not store a file.
Status Runner::CloseFiles() { return comm_.Agree(output_.CloseAll()); }

Status Runner::ReadBack(std::uint32_t index) {
  if (IsClone(index)) return {};
  const plan::OutputFile& file = plan_.target().files[index];
  SW_TRY_ASSIGN(const os::File in, OfOutput(directory_.OpenRead(PathOf(index))));
  if (!in.DropCache()) ++read_from_memory_;
  std::vector<std::byte> buffer;
  std::vector<Digest> digests;
  DigestStream frame;
  const auto read = [&](std::uint64_t first, std::uint64_t last, auto&& visit) -> Status {
    for (; first < last; first += buffer.size()) {
      buffer.resize(std::min(plan::kUnitBytes, last - first));
      SW_TRY(in.ReadAt(first, buffer));
      visit();
    }
    return {};
  };
  std::uint64_t end = 0;
  for (const plan::Payload& payload : file.payloads) {
    SW_TRY(read(end, payload.offset, [&] { frame.Add(buffer); }));
    SW_TRY(read(payload.offset, payload.offset + payload.bytes,
                [&] { digests.push_back(DigestOf(buffer)); }));
    end = payload.offset + payload.bytes;
  }
  SW_TRY(read(end, file.bytes, [&] { frame.Add(buffer); }));
  if (FileDigest(digests, frame.Finish()) != file_sums_[index].digest) {
    return NotAsWritten(in.path());
  }
  return {};
}

Status Runner::ReadBackAll() {
  sink_.Pass("readback");
  SW_TRY(comm_.Agree(
      ForMyFiles(options_.threads, [&](std::uint32_t file) { return ReadBack(file); })));
  SW_TRY_ASSIGN(const std::uint64_t from_memory, comm_.AllReduceSum(read_from_memory_.load()));
  if (from_memory > 0 && comm_.rank() == 0) {
    sink_.Note(StrCat("readback: ", from_memory, " of ", plan_.target().files.size(),
                      " files were read from memory, not from the device: this file system keeps "
                      "them there"),
               0);
  }
  return {};
}

Status Runner::Commit() {
  sink_.Pass("commit");
  SW_TRY(comm_.Agree(journal_->Close()));
  journal_.reset();
  std::vector<FileSum> mine;
  for (std::size_t file = 0; file < file_sums_.size(); ++file) {
    if (Mine(file)) mine.push_back(file_sums_[file]);
  }
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts, comm_.Gather(std::as_bytes(std::span(mine))));
  return comm_.OnRoot([&]() -> Status {
    std::vector<ManifestFile> files;
    const auto ranks = static_cast<std::size_t>(comm_.size());
    for (std::size_t index = 0; index < file_sums_.size(); ++index) {
      const plan::OutputFile& made = plan_.target().files[index];
      FileSum sum;
      std::memcpy(&sum, parts[index % ranks].data() + index / ranks * sizeof sum, sizeof sum);
      ManifestFile file{made.path, made.bytes, sum.digest};
      if (!made.payloads.empty()) file.payload_crc32 = sum.payload_crc32;
      if (IsClone(static_cast<std::uint32_t>(index))) {
        file.clone = made.clone == plan::CloneMode::kLink ? "link" : "clone";
      }
      files.push_back(std::move(file));
    }
    os::CommitSteps steps;
    steps.files_synced = true;
    steps.write_manifest = [&](const os::Directory& stage) -> Status {
      SW_TRY_ASSIGN(const std::string text, MakeManifest(options_.manifest, files));
      SW_TRY(stage.ReplaceFile(kManifestName, text));
      if (options_.verify != Verify::kReadback) return {};
      // Reading one byte more than expected is enough to detect a longer file.
      SW_TRY_ASSIGN(const std::string found, stage.ReadWholeText(kManifestName, text.size() + 1));
      return found == text ? Status() : NotAsWritten(stage.PathOf(kManifestName));
    };
    Status committed = stage_->Commit(steps);
    stage_->Print(sink_);
    return OfOutput(std::move(committed));
  });
}

}  // namespace shardwright::exec
