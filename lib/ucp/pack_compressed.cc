#include "ucp/pack_compressed.h"

#include <cstring>
#include <optional>

#include "exec/manifest.h"
#include "exec/run.h"
#include "format/zip/crc32.h"
#include "os/commit.h"
#include "os/dir.h"
#include "ucp/zpack.h"

namespace shardwright::ucp {
namespace {

/// Fills a block of a plain pack file from the members that lie in it, and notes their checksums.
Status FillBlock(const CompressedPack& pack, const plan::OutputFile& file, std::uint64_t at,
                 std::span<std::byte> block, exec::SourceSums* sums) {
  auto payload =
      std::partition_point(file.payloads.begin(), file.payloads.end(),
                           [&](const plan::Payload& p) { return p.offset + p.bytes <= at; });
  for (; payload != file.payloads.end() && payload->offset < at + block.size(); ++payload) {
    const std::uint64_t first = std::max(at, payload->offset);
    const std::uint64_t last = std::min(at + block.size(), payload->offset + payload->bytes);
    const std::span<std::byte> piece = block.subspan(first - at, last - first);
    SW_TRY(pack.bytes.Read(payload->member, first - payload->offset, piece));
    const std::uint64_t after = payload->offset + payload->bytes - last;
    const exec::Share share{payload->member, zip::Crc32Share(zip::Crc32(piece), after),
                            piece.size()};
    sums->Add({&share, 1});
  }
  return {};
}

Status CheckSums(const CompressedPack& pack, const plan::OutputFile& file,
                 const exec::SourceSums& sums) {
  for (const plan::Payload& payload : file.payloads) {
    const layout::Member& member = pack.map.members[payload.member];
    if (!member.crc32 || *member.crc32 == sums.crc(payload.member)) continue;
    char text[64];
    std::snprintf(text, sizeof text, "CRC-32 %08x expected, %08x found", *member.crc32,
                  sums.crc(payload.member));
    return Fail(Errc::kBadInput, pack.map.files[member.file] + ": " + member.name + ": " + text);
  }
  return {};
}

/// A file's line of the manifest, as it travels to the root.
struct Line {
  std::uint64_t file = 0;
  std::uint64_t bytes = 0;
  exec::Digest digest{};
};

/// The rank that writes a pack file: with node-local sources the one that sees what is in it.
int OwnerOf(const comm::Comm& comm, const Input& input, const CompressedPack& pack,
            std::size_t index) {
  if (input.file_owner.empty()) {
    return static_cast<int>(index % static_cast<std::size_t>(comm.size()));
  }
  const std::vector<plan::Payload>& payloads = pack.target.files[index].payloads;
  return payloads.empty() ? 0 : input.file_owner[pack.map.members[payloads.front().member].file];
}

/// Writes this rank's pack files.
Status WriteMine(const comm::Comm& comm, const Input& input, const CompressedPack& pack,
                 const std::string& stage, const ConvertOptions& options, Sink& sink,
                 std::vector<Line>* lines) {
  exec::SourceSums sums(pack.map.members.size());
  for (std::size_t f = 0; f < pack.target.files.size(); ++f) {
    if (OwnerOf(comm, input, pack, f) != comm.rank()) continue;
    if (sink.stop_requested())
      return Fail(Errc::kStopped, "stopped on request; --resume continues");
    const plan::OutputFile& file = pack.target.files[f];
    const std::string path = stage + "/" + file.path;
    SW_TRY_ASSIGN(const bool there, os::Exists(path));
    if (there && IsZpack(path, file.bytes)) {
      SW_TRY_ASSIGN(const os::File kept, os::File::OpenRead(path));
      SW_TRY_ASSIGN(const os::Identity identity, kept.Stat());
      exec::DigestStream digest;
      std::vector<std::byte> buffer;
      for (std::uint64_t at = 0; at < identity.bytes; at += buffer.size()) {
        buffer.resize(std::min<std::uint64_t>(plan::kUnitBytes, identity.bytes - at));
        SW_TRY(kept.ReadAt(at, buffer));
        digest.Add(buffer);
      }
      lines->push_back({f, identity.bytes, exec::FileDigest({}, digest.Finish())});
      continue;
    }
    if (there) SW_TRY(os::RemoveFile(path));
    SW_TRY_ASSIGN(const ZpackResult result, WriteZpack(
                                                path, file.bytes,
                                                [&](std::uint64_t at, std::span<std::byte> block) {
                                                  return FillBlock(pack, file, at, block, &sums);
                                                },
                                                options.threads));
    SW_TRY(CheckSums(pack, file, sums));
    lines->push_back({f, result.bytes, exec::FileDigest({}, result.digest)});
    sink.Progress(pack.bytes.bytes_read(), 0);
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
  // An upper bound as far as zstd goes: incompressible data grows by less than one part in 256.
  report.totals.output_files = pack.target.files.size() + 1;
  report.totals.output_bytes =
      pack.catalogue.size() + report.totals.read_bytes + report.totals.read_bytes / 256;
  if (options.dry_run) return report;
  sink.Pass("pack");
  std::optional<os::Stage> stage;
  const auto open_stage = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(const std::string run_id, os::MakeRunId());
    SW_TRY_ASSIGN(os::Stage opened,
                  os::Stage::Begin(options.output, {options.force, options.resume, run_id}));
    stage.emplace(std::move(opened));
    for (const std::string& note : stage->notes()) sink.Note(note, 0);
    SW_TRY(os::MakeDirs(stage->path() + "/pack"));
    return stage->path();
  };
  const Result<std::string> path = comm.OnRootText(open_stage);
  SW_TRY(path);
  std::vector<Line> mine;
  const auto work = [&]() -> Status {
    SW_TRY(exec::CheckShared(comm, *path, options.output));
    // The journal holds no records: it ties the stage to the inputs, so that only the same run
    // resumes in it.
    SW_TRY(os::Journal::Open(*path + "/" + os::kJournalDir + "/" + std::to_string(comm.rank()),
                             RunFingerprint(input, "zstd")));
    return WriteMine(comm, input, pack, *path, options, sink, &mine);
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
    SW_TRY(os::ReplaceFile(stage->path() + "/" + pack.catalogue_path, text));
    os::CommitSteps steps;
    steps.files_synced = true;
    steps.write_manifest = [&](const std::string& folder) -> Status {
      SW_TRY_ASSIGN(const std::string manifest, exec::MakeManifest(pack.manifest_head, files));
      return os::ReplaceFile(folder + "/" + exec::kManifestName, manifest);
    };
    return stage->Commit(steps);
  }));
  report.run.bytes_read = pack.bytes.bytes_read();
  report.run.bytes_written = bytes;
  report.run.files_written = pack.target.files.size() + 1;
  sink.AddRead(pack.bytes.bytes_read(), pack.bytes.files_read());
  if (comm.rank() == 0) sink.AddWritten(bytes, report.run.files_written);
  return report;
}

}  // namespace shardwright::ucp
