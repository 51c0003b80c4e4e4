#include "ucp/link.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "exec/manifest.h"
#include "os/commit.h"
#include "os/dir.h"

namespace shardwright::ucp {
namespace {

/// True if the set's files are the checkpoint's own; a packed catalogue holds their payloads only.
bool HasOwnFiles(const dialect::SourceSet& set) {
  return std::all_of(set.files.begin(), set.files.end(), [](const dialect::SourceFile& file) {
    return file.path.ends_with("/" + file.name);
  });
}

/// Refuses a file that is no longer the one that was scanned or catalogued.
Status CheckUnchanged(const dialect::SourceFile& file) {
  SW_TRY_ASSIGN(const os::File found, os::File::OpenRead(file.path));
  SW_TRY_ASSIGN(const os::Identity now, found.Stat());
  if (now.bytes == file.identity.bytes && now.mtime_ns == file.identity.mtime_ns) return {};
  return Fail(Errc::kNotFound, file.path + ": changed since it was catalogued: " +
                                   std::to_string(file.identity.bytes) + " bytes then, " +
                                   std::to_string(now.bytes) + " now");
}

}  // namespace

bool CanLink(const Input& input, const dialect::Topology& topology) {
  const dialect::Topology& source = input.checkpoint.topology;
  return input.checkpoint.origin == "deepspeed" && input.file_owner.empty() &&
         HasOwnFiles(input.set) && source.zero == topology.zero && source.dp == topology.dp &&
         source.tp == topology.tp && source.pp == topology.pp && source.ep == topology.ep &&
         source.dtype == topology.dtype && source.pipeline == topology.pipeline &&
         (!source.pipeline || source.stages == topology.stages) &&
         source.round_robin == topology.round_robin &&
         (source.zero != 3 || source.sub_group == topology.sub_group);
}

Result<plan::Totals> LinkCheckpoint(comm::Comm& comm, const Input& input,
                                    const nlohmann::ordered_json& head,
                                    const ConvertOptions& options, Sink& sink) {
  plan::Totals totals;
  for (const dialect::SourceFile& file : input.set.files) {
    ++totals.output_files;
    totals.output_bytes += file.identity.bytes;
  }
  if (options.dry_run) return totals;
  sink.Pass("link");
  SW_TRY(comm.OnRoot([&]() -> Status {
    SW_TRY_ASSIGN(const std::string run_id, os::MakeRunId());
    SW_TRY_ASSIGN(os::Stage stage,
                  os::Stage::Begin(options.output, {options.force, false, run_id}));
    SW_TRY_ASSIGN(const std::string folder, os::JoinSafe(stage.path(), input.checkpoint.tag));
    SW_TRY(os::MakeDir(folder));
    nlohmann::ordered_json manifest = head;
    manifest["linked"] = true;
    for (const dialect::SourceFile& file : input.set.files) {
      SW_TRY(CheckUnchanged(file));
      SW_TRY_ASSIGN(const std::string to, os::JoinSafe(folder, file.name));
      SW_TRY(os::HardLinkOrCopy(file.path, to));
      manifest["files"].push_back(
          {{"path", input.checkpoint.tag + "/" + file.name}, {"bytes", file.identity.bytes}});
    }
    SW_TRY(os::WriteWholeFile(stage.path() + "/latest", input.checkpoint.tag));
    const exec::Digest latest =
        exec::FileDigest({}, exec::FrameDigest({{0, input.checkpoint.tag}}));
    manifest["files"].push_back({{"path", "latest"},
                                 {"bytes", input.checkpoint.tag.size()},
                                 {"xxh3_128", exec::Hex(latest)}});
    os::CommitSteps steps;
    steps.write_manifest = [&](const std::string& path) {
      return os::ReplaceFile(path + "/" + exec::kManifestName, manifest.dump(1) + "\n");
    };
    return stage.Commit(steps);
  }));
  return totals;
}

}  // namespace shardwright::ucp
