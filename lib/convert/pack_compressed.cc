// SPDX-License-Identifier: Apache-2.0
#include "convert/pack_compressed.h"

#include <cstring>
#include <optional>
#include <utility>

#include <tbb/task_arena.h>

#include "engine/exec/for_each.h"
#include "engine/exec/manifest.h"
#include "engine/exec/run/run.h"
#include "engine/exec/unfinished_writes.h"
#include "engine/exec/units.h"
#include "engine/exec/verify.h"
#include "engine/exec/zpack.h"
#include "support/os/commit.h"
#include "support/os/directory.h"

namespace shardwright::convert {
namespace {

/// A file's line of the manifest, in the form in which ranks send it to the root.
struct Line {
  std::uint64_t file = 0;
  std::uint64_t bytes = 0;
  exec::Digest digest{};
};

/// Returns the rank that writes a pack file. For node-local sources, a rank that sees its contents.
int OwnerOf(const comm::Comm& comm, const Input& input, const CompressedPack& pack,
            std::size_t index) {
  if (input.file_owner.empty()) {
    return static_cast<int>(index % static_cast<std::size_t>(comm.size()));
  }
  const std::vector<plan::Payload>& payloads = pack.target.files[index].payloads;
  return payloads.empty() ? 0 : input.file_owner[pack.map.members[payloads.front().member].file];
}

/// Returns the manifest line of a pack file that a stopped run has completed.
Result<Line> LineOfKept(std::uint64_t file, const os::File& kept) {
  SW_TRY_ASSIGN(const os::Identity identity, kept.Stat());
  exec::DigestStream digest;
  std::vector<std::byte> buffer;
  for (std::uint64_t at = 0; at < identity.bytes; at += buffer.size()) {
    buffer.resize(std::min<std::uint64_t>(plan::kUnitBytes, identity.bytes - at));
    SW_TRY(kept.ReadAt(at, buffer));
    digest.Add(buffer);
  }
  return Line{file, identity.bytes, exec::FileDigest({}, digest.Finish())};
}

/// Writes this rank's pack files.
Status WriteMine(const comm::Comm& comm, const Input& input, const CompressedPack& pack,
                 const os::Directory& stage, const ConvertOptions& options, Sink& sink,
                 std::vector<Line>* lines, exec::UnfinishedWrites* writes) {
  SW_TRY_ASSIGN(const plan::Plan plan, plan::Plan::Make(pack.map, pack.target));
  std::vector<std::uint32_t> mine;
  exec::UnitLoopOptions loop_options;
  loop_options.stopped = "stopped on request; --resume continues";
  for (std::uint32_t f = 0; f < pack.target.files.size(); ++f) {
    if (OwnerOf(comm, input, pack, f) != comm.rank()) continue;
    mine.push_back(f);
    for (const plan::Payload& payload : pack.target.files[f].payloads) {
      loop_options.bytes_total += payload.bytes;
    }
  }
  tbb::task_arena arena(exec::ArenaThreads(options.threads));
  exec::ZstdContexts contexts;
  exec::UnitLoop loop(plan, pack.bytes, arena, sink, loop_options);
  for (const std::uint32_t f : mine) {
    if (sink.stop_requested()) return Fail(Errc::kStopped, loop_options.stopped);
    const plan::OutputFile& file = pack.target.files[f];
    SW_TRY_ASSIGN(const std::optional<os::NameStatus> there, stage.Look(file.path));
    if (there && stage.IsOwnFile(*there)) {
      SW_TRY_ASSIGN(const os::File kept, stage.OpenRead(file.path));
      if (exec::IsZpack(kept, file.bytes)) {
        SW_TRY_ASSIGN(const Line line, LineOfKept(f, kept));
        lines->push_back(line);
        continue;
      }
    }
    if (there) SW_TRY(stage.RemoveFile(file.path));
    SW_TRY_ASSIGN(os::File created, stage.Create(file.path));
    exec::ZpackWriter writer(std::move(created), contexts, writes);
    std::vector<exec::UnitSum> sums;
    SW_TRY_ASSIGN(const exec::ZpackResult result,
                  exec::PackFile(plan, f, loop, std::move(writer), arena, &sums));
    SW_TRY(exec::SumPayloads(plan, f, sums, true));
    lines->push_back({f, result.bytes, exec::FileDigest({}, result.digest)});
  }
  return {};
}

}  // namespace

Result<ConvertReport> PackCompressed(comm::Comm& comm, const Input& input,
                                     const CompressedPack& pack, const ConvertOptions& options,
                                     Sink& sink) {
  ConvertReport report;
  report.dry_run = options.dry_run;
  for (const plan::OutputFile& file : pack.target.files) {
    for (const plan::Payload& payload : file.payloads) report.totals.read_bytes += payload.bytes;
  }
  // The upper bound of zstd: incompressible data grows by less than one part in 256.
  report.totals.output_files = pack.target.files.size() + 1;
  report.totals.output_bytes =
      pack.catalogue.size() + report.totals.read_bytes + report.totals.read_bytes / 256;
  if (options.dry_run) {
    report.needed_bytes = report.totals.output_bytes;
    SW_TRY_ASSIGN(report.free_bytes, FreeBytesFor(comm, options.output));
    return report;
  }
  const exec::CountReads reads(pack.bytes, sink);
  exec::UnfinishedWrites writes(sink);
  sink.Pass("pack");
  std::optional<os::Stage> stage;
  const auto open_stage = [&]() -> Result<std::string> {
    if (options.force) {
      SW_TRY(exec::CheckReplaceable(options.output, input.checkpoint.map.files));
    }
    SW_TRY_ASSIGN(const std::string run_id, os::MakeRunId());
    SW_TRY_ASSIGN(os::Stage opened, os::Stage::Begin(options.output, {options.force, options.resume,
                                                                      run_id, options.take_over}));
    stage.emplace(std::move(opened));
    stage->Print(sink);
    SW_TRY(stage->directory().MakeDirs("pack"));
    return stage->path();
  };
  const Result<std::string> path = comm.OnRootText(open_stage);
  SW_TRY(path);
  std::vector<Line> mine;
  const auto work = [&]() -> Status {
    SW_TRY_ASSIGN(const os::Directory directory, exec::OpenShared(comm, *path, options.output));
    SW_TRY_ASSIGN(const os::Directory journals, directory.OpenDir(os::kJournalDir));
    // The journal has no records. It ties the stage to the
    // inputs, so that only the same run can resume it.
    SW_TRY(os::Journal::Open(journals, std::to_string(comm.rank()), RunFingerprint(input, "zstd")));
    return WriteMine(comm, input, pack, directory, options, sink, &mine, &writes);
  };
  Status written = comm.Agree(work());
  if (!written) {
    const Errc code = written.error().code;
    if (stage) (void)stage->Abandon(code == Errc::kStopped || code == Errc::kIo);
    return tl::unexpected<Error>(std::move(written).error());
  }
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts, comm.Gather(std::as_bytes(std::span(mine))));
  std::uint64_t bytes = pack.catalogue.size();
  SW_TRY(comm.OnRoot([&]() -> Status {
    std::vector<exec::ManifestFile> files(pack.target.files.size());
    for (const comm::Bytes& part : parts) {
      for (std::size_t i = 0; i + sizeof(Line) <= part.size(); i += sizeof(Line)) {
        Line line;
        std::memcpy(&line, part.data() + i, sizeof line);
        files[line.file] = {pack.target.files[line.file].path, line.bytes, line.digest};
        bytes += line.bytes;
      }
    }
    const std::string& text = pack.catalogue;
    files.push_back({pack.catalogue_path, text.size(),
                     exec::FileDigest({}, exec::DigestOf(std::as_bytes(std::span(text))))});
    SW_TRY(stage->directory().ReplaceFile(pack.catalogue_path, text));
    os::CommitSteps steps;
    steps.files_synced = true;
    steps.write_manifest = [&](const os::Directory& folder) -> Status {
      SW_TRY_ASSIGN(const std::string manifest, exec::MakeManifest(pack.manifest_head, files));
      return folder.ReplaceFile(exec::kManifestName, manifest);
    };
    Status committed = stage->Commit(steps);
    stage->Print(sink);
    return committed;
  }));
  report.run.bytes_read = pack.bytes.bytes_read();
  report.run.bytes_written = bytes;
  report.run.files_written = pack.target.files.size() + 1;
  writes.Complete();
  if (comm.rank() == 0) sink.AddWritten(bytes, report.run.files_written);
  return report;
}

}  // namespace shardwright::convert
