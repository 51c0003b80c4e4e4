// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/run/run_compressed.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <tbb/task_arena.h>

#include "engine/exec/for_each.h"
#include "engine/exec/integrity.h"
#include "engine/exec/manifest.h"
#include "engine/exec/run/run_internal.h"
#include "engine/exec/unfinished_writes.h"
#include "engine/exec/units.h"
#include "engine/exec/zpack.h"
#include "support/base/system.h"
#include "support/os/commit.h"
#include "support/os/directory.h"
#include "support/os/file.h"
#include "support/os/journal.h"

namespace shardwright::exec {
namespace {

/// A file's line of the manifest, in the form in which ranks send it to the root.
struct Line {
  std::uint64_t file = 0;
  std::uint64_t bytes = 0;
  Digest digest{};

  bool operator==(const Line&) const = default;
};

/// Returns the manifest line of a file in the stage.
Result<Line> LineOf(std::uint64_t file, const os::File& stored) {
  SW_TRY_ASSIGN(const os::Identity identity, stored.Stat());
  DigestStream digest;
  std::vector<std::byte> buffer;
  for (std::uint64_t at = 0; at < identity.bytes; at += buffer.size()) {
    buffer.resize(std::min<std::uint64_t>(plan::kUnitBytes, identity.bytes - at));
    SW_TRY(stored.ReadAt(at, buffer));
    digest.Add(buffer);
  }
  return Line{file, identity.bytes, FileDigest({}, digest.Finish())};
}

/// One run, with the state that its passes share.
class CompressedRun {
 public:
  CompressedRun(comm::Comm& comm, const plan::Plan& plan, ByteSource& source,
                const RunOptions& options, Sink& sink)
      : comm_(comm), plan_(plan), source_(source), options_(options), sink_(sink), writes_(sink) {}

  Result<RunReport> Run();  // collective

 private:
  Status Passes();     // collective
  Status Begin();      // collective
  Status ReadLines();  // of the files that a stopped run has synced; local
  Status WriteMine();  // this rank's files; local
  Status WriteText(std::uint32_t index);
  Result<bool> Keep(std::uint32_t index, const os::NameStatus& status);
  Status ReadBackMine();  // local
  Status Commit();        // collective

  /// Returns the rank that writes a file. For node-local sources, a rank that sees its contents.
  int OwnerOf(std::uint32_t index) const;
  const plan::OutputFile& FileOf(std::uint32_t index) const { return plan_.target().files[index]; }

  comm::Comm& comm_;
  const plan::Plan& plan_;
  ByteSource& source_;
  const RunOptions& options_;
  Sink& sink_;
  UnfinishedWrites writes_;
  StageInHand in_hand_;
  os::Directory directory_;             // the stage
  std::map<std::uint64_t, Line> done_;  // of a stopped run, by file
  std::vector<Line> mine_;
  std::uint64_t read_from_memory_ = 0;  // files that the readback found in the cache
  RunReport report_;
};

Result<RunReport> CompressedRun::Run() {
  const std::uint64_t before = source_.bytes_read();
  Status status = Passes();
  if (!status) {
    const Status left = LeaveStage(comm_, status.error().code, in_hand_);
    if (!left) sink_.Warn(left.error().message);
  }
  SW_TRY(std::move(status));
  writes_.Complete();
  SW_TRY_ASSIGN(report_.bytes_read, comm_.AllReduceSum(source_.bytes_read() - before));
  report_.files_written = plan_.target().files.size();
  return report_;
}

Status CompressedRun::Passes() {
  SW_TRY(Begin());
  SW_TRY(comm_.Agree(OfStoppedRun(options_.output, ReadLines())));
  sink_.Pass("pack");
  SW_TRY(in_hand_.AgreeWritten(comm_, WriteMine()));
  if (options_.verify == Verify::kReadback) {
    sink_.Pass("readback");
    SW_TRY(in_hand_.AgreeWritten(comm_, ReadBackMine()));
    SW_TRY(NoteReadFromMemory(comm_, read_from_memory_, plan_.target().files.size(), sink_));
  }
  sink_.Pass("commit");
  SW_TRY(in_hand_.AgreeWritten(comm_, in_hand_.journal->Close()));
  return Commit();
}

Status CompressedRun::Begin() {
  sink_.Pass("prepare");
  const auto open_stage = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(os::Stage stage, BeginStage(options_, plan_.source().files, sink_));
    std::string path = stage.path();
    in_hand_.stage.emplace(std::move(stage));
    if (in_hand_.stage->resumed()) {
      SW_TRY(OfOutput(RemoveUnplanned(in_hand_.stage->directory(), plan_.target())));
    }
    for (const plan::OutputFile& file : plan_.target().files) {
      const std::string folder = FolderOf(file.path);
      if (!folder.empty()) SW_TRY(in_hand_.stage->directory().MakeDirs(folder));
    }
    return path;
  };
  const Result<std::string> path = comm_.OnRootText(open_stage);
  SW_TRY(path);
  SW_TRY_ASSIGN(directory_, OpenShared(comm_, *path, options_.output));
  return {};
}

Status CompressedRun::ReadLines() {
  SW_TRY_ASSIGN(const os::Directory journals, directory_.OpenDir(os::kJournalDir));
  SW_TRY_ASSIGN(const std::vector<std::vector<std::byte>> records,
                options_.identity.ReadJournals(journals));
  for (const std::vector<std::byte>& record : records) {
    Line line;
    if (record.size() != sizeof line) continue;
    std::memcpy(&line, record.data(), sizeof line);
    done_[line.file] = line;
  }
  return {};
}

int CompressedRun::OwnerOf(std::uint32_t index) const {
  const std::vector<plan::Payload>& payloads = FileOf(index).payloads;
  if (options_.file_owner.empty()) {
    return static_cast<int>(index % static_cast<std::uint32_t>(comm_.size()));
  }
  if (payloads.empty()) return 0;
  return options_.file_owner[plan_.source().members[payloads.front().member].file];
}

/// Returns whether a stopped run has completed a file, and its bytes are still the same.
Result<bool> CompressedRun::Keep(std::uint32_t index, const os::NameStatus& status) {
  const auto done = done_.find(index);
  if (done == done_.end() || !directory_.IsOwnFile(status)) return false;
  SW_TRY_ASSIGN(const os::File kept, directory_.OpenRead(FileOf(index).path));
  const Result<Line> line = LineOf(index, kept);
  if (!line || *line != done->second) return false;
  mine_.push_back(*line);
  return true;
}

Status CompressedRun::WriteMine() {
  SW_TRY_ASSIGN(const os::Directory journals, directory_.OpenDir(os::kJournalDir));
  SW_TRY_ASSIGN(os::Journal journal, os::Journal::Open(journals, std::to_string(comm_.rank()),
                                                       options_.identity.Fingerprint()));
  in_hand_.journal.emplace(std::move(journal));
  std::vector<std::uint32_t> mine;
  UnitLoopOptions loop_options;
  loop_options.stopped = "stopped on request; the same command continues";
  for (std::uint32_t index = 0; index < plan_.target().files.size(); ++index) {
    if (OwnerOf(index) != comm_.rank()) continue;
    mine.push_back(index);
    for (const plan::Payload& payload : FileOf(index).payloads) {
      loop_options.bytes_total += payload.bytes;
    }
  }
  tbb::task_arena arena(ArenaThreads(options_.threads));
  ZstdContexts contexts;
  UnitLoop loop(plan_, source_, arena, sink_, loop_options);
  for (const std::uint32_t index : mine) {
    if (sink_.stop_requested()) return Fail(Errc::kStopped, loop_options.stopped);
    const std::string& path = FileOf(index).path;
    SW_TRY_ASSIGN(const std::optional<os::NameStatus> there, directory_.Look(path));
    if (there) {
      SW_TRY_ASSIGN(const bool kept, Keep(index, *there));
      if (kept) continue;
      SW_TRY(directory_.RemoveFile(path));
    }
    if (FileOf(index).payloads.empty() && FileOf(index).bytes > 0) {
      SW_TRY(WriteText(index));
      continue;
    }
    SW_TRY_ASSIGN(os::File created, directory_.Create(path));
    ZpackWriter writer(std::move(created), contexts, &writes_);
    std::vector<UnitSum> sums;
    SW_TRY_ASSIGN(const ZpackResult result,
                  PackFile(plan_, index, loop, std::move(writer), arena, &sums));
    SW_TRY(SumPayloads(plan_, index, sums, options_.verify != Verify::kNone));
    mine_.push_back({index, result.bytes, FileDigest({}, result.digest)});
    // PackFile has synced the file.
    SW_TRY(in_hand_.journal->Append(std::as_bytes(std::span(&mine_.back(), 1))));
  }
  return {};
}

/// Writes a file without payloads, which stays as it is.
Status CompressedRun::WriteText(std::uint32_t index) {
  const plan::OutputFile& file = FileOf(index);
  std::string text;
  SW_TRY(file.frame({}, [&](std::uint64_t offset, std::string_view bytes) -> Status {
    SW_CHECK(offset == text.size());
    text += bytes;
    return {};
  }));
  SW_TRY(directory_.ReplaceFile(file.path, text));
  writes_.Add(text.size());
  mine_.push_back({index, text.size(), FileDigest({}, DigestOf(std::as_bytes(std::span(text))))});
  return {};
}

Status CompressedRun::ReadBackMine() {
  for (const Line& line : mine_) {
    SW_TRY_ASSIGN(
        const os::File in,
        OfOutput(directory_.OpenRead(FileOf(static_cast<std::uint32_t>(line.file)).path)));
    if (!in.DropCache()) ++read_from_memory_;
    SW_TRY_ASSIGN(const Line found, OfWritten(LineOf(line.file, in)));
    if (found != line) return NotAsWritten(in.path());
  }
  return {};
}

Status CompressedRun::Commit() {
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts,
                comm_.Gather(std::as_bytes(std::span(mine_))));
  std::uint64_t bytes = 0;
  for (const Line& line : mine_) bytes += line.bytes;
  SW_TRY_ASSIGN(report_.bytes_written, comm_.AllReduceSum(bytes));
  return comm_.OnRoot([&]() -> Status {
    std::vector<ManifestFile> files(plan_.target().files.size());
    for (const comm::Bytes& part : parts) {
      for (std::size_t i = 0; i + sizeof(Line) <= part.size(); i += sizeof(Line)) {
        Line line;
        std::memcpy(&line, part.data() + i, sizeof line);
        files[line.file] = {plan_.target().files[line.file].path, line.bytes, line.digest};
      }
    }
    os::CommitSteps steps;
    steps.synced = os::Synced::kFiles;
    steps.write_manifest = [&](const os::Directory& folder) {
      return WriteManifest(folder, options_, files);
    };
    Status committed = in_hand_.stage->Commit(steps);
    in_hand_.stage->Print(sink_);
    return OfOutput(std::move(committed));
  });
}

}  // namespace

Result<RunReport> RunCompressed(comm::Comm& comm, const plan::Plan& plan, ByteSource& source,
                                const RunOptions& options, Sink& sink) {
  return CompressedRun(comm, plan, source, options, sink).Run();
}

}  // namespace shardwright::exec
