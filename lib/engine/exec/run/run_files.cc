// SPDX-License-Identifier: Apache-2.0
// Passes of a run that process whole output files: frame, sync, read back, commit.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "engine/exec/run/run_internal.h"
#include "support/base/bytes.h"
#include "support/os/dir.h"
#include "support/os/sha256.h"

namespace shardwright::exec {

namespace {

/// Maximum size of a file that one write makes.
constexpr std::uint64_t kWholeFileBytes = std::uint64_t{256} << 10;
constexpr std::uint64_t kSmallFrameBytes = std::uint64_t{64} << 10;

std::uint64_t FrameBytes(const plan::OutputFile& file) {
  std::uint64_t frame = file.bytes;
  for (const plan::Payload& payload : file.payloads) frame -= payload.bytes;
  return frame;
}

/// Writes a frame as its bytes arrive; merges small adjacent byte ranges into one write.
class FrameWriter {
 public:
  explicit FrameWriter(const os::File& file) : file_(file) {}

  Status Put(std::uint64_t offset, std::span<const std::byte> bytes) {
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

  /// Writes the bytes that are merged so far.
  Status Flush() {
    if (held_.empty()) return {};
    SW_TRY(file_.WriteAt(first_, held_));
    held_.clear();
    return {};
  }

 private:
  const os::File& file_;
  std::uint64_t first_ = 0;  // offset of the buffered bytes
  std::vector<std::byte> held_;
};

}  // namespace

Status NotAsWritten(const std::string& path) {
  return Fail(Errc::kIo, path, ": the data read back differs from the data written");
}

Status NoteReadFromMemory(comm::Comm& comm, std::uint64_t mine, std::uint64_t files, Sink& sink) {
  SW_TRY_ASSIGN(const std::uint64_t from_memory, comm.AllReduceSum(mine));
  if (from_memory > 0 && comm.rank() == 0) {
    sink.Note(StrCat("readback: ", from_memory, " of ", files,
                     " files were read from memory, not from the device: this file system keeps "
                     "them there"),
              0);
  }
  return {};
}

Status WriteManifest(const os::Directory& stage, const RunOptions& options,
                     const std::vector<ManifestFile>& files) {
  SW_TRY_ASSIGN(const std::string text, MakeManifest(options.manifest, files));
  SW_TRY(stage.ReplaceFile(kManifestName, text));
  if (options.verify != Verify::kReadback) return {};
  // Reading one byte more than expected is enough to detect a longer file.
  SW_TRY_ASSIGN(const std::string found, stage.ReadWholeText(kManifestName, text.size() + 1));
  return found == text ? Status() : NotAsWritten(stage.PathOf(kManifestName));
}

template <class Visit>
Status Runner::ForMyFiles(unsigned threads, Visit&& visit) {
  return os::ForEachFile(plan_.target().files.size(), threads, [&](std::uint64_t file) {
    const auto index = static_cast<std::uint32_t>(file);
    return Mine(index) ? visit(index) : Status();
  });
}

/// Returns the number of threads for small units, 0 for the arena's threads: I/O threads as far as
/// their buffers fit. A source that computes its bytes, or that other
/// ranks read, has buffers for the arena's threads only.
unsigned Runner::SmallUnitThreads() const {
  constexpr std::uint64_t kBuffers =  // of a thread: its workspace and a whole file
      kWholeFileBytes * (kWorkspaceBytes / plan::kUnitBytes + 1);
  if (source_.has_places() || !options_.file_owner.empty()) return 0;
  const std::uint64_t fit = (options_.memory_bytes - options_.threads * kWorkspaceBytes) / kBuffers;
  const auto threads =
      static_cast<unsigned>(std::min<std::uint64_t>(fit, FrameThreads(kSmallFrameBytes)));
  return threads > options_.threads ? threads : 0;
}

/// Returns the number of frames of at most `largest` bytes to make at the same time: many if they
/// are small, because their writes and syncs take longer than making them; few if they are large,
/// to limit memory use.
unsigned Runner::FrameThreads(std::uint64_t largest) const {
  constexpr std::uint64_t kMemory = std::uint64_t{32} << 20;
  constexpr std::uint64_t kTimesFrame = 16;  // memory of an object graph per byte
  const std::uint64_t fit = kMemory / (kTimesFrame * largest);
  return static_cast<unsigned>(std::clamp<std::uint64_t>(
      fit, options_.threads, std::max(options_.threads, options_.io_threads)));
}

bool Runner::IsWhole(std::uint32_t index) const {
  const plan::OutputFile& file = plan_.target().files[index];
  return file.bytes <= kWholeFileBytes && FrameBytes(file) <= kSmallFrameBytes &&
         plan_.unit_count(index) == 1 && file.digests.files.empty();
}

/// Passes the frame of a file to `write` and stores the checksums of the file.
/// \pre the checksums of its units are known
template <class Write>
Status Runner::MakeFrame(std::uint32_t index, const Write& write) {
  const plan::OutputFile& file = plan_.target().files[index];
  const auto sums =
      std::span<const UnitSum>(sums_).subspan(plan_.first_unit(index, 0), plan_.unit_count(index));
  SW_TRY_ASSIGN(const std::vector<std::uint32_t> crcs,
                SumPayloads(plan_, index, sums, options_.verify != Verify::kNone));
  std::vector<Digest> digests;
  digests.reserve(sums.size());
  for (const UnitSum& sum : sums) digests.push_back(sum.digest);
  DigestStream digest;
  SW_TRY(file.frame(crcs, [&](std::uint64_t offset, std::string_view bytes) {
    digest.Add(std::as_bytes(std::span(bytes)));
    return write(offset, std::as_bytes(std::span(bytes)));
  }));
  file_sums_[index] = {FileDigest(digests, digest.Finish()), CombinedCrc32(sums)};
  complete_[index] = std::byte{1};
  return {};
}

/// Writes a file with its only unit and its frame in one call.
Status Runner::WriteWhole(const UnitInHand& unit, const os::File& out) {
  const std::uint32_t index = unit.unit.file;
  const plan::OutputFile& file = plan_.target().files[index];
  std::vector<std::byte> whole(file.bytes);
  std::uint64_t covered = 0;
  const auto put = [&](std::uint64_t offset, std::span<const std::byte> bytes) -> Status {
    SW_CHECK(offset <= whole.size() && bytes.size() <= whole.size() - offset);
    std::ranges::copy(bytes, whole.begin() + static_cast<std::ptrdiff_t>(offset));
    covered += bytes.size();
    return {};
  };
  // Payloads without bytes may precede that of the unit.
  SW_TRY(put(file.payloads[unit.unit.payload].offset, unit.bytes));
  SW_TRY(MakeFrame(index, put));
  SW_CHECK(covered == whole.size());
  SW_TRY(out.WriteAt(0, whole));
  writes_.Add(whole.size());
  return sync_at_once_ ? Status() : out.Sync();
}

Status Runner::WriteFrame(std::uint32_t index) {
  const plan::OutputFile& file = plan_.target().files[index];
  if (IsClone(index) || complete_[index] != std::byte{0} || !file.digests.files.empty()) return {};
  SW_TRY_ASSIGN(const auto out, output_.Get(index));
  FrameWriter frame(*out);
  SW_TRY(MakeFrame(index, [&](std::uint64_t offset, std::span<const std::byte> bytes) {
    return frame.Put(offset, bytes);
  }));
  SW_TRY(frame.Flush());
  writes_.Add(FrameBytes(file));
  return sync_at_once_ ? Status() : out->Sync();
}

Status Runner::WriteText(std::uint32_t index, const std::string& text) {
  SW_CHECK(text.size() == plan_.target().files[index].bytes);
  const auto bytes = std::as_bytes(std::span(text));
  SW_TRY_ASSIGN(const auto out, output_.Get(index));
  SW_TRY(out->WriteAt(0, bytes));
  writes_.Add(bytes.size());
  file_sums_[index] = {FileDigest({}, DigestOf(bytes)), 0};
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
    SW_TRY_ASSIGN(sums[file], OfWritten(os::Sha256Of(read)));
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
  return AgreeWritten(ForMyFiles(options_.threads, [&](std::uint32_t file) -> Status {
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
    if (IsClone(file) || complete_[file] != std::byte{0}) continue;
    if (files.empty() || files.back() != file) files.push_back(file);
  }
  return AgreeWritten(
      os::ForEachFile(files.size(), options_.io_threads, [&](std::uint64_t i) -> Status {
        SW_TRY_ASSIGN(const auto file, output_.Get(files[i]));
        return file->Sync();
      }));
}

Status Runner::WriteFrames() {
  sink_.Pass("finish");
  if (comm_.size() > 1 && !sync_at_once_) SW_TRY(SyncWritten());
  std::uint64_t largest = 1;
  for (const plan::OutputFile& file : plan_.target().files) {
    largest = std::max(largest, FrameBytes(file));
  }
  const auto mine = static_cast<std::uint64_t>(
      std::count(rank_of_file_.begin(), rank_of_file_.end(), comm_.rank()));
  std::atomic<std::uint64_t> done = 0;
  const auto write = [&](bool small) {
    const std::uint64_t most = small ? kSmallFrameBytes : largest;
    return AgreeWritten(ForMyFiles(FrameThreads(most), [&](std::uint32_t file) -> Status {
      if ((FrameBytes(plan_.target().files[file]) <= kSmallFrameBytes) != small) return {};
      SW_TRY(WriteFrame(file));
      sink_.Files(done.fetch_add(1, std::memory_order_relaxed) + 1, mine);
      return {};
    }));
  };
  SW_TRY(write(true));
  SW_TRY(write(false));
  SW_TRY(WriteDigestLists());
  if (sync_at_once_) SW_TRY(AgreeWritten(SyncFileSystem()));
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
Status Runner::CloseFiles() { return AgreeWritten(output_.CloseAll()); }

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
      SW_TRY(OfWritten(in.ReadAt(first, buffer)));
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
  SW_TRY(AgreeWritten(
      ForMyFiles(options_.threads, [&](std::uint32_t file) { return ReadBack(file); })));
  return NoteReadFromMemory(comm_, read_from_memory_.load(), plan_.target().files.size(), sink_);
}

Status Runner::Commit() {
  sink_.Pass("commit");
  SW_TRY(AgreeWritten(in_hand_.journal->Close()));
  in_hand_.journal.reset();
  std::vector<FileSum> mine;
  for (std::uint32_t file = 0; file < file_sums_.size(); ++file) {
    if (Mine(file)) mine.push_back(file_sums_[file]);
  }
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts, comm_.Gather(std::as_bytes(std::span(mine))));
  return comm_.OnRoot([&]() -> Status {
    std::vector<ManifestFile> files;
    std::vector<std::size_t> taken(parts.size(), 0);  // bytes of each rank's part
    for (std::size_t index = 0; index < file_sums_.size(); ++index) {
      const plan::OutputFile& made = plan_.target().files[index];
      const auto rank = static_cast<std::size_t>(rank_of_file_[index]);
      FileSum sum;
      std::memcpy(&sum, parts[rank].data() + taken[rank], sizeof sum);
      taken[rank] += sizeof sum;
      ManifestFile file{made.path, made.bytes, sum.digest};
      if (!made.payloads.empty()) file.payload_crc32 = sum.payload_crc32;
      if (IsClone(static_cast<std::uint32_t>(index))) {
        file.clone = made.clone == plan::CloneMode::kLink ? "link" : "clone";
      }
      files.push_back(std::move(file));
    }
    os::CommitSteps steps;
    steps.synced = sync_at_once_ ? os::Synced::kAll : os::Synced::kFiles;
    steps.write_manifest = [&](const os::Directory& stage) {
      return WriteManifest(stage, options_, files);
    };
    Status committed = in_hand_.stage->Commit(steps);
    in_hand_.stage->Print(sink_);
    return OfOutput(std::move(committed));
  });
}

}  // namespace shardwright::exec
