// SPDX-License-Identifier: Apache-2.0
#include "convert/catalogue.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include <tbb/task_arena.h>
#include <nlohmann/json.hpp>

#include "engine/exec/for_each.h"
#include "engine/exec/manifest.h"
#include "engine/exec/run/identity.h"
#include "engine/exec/run/run.h"
#include "engine/exec/unfinished_writes.h"
#include "engine/exec/units.h"
#include "engine/exec/verify.h"
#include "engine/exec/zpack.h"
#include "engine/plan/target_builder.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/json/json.h"
#include "support/os/commit.h"
#include "support/os/dir.h"
#include "support/os/directory.h"
#include "support/os/file.h"
#include "support/os/io_threads.h"
#include "support/os/journal.h"

namespace shardwright::convert {
namespace {

constexpr const char* kCatalogueFile = "catalogue.swc";
constexpr std::uint64_t kCatalogueBytes = std::uint64_t{4} << 30;
constexpr std::uint64_t kPackAlign = 64;

constexpr std::string_view kCompressedSuffix = ".zst";

std::string PackName(std::size_t file, Pack pack) {
  char name[32];
  std::snprintf(name, sizeof name, "pack/%06zu", file);
  return name + std::string(pack == Pack::kZstd ? kCompressedSuffix : ".bin");
}

const char* PackWord(Pack pack) {
  switch (pack) {
    case Pack::kNone:
      return "none";
    case Pack::kCopy:
      return "copy";
    case Pack::kZstd:
      return "zstd";
  }
  return "";
}

Result<nlohmann::json> ReadManifest(const std::string& folder) {
  const std::string path = folder + "/" + exec::kManifestName;
  SW_TRY_ASSIGN(const std::string manifest, os::ReadWholeText(path, limits::kJsonBytes));
  SW_TRY_ASSIGN(json::Json json, json::Parse(manifest, path));
  if (!json.is_object() || !json.contains("kind") || json["kind"] != "catalogue") {
    return Fail(Errc::kBadInput, path, ": not the manifest of a fragment catalogue");
  }
  return json;
}

/// Plans the packed clone of a source: one file of payloads for each of its files.
/// \param builder  receives the pack files, and `map` the members that feed them
checkpoints::SourceSet PackedClone(const checkpoints::SourceSet& set, Pack pack,
                                   layout::ShardMap* map, plan::TargetBuilder* builder) {
  checkpoints::SourceSet packed = set;
  for (std::size_t f = 0; f < set.files.size(); ++f) {
    checkpoints::SourceFile& clone = packed.files[f];
    map->files.push_back(set.files[f].path);
    const std::string path = PackName(f, pack);
    const std::uint32_t out = builder->AddFile(path);
    std::vector<files::ContainerMetadata> metadata_table;
    for (const checkpoints::Container& container : clone.containers) {
      files::ContainerMetadata& metadata = metadata_table.emplace_back(*container.metadata);
      for (files::Storage& to : metadata.storages) {
        const files::Storage from = to;
        // An empty storage has no offset. A rounded one could exceed the file's size.
        const std::uint64_t end = builder->bytes(out);
        to.offset = from.bytes == 0 ? end : RoundUp(end, kPackAlign);
        if (from.bytes == 0) continue;
        builder->AddMember(out, to.offset, static_cast<std::uint32_t>(map->members.size()),
                           from.bytes);
        map->members.push_back({static_cast<std::uint32_t>(f), from.offset, from.bytes, from.crc32,
                                NameOf(metadata, from)});
      }
    }
    for (std::size_t c = 0; c < metadata_table.size(); ++c) {
      metadata_table[c].first = 0;
      metadata_table[c].last = builder->bytes(out);
      clone.containers[c].metadata =
          std::make_shared<const files::ContainerMetadata>(std::move(metadata_table[c]));
      clone.containers[c].stretches.clear();
    }
    clone.path = path;  // relative, because a packed catalogue may be moved
    clone.identity = {builder->bytes(out), 0, 0};
  }
  for (checkpoints::SiblingFile& clone : packed.siblings) {
    if (clone.content) continue;
    const std::uint64_t bytes = clone.identity.bytes;
    plan::OutputFile out = plan::WholeFile(PackName(builder->file_count(), pack), clone.path, bytes,
                                           plan::CloneMode::kCopy, map);
    clone.path = out.path;
    clone.identity = {bytes, 0, 0};
    builder->AddFile(std::move(out));
  }
  return packed;
}

/// Compares a sibling file's pack with its digest in the manifest, the only checksum
/// of its bytes. For files of the checkpoint, the source itself has checksums.
Status CheckPack(const os::File& stored, const std::string& name, Pack pack,
                 const std::map<std::string, exec::ListedFile>& files) {
  const auto listed = files.find(name);
  if (listed == files.end() || listed->second.digest.empty()) {
    return Fail(Errc::kBadInput, stored.path(), ": the manifest has no digest of this file");
  }
  SW_TRY_ASSIGN(const os::Identity identity, stored.Stat());
  std::vector<std::byte> buffer;
  std::vector<exec::Digest> units;
  exec::DigestStream whole;
  for (std::uint64_t at = 0; at < identity.bytes; at += buffer.size()) {
    buffer.resize(std::min(plan::kUnitBytes, identity.bytes - at));
    SW_TRY(stored.ReadAt(at, buffer));
    if (pack == Pack::kCopy) {
      units.push_back(exec::DigestOf(buffer));
    } else {
      whole.Add(buffer);  // a compressed file has only frame bytes
    }
  }
  const std::string found = exec::Hex(exec::FileDigest(units, whole.Finish()));
  if (found == listed->second.digest) return {};
  return Fail(Errc::kBadInput, stored.path(), ": damaged: expected digest ", listed->second.digest,
              " from the manifest, found ", found);
}

/// Sets the paths of a packed set to the payload files next to its catalogue. They
/// were written after the catalogue's text was fixed, so it contains only their sizes.
Status FindPacks(const std::string& folder, Pack pack, const nlohmann::json& manifest,
                 checkpoints::SourceSet* set) {
  const auto files = exec::ListedFiles(manifest);
  if (!files) {
    return Fail(Errc::kBadInput, folder, "/", exec::kManifestName, ": no valid list of files");
  }
  const auto find = [&](std::size_t number, std::string* path, os::Identity* identity,
                        bool sibling) -> Status {
    const std::string name = PackName(number, pack);
    *path = folder + "/" + name;
    SW_TRY_ASSIGN(const os::File stored, os::File::OpenRead(*path));
    SW_TRY_ASSIGN(const os::Identity found, stored.Stat());
    if (pack == Pack::kCopy && found.bytes != identity->bytes) {
      return Fail(Errc::kBadInput, *path, ": ", identity->bytes,
                  " bytes expected from the catalogue, found ", found.bytes);
    }
    // A compressed file has its own size, so keep the uncompressed size from the catalogue.
    *identity = {pack == Pack::kCopy ? found.bytes : identity->bytes, found.mtime_ns, found.inode};
    return sibling ? CheckPack(stored, name, pack, *files) : Status();
  };
  SW_TRY(os::ForEachFile(set->files.size(), os::kIoThreads, [&](std::uint64_t i) {
    checkpoints::SourceFile& file = set->files[i];
    return find(i, &file.path, &file.identity, false);
  }));
  std::size_t number = set->files.size();
  for (checkpoints::SiblingFile& sibling : set->siblings) {
    if (!sibling.content) SW_TRY(find(number++, &sibling.path, &sibling.identity, true));
  }
  return {};
}

}  // namespace

Result<bool> IsCatalogue(const std::string& folder) {
  return os::Exists(folder + "/" + kCatalogueFile);
}

Result<checkpoints::SourceSet> ReadCatalogue(const std::string& folder, bool siblings) {
  SW_TRY_ASSIGN(const nlohmann::json json, ReadManifest(folder));
  const std::string path = folder + "/" + kCatalogueFile;
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, kCatalogueBytes));
  Result<checkpoints::SourceSet> set = checkpoints::DeserializeSource(text);
  if (!set) return Within(path, std::move(set).error());
  if (!siblings) {
    set->siblings.clear();
    set->left_out.clear();
  }
  if (json.contains("packed")) {
    for (const Pack pack : {Pack::kNone, Pack::kCopy, Pack::kZstd}) {
      if (json["packed"] != PackWord(pack)) continue;
      if (pack != Pack::kNone) SW_TRY(FindPacks(folder, pack, json, &*set));
      return set;
    }
  }
  return Fail(Errc::kBadInput, folder, "/", exec::kManifestName,
              ": \"packed\": none, copy or zstd expected");
}

Result<std::string> MapsOfCatalogue(const std::string& folder) {
  SW_TRY_ASSIGN(const nlohmann::json json, ReadManifest(folder));
  const auto maps = json.find("maps");
  return maps == json.end() ? std::string() : maps->dump();
}

Result<std::string> WeightsOfCatalogue(const std::string& folder) {
  SW_TRY_ASSIGN(const nlohmann::json json, ReadManifest(folder));
  const auto weights = json.find("weights_of");
  return weights != json.end() && weights->is_string() ? weights->get<std::string>()
                                                       : std::string();
}

bool IsCompressed(const checkpoints::SourceSet& set) {
  return !set.files.empty() && set.files.front().path.ends_with(kCompressedSuffix);
}

namespace {

/// Parts of a compressed catalogue.
struct CompressedPack {
  const layout::ShardMap& map;   ///< the members that fill the pack files
  const plan::Target& target;    ///< the pack files before compression
  exec::ByteSource& bytes;       ///< reads the members
  std::string catalogue_path;    ///< relative path of the catalogue
  const std::string& catalogue;  ///< its bytes
  std::string manifest_head;
};

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

/// Returns the manifest line of a pack file in the stage.
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

/// Lines of pack files, by their numbers.
using Lines = std::map<std::uint64_t, Line>;

/// Returns the lines of the files that a stopped run has synced, from the journals of its ranks.
Result<Lines> LinesOf(const os::Directory& journals, const os::Fingerprint& fingerprint) {
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, journals.List());
  std::vector<std::string> names;
  names.reserve(entries.size());
  for (const os::Entry& entry : entries) {
    if (entry.name != exec::kIdentityName) names.push_back(entry.name);
  }
  SW_TRY_ASSIGN(const os::JournalRecords found, os::ReadJournals(journals, names, fingerprint));
  Lines lines;
  for (const std::vector<std::byte>& record : found.records) {
    Line line;
    if (record.size() != sizeof line) continue;
    std::memcpy(&line, record.data(), sizeof line);
    lines[line.file] = line;
  }
  return lines;
}

/// Writes this rank's pack files.
/// \param done  files that a stopped run has completed: they are kept if their bytes are the same
Status WriteMine(const comm::Comm& comm, const Input& input, const CompressedPack& pack,
                 const os::Directory& stage, const ConvertOptions& options, const Lines& done,
                 os::Journal* journal, Sink& sink, std::vector<Line>* lines,
                 exec::UnfinishedWrites* writes) {
  SW_TRY_ASSIGN(const plan::Plan plan, plan::Plan::Make(pack.map, pack.target));
  std::vector<std::uint32_t> mine;
  exec::UnitLoopOptions loop_options;
  loop_options.stopped = "stopped on request; the same command continues";
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
    if (const auto kept = done.find(f); kept != done.end() && there && stage.IsOwnFile(*there)) {
      SW_TRY_ASSIGN(const os::File read, stage.OpenRead(file.path));
      const Result<Line> line = LineOfKept(f, read);
      if (line && line->bytes == kept->second.bytes && line->digest == kept->second.digest) {
        lines->push_back(*line);
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
    SW_TRY(journal->Append(std::as_bytes(std::span(&lines->back(), 1))));  // the file is synced
  }
  return {};
}

/// Writes a catalogue with compressed pack files. This is not a copy program, because sizes are
/// known only after compression. Files are distributed over ranks, and blocks over threads. A
/// resumed run keeps the files that are complete. Every member is compared with its checksum.
/// \error kBadInput, kIo, kBusy, kStopped
/// Collective.
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
    SW_TRY_ASSIGN(report.free, FreeSpaceFor(comm, options.output));
    return report;
  }
  const exec::CountReads reads(pack.bytes, sink);
  exec::UnfinishedWrites writes(sink);
  sink.Pass("pack");
  exec::RunOptions run;
  run.output = options.output;
  run.force = options.force;
  run.resume = options.resume;
  run.take_over = options.take_over;
  run.identity = RunIdentity(input);
  run.identity.Add("--pack", PackWord(Pack::kZstd));
  std::optional<os::Stage> stage;
  const auto open_stage = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(os::Stage opened, exec::BeginStage(run, input.checkpoint.map.files, sink));
    stage.emplace(std::move(opened));
    SW_TRY(stage->directory().MakeDirs("pack"));
    return stage->path();
  };
  const Result<std::string> path = comm.OnRootText(open_stage);
  SW_TRY(path);
  std::vector<Line> mine;
  Lines done;
  os::Directory directory;
  os::Directory journals;
  std::optional<os::Journal> journal;
  const auto read = [&]() -> Status {
    SW_TRY_ASSIGN(directory, exec::OpenShared(comm, *path, options.output));
    SW_TRY_ASSIGN(journals, directory.OpenDir(os::kJournalDir));
    SW_TRY_ASSIGN(done, LinesOf(journals, run.identity.Fingerprint()));
    return {};
  };
  const auto work = [&]() -> Status {
    SW_TRY_ASSIGN(os::Journal opened, os::Journal::Open(journals, std::to_string(comm.rank()),
                                                        run.identity.Fingerprint()));
    journal.emplace(std::move(opened));
    return WriteMine(comm, input, pack, directory, options, done, &*journal, sink, &mine, &writes);
  };
  Status written = comm.Agree(exec::OfStoppedRun(options.output, read()));
  if (written) written = comm.Agree(work());
  if (!written) {
    // After a failed write or sync no file of the stage can be trusted, as in exec::Run.
    const Errc code = written.error().code;
    if (code == Errc::kIo && journal) (void)journal->Clear();
    journal.reset();
    SW_TRY(comm.Barrier());
    if (stage) (void)stage->Abandon(code == Errc::kStopped || code == Errc::kBusy);
    return tl::unexpected<Error>(std::move(written).error());
  }
  SW_TRY(comm.Agree(journal->Close()));
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts, comm.Gather(std::as_bytes(std::span(mine))));
  std::uint64_t bytes = pack.catalogue.size();
  Status committed = comm.OnRoot([&]() -> Status {
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
    steps.synced = os::Synced::kFiles;
    steps.write_manifest = [&](const os::Directory& folder) -> Status {
      SW_TRY_ASSIGN(const std::string manifest, exec::MakeManifest(pack.manifest_head, files));
      return folder.ReplaceFile(exec::kManifestName, manifest);
    };
    Status end = stage->Commit(steps);
    stage->Print(sink);
    return end;
  });
  if (!committed) {
    const bool failed_sync = committed.error().code == Errc::kIo;
    if (stage && !stage->committed()) (void)stage->Abandon(!failed_sync);
    return tl::unexpected<Error>(std::move(committed).error());
  }
  report.run.bytes_read = pack.bytes.bytes_read();
  report.run.bytes_written = bytes;
  report.run.files_written = pack.target.files.size() + 1;
  writes.Complete();
  if (comm.rank() == 0) sink.AddWritten(bytes, report.run.files_written);
  return report;
}

}  // namespace

Result<ConvertReport> ExtractCatalogue(comm::Comm& comm, Input& input, Pack pack,
                                       const ConvertOptions& options, Sink& sink) {
  layout::ShardMap map;
  plan::TargetBuilder builder;
  const checkpoints::SourceSet packed =
      pack == Pack::kNone ? checkpoints::SourceSet() : PackedClone(input.set, pack, &map, &builder);
  const auto text = std::make_shared<const std::string>(
      checkpoints::Serialize(pack == Pack::kNone ? input.set : packed));
  exec::FileBytes bytes(map, PathsOf(input.set));
  nlohmann::ordered_json head = ManifestHead("ucp-extract", "catalogue", input);
  head["packed"] = PackWord(pack);
  if (!input.set.weights_of.empty()) head["weights_of"] = input.set.weights_of;
  for (const MapUsed& used : input.mapped) head["maps"].push_back(used.Recipe());
  ConvertReport report;
  if (pack != Pack::kZstd) builder.AddText(kCatalogueFile, *text);
  const plan::Target target = std::move(builder).Take();
  if (pack == Pack::kZstd) {
    SW_TRY_ASSIGN(report, PackCompressed(comm, input,
                                         {map, target, bytes, kCatalogueFile, *text, head.dump()},
                                         options, sink));
  } else {
    exec::Identity identity = RunIdentity(input);
    identity.Add("--pack", PackWord(pack));
    SW_TRY_ASSIGN(report, RunPlan(comm, input, map, target, bytes, head.dump(), std::move(identity),
                                  options, sink));
  }
  report.siblings = ListSiblings(input.set);
  report.maps = input.mapped;
  return report;
}

}  // namespace shardwright::convert
