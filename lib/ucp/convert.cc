#include "ucp/convert.h"

#include <optional>

#include <nlohmann/json.hpp>

#include "base/limits.h"
#include "base/text.h"
#include "base/version.h"
#include "dialect/dcp/dcp.h"
#include "exec/integrity.h"
#include "exec/manifest.h"
#include "exec/replicas.h"
#include "os/dir.h"
#include "ucp/ds_to_universal.h"
#include "ucp/verbatim.h"

namespace shardwright::ucp {

nlohmann::ordered_json ToJson(const dialect::Layout& layout) {
  return nlohmann::ordered_json::parse(layout.Json());
}

std::string Explain(const dialect::Layout& layout) {
  std::string text;
  const nlohmann::ordered_json json = ToJson(layout);
  for (const auto& [key, value] : json.items()) {
    if (key == "stages") continue;
    text += (text.empty() ? "" : " ") + key + "=" +
            (value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

nlohmann::ordered_json ManifestHead(const std::string& command, const std::string& kind,
                                    const Input& input) {
  nlohmann::ordered_json source = {{"kind", input.checkpoint.origin},
                                   {"tag", input.checkpoint.tag},
                                   {"layout", ToJson(input.checkpoint.layout)},
                                   {"fingerprint", FingerprintText(input)}};
  for (const MapUsed& map : input.mapped) source["maps"].push_back(map.Json());
  return {{"schema", 1},
          {"program", "shardwright"},
          {"version", kVersion},
          {"command", command},
          {"kind", kind},
          {"source", std::move(source)},
          {"neighbours", input.neighbours ? "copy" : "none"}};
}

Result<bool> FoundDone(comm::Comm& comm, const ConvertOptions& options,
                       const std::string& manifest_head, const Error& error, Sink& sink) {
  if (!options.resume || options.force || error.code != Errc::kBusy) return false;
  const auto same = [&]() -> Result<std::string> {
    const Result<std::string> text =
        os::ReadWholeText(options.output + "/" + exec::kManifestName, limits::kJsonBytes);
    if (!text) return std::string();
    const nlohmann::json found = nlohmann::json::parse(*text, nullptr, false);
    const nlohmann::json head = nlohmann::json::parse(manifest_head);
    if (!found.is_object()) return std::string();
    for (const auto& [key, value] : head.items()) {
      if (!found.contains(key) || found[key] != value) return std::string();
    }
    return std::string("same");
  };
  SW_TRY_ASSIGN(const std::string answer, comm.OnRootText(same));
  if (answer.empty()) return false;
  sink.Note(options.output + ": complete already, nothing to resume", 0);
  return true;
}

Result<ConvertReport> RunPlan(comm::Comm& comm, const Input& input, const layout::ShardMap& source,
                              const plan::Target& target, exec::ByteSource& bytes,
                              const std::string& manifest_head, const std::string& parameters,
                              const ConvertOptions& options, Sink& sink) {
  sink.Pass("plan");
  SW_TRY_ASSIGN(const plan::Plan plan, comm.Agree(plan::Plan::Make(source, target)));
  exec::RunOptions run;
  run.output = options.output;
  run.force = options.force;
  run.resume = options.resume;
  run.verify = options.verify;
  run.threads = options.threads;
  run.memory_bytes = options.memory_bytes;
  run.fingerprint = RunFingerprint(input, parameters);
  run.manifest = manifest_head;
  run.file_owner = input.file_owner;
  ConvertReport report;
  report.dry_run = options.dry_run;
  report.totals = plan.totals();
  if (options.verify == exec::Verify::kNone) report.totals.verify_bytes = 0;
  report.buffer_bytes = exec::BufferBytes(run);
  if (options.dry_run) return report;
  if (options.verify != exec::Verify::kNone) {
    SW_TRY(VerifyDigests(comm, input, options.threads, sink));
  }
  if (options.verify == exec::Verify::kReplicas) {
    sink.Pass("replicas");
    exec::Exchange replicas(comm, input.checkpoint.map, *input.bytes, input.file_owner);
    SW_TRY(exec::CompareReplicas(comm, replicas, options.threads, options.memory_bytes, sink));
  }
  Result<exec::RunReport> ran = exec::Run(comm, plan, bytes, run, sink);
  if (!ran) {
    SW_TRY_ASSIGN(report.found_done, FoundDone(comm, options, manifest_head, ran.error(), sink));
    if (!report.found_done) return tl::unexpected<Error>(std::move(ran).error());
    return report;
  }
  report.run = *std::move(ran);
  sink.AddRead(bytes.bytes_read(), bytes.files_read());
  if (comm.rank() == 0) sink.AddWritten(report.run.bytes_written, report.run.files_written);
  return report;
}

namespace {

/// Equal layouts: how the source's files become the output's.
plan::Twin TwinFor(const Input& input, const ConvertOptions& options) {
  // A clone is not read, so nothing of it could be verified; and the root makes it.
  const bool reads =
      options.verify == exec::Verify::kReplicas || options.verify == exec::Verify::kReadback;
  if (reads || !input.file_owner.empty()) return plan::Twin::kCopy;
  return options.link ? plan::Twin::kLink : plan::Twin::kClone;
}

/// Refuses what cannot be done with links instead of doing something else.
Status CheckLink(const Input& input, const dialect::Layout& layout, const dialect::Dialect& format,
                 const ConvertOptions& options) {
  std::string why;
  if (format.same_files == nullptr) {
    why = "files of format " + std::string(format.name) + " are always written";
  } else if (!format.same_files(input.checkpoint.layout, layout)) {
    why = "the source is " + Explain(input.checkpoint.layout) + ", the target " + Explain(layout);
  } else if (!input.mapped.empty()) {
    why = "with --map its tensors get other names";
  } else if (!IsVerbatim(input, format, layout)) {
    why = "the source has no native files of its own";
  } else if (!input.file_owner.empty()) {
    why = "with --node-local nobody sees all of them";
  } else if (TwinFor(input, options) == plan::Twin::kCopy) {
    why = "with --verify=replicas and readback they are read and written";
  } else {
    return {};
  }
  return Fail(Errc::kUsage,
              "--link: files of an equal layout can be linked, but " + why + "; leave --link out");
}

/// Copies, clones or links the source's files.
Result<ConvertReport> RunVerbatim(comm::Comm& comm, const Input& input,
                                  const dialect::Dialect& format,
                                  const nlohmann::ordered_json& head, const ConvertOptions& options,
                                  Sink& sink) {
  const plan::Twin twin = TwinFor(input, options);
  const bool link = twin == plan::Twin::kLink;
  sink.Note("source and target layouts are equal (" + Explain(input.checkpoint.layout) + "): " +
                (link ? "linking its files: a program that writes into one of them changes both "
                        "checkpoints"
                      : "its files are taken as they are"),
            0);
  SW_TRY_ASSIGN(Verbatim verbatim, PlanVerbatim(input, format, twin));
  NeighbourReport neighbours =
      AddNeighbours(input.set, format, std::nullopt, link ? plan::Twin::kCopy : twin, &verbatim.map,
                    &verbatim.target, sink);
  SW_TRY(CheckCarried(options, neighbours.not_carried));
  exec::FileBytes bytes(verbatim.map, PathsOf(input.set));
  SW_TRY_ASSIGN(ConvertReport report,
                RunPlan(comm, input, verbatim.map, verbatim.target, bytes, head.dump(),
                        link ? "links" : "verbatim", options, sink));
  report.verbatim = true;
  report.linked = link;
  report.not_carried = neighbours.not_carried;
  report.neighbours = std::move(neighbours);
  return report;
}

}  // namespace

Status CheckCarried(const ConvertOptions& options, const std::vector<std::string>& not_carried) {
  if (!options.strict || not_carried.empty()) return {};
  std::string message = "--strict: nothing is written, for this would not be carried over:";
  for (const std::string& one : not_carried) message += "\n" + one;
  return Fail(Errc::kMismatch, std::move(message));
}

Result<dialect::Written> WriteLayout(const dialect::Dialect& format,
                                     const dialect::Checkpoint& source,
                                     const dialect::Layout& layout, Sink& sink) {
  SW_TRY(dialect::CheckUnbound(source));
  SW_TRY_ASSIGN(dialect::Written written, format.write(source, layout));
  written.not_carried.insert(written.not_carried.end(), source.left_out.begin(),
                             source.left_out.end());
  if (format.name != dialect::dcp::kName) {
    for (const dialect::Param& param : source.fused) {
      written.not_carried.push_back("the optimizer's state of " + Quoted(param.name) +
                                    ", which the model has in parts: a --map takes it apart");
    }
  }
  for (const std::string& one : written.not_carried) sink.Warn("not carried over: " + one);
  return written;
}

void DescribeLayout(const dialect::Layout& layout, nlohmann::ordered_json* head) {
  (*head)["layout"] = ToJson(layout);
  for (const auto& [key, value] : layout.options) (*head)[key] = value;
}

Result<ConvertReport> Convert(comm::Comm& comm, Input& input, const dialect::TargetSpec& spec,
                              const dialect::Dialect& format, const std::string& command,
                              const ConvertOptions& options, Sink& sink) {
  const dialect::Checkpoint& source = input.checkpoint;
  SW_TRY_ASSIGN(const dialect::Layout layout, format.resolve(spec, source));
  ConvertReport report;
  nlohmann::ordered_json head = ManifestHead(command, std::string(format.name), input);
  DescribeLayout(layout, &head);
  if (options.link) {
    SW_TRY(CheckLink(input, layout, format, options));
    head["linked"] = true;
  }
  if (IsVerbatim(input, format, layout)) {
    SW_TRY_ASSIGN(report, RunVerbatim(comm, input, format, head, options, sink));
  } else {
    SW_TRY_ASSIGN(dialect::Written written, WriteLayout(format, source, layout, sink));
    plan::Target& target = written.target;
    for (const MapUsed& map : input.mapped) {
      for (const std::string& one : map.left_behind) {
        sink.Warn("not carried over: " + one);
        written.not_carried.push_back(one);
      }
    }
    if (options.flat) Flatten(format, &target);
    NeighbourReport neighbours = AddNeighbours(input.set, format, layout.ranks, plan::Twin::kCopy,
                                               &input.checkpoint.map, &target, sink);
    written.not_carried.insert(written.not_carried.end(), neighbours.not_carried.begin(),
                               neighbours.not_carried.end());
    SW_TRY(CheckCarried(options, written.not_carried));
    if (!written.not_carried.empty()) head["not_carried"] = written.not_carried;
    std::string parameters = std::string(format.name) + " " + head["layout"].dump() + " ";
    for (const auto& [key, value] : layout.options) parameters += value;
    SW_TRY_ASSIGN(report, RunPlan(comm, input, source.map, target, *input.bytes, head.dump(),
                                  parameters, options, sink));
    report.neighbours = std::move(neighbours);
    report.not_carried = std::move(written.not_carried);
  }
  if (options.flat && !options.dry_run) {
    SW_TRY(comm.OnRoot([&] { return PointLatest(format, options.output); }));
  }
  report.maps = input.mapped;
  report.source = source.layout;
  report.target = layout;
  return report;
}

}  // namespace shardwright::ucp
