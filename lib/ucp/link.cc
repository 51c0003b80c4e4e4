#include "ucp/link.h"

#include "exec/manifest.h"
#include "os/commit.h"
#include "os/dir.h"

namespace shardwright::ucp {

bool CanLink(const Input& input, const dialect::Topology& topology) {
  const dialect::Topology& source = input.checkpoint.topology;
  return input.checkpoint.origin == "deepspeed" && input.file_owner.empty() &&
         source.zero == topology.zero && source.dp == topology.dp && source.tp == topology.tp &&
         source.pp == topology.pp && source.ep == topology.ep && source.dtype == topology.dtype &&
         source.pipeline == topology.pipeline && source.stages == topology.stages &&
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
      SW_TRY_ASSIGN(const std::string to, os::JoinSafe(folder, file.name));
      SW_TRY(os::HardLinkOrCopy(file.path, to));
      manifest["files"].push_back(
          {{"path", input.checkpoint.tag + "/" + file.name}, {"bytes", file.identity.bytes}});
    }
    SW_TRY(os::WriteWholeFile(stage.path() + "/latest", input.checkpoint.tag));
    os::CommitSteps steps;
    steps.write_manifest = [&](const std::string& path) {
      return os::ReplaceFile(path + "/" + exec::kManifestName, manifest.dump(1) + "\n");
    };
    return stage.Commit(steps);
  }));
  return totals;
}

}  // namespace shardwright::ucp
