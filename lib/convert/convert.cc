// SPDX-License-Identifier: Apache-2.0
#include "convert/convert.h"

#include <algorithm>
#include <map>
#include <optional>

#include <nlohmann/json.hpp>

#include "checkpoints/dcp/dcp.h"
#include "checkpoints/pickled/hyper.h"
#include "checkpoints/running_names.h"
#include "convert/clone_output.h"
#include "convert/ds_to_universal.h"
#include "engine/exec/integrity.h"
#include "engine/exec/manifest.h"
#include "engine/exec/replicas.h"
#include "engine/exec/run/run_compressed.h"
#include "engine/layout/states.h"
#include "support/base/limits.h"
#include "support/base/stop.h"
#include "support/base/text.h"
#include "support/base/version.h"
#include "support/json/json.h"
#include "support/os/dir.h"

namespace shardwright::convert {

nlohmann::ordered_json ToJson(const checkpoints::Layout& layout) {
  return nlohmann::ordered_json::parse(layout.Json());
}

std::string Explain(const checkpoints::Layout& layout) {
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
  return {{"schema", 2},
          {"program", "shardwright"},
          {"version", kVersion},
          {"command", command},
          {"kind", kind},
          {"source", std::move(source)},
          {"siblings", input.siblings ? "copy" : "none"}};
}

namespace {

/// Warns if there are too few inodes. Only a warning, because a dry run writes nothing.
void WarnOfInodes(const std::string& output, const plan::Totals& totals, Sink& sink) {
  const Result<os::ParentName> place = os::SplitOutput(output);
  if (!place) return;
  const Status space =
      exec::CheckSpace(output, place->parent, 0, totals.output_files - totals.linked_files);
  if (!space) sink.Warn(space.error().message);
}

}  // namespace

Result<bool> FoundDone(comm::Comm& comm, const ConvertOptions& options,
                       const std::string& manifest_head, const Error& error, Sink& sink) {
  if (options.resume != Resume::kIfSameOrDone || options.force || error.code != Errc::kBusy) {
    return false;
  }
  const auto same = [&]() -> Result<std::string> {
    const Result<std::string> text =
        os::ReadWholeText(options.output + "/" + exec::kManifestName, limits::kJsonBytes);
    if (!text) return std::string();
    const Result<json::Json> found = json::Parse(*text, exec::kManifestName);
    const nlohmann::json head = nlohmann::json::parse(manifest_head);
    if (!found || !found->is_object()) return std::string();
    for (const auto& [key, value] : head.items()) {
      const json::Json* const theirs = json::Find(*found, key.c_str());
      if (theirs == nullptr || *theirs != value) return std::string();
    }
    return std::string("same");
  };
  SW_TRY_ASSIGN(const std::string answer, comm.OnRootText(same));
  if (answer.empty()) return false;
  sink.Note(StrCat(options.output, ": complete already, nothing to resume"), 0);
  return true;
}

Result<ConvertReport> RunPlan(comm::Comm& comm, const Input& input, const layout::ShardMap& source,
                              const plan::Target& target, exec::ByteSource& bytes,
                              const std::string& manifest_head, exec::Identity identity,
                              const ConvertOptions& options, Sink& sink) {
  sink.Pass("plan");
  const auto make = [&]() -> Result<plan::Plan> {
    const Interruptible planning(sink);
    SW_TRY_ASSIGN(plan::Plan made, plan::Plan::Make(source, target));
    SW_TRY(CheckStop(StopOf(sink)));
    return made;
  };
  SW_TRY_ASSIGN(const plan::Plan plan, comm.Agree(make()));
  exec::RunOptions run;
  run.output = options.output;
  run.force = options.force;
  run.resume = options.resume;
  run.take_over = options.take_over;
  run.verify = options.verify;
  run.threads = options.threads;
  run.io_threads = input.io_threads;
  run.memory_bytes = options.memory_bytes;
  run.identity = std::move(identity);
  run.manifest = manifest_head;
  run.file_owner = input.file_owner;
  ConvertReport report;
  report.dry_run = options.dry_run;
  report.totals = plan.totals();
  if (target.compressed) {
    // The upper bound of zstd: incompressible data grows by less than one part in 256.
    report.totals.output_bytes += report.totals.output_bytes / 256;
  } else {
    const auto first = plan.FirstUnits(static_cast<std::uint64_t>(comm.size()));
    for (std::size_t r = 0; r + 1 < first.size(); ++r) {
      report.rank_bytes.push_back(plan.byte_of_unit(first[r + 1]) - plan.byte_of_unit(first[r]));
    }
  }
  if (options.verify == exec::Verify::kNone) report.totals.verify_bytes = 0;
  report.buffer_bytes = exec::BufferBytes(run);
  if (options.dry_run) {
    for (const plan::OutputFile& file : target.files) {
      if (file.clone == plan::CloneMode::kCopy) report.needed_bytes += file.bytes;
    }
    if (target.compressed) report.needed_bytes = report.totals.output_bytes;
    SW_TRY_ASSIGN(report.free, FreeSpaceFor(comm, options.output));
    if (comm.rank() == 0) WarnOfInodes(options.output, report.totals, sink);
    return report;
  }
  const exec::CountReads reads(bytes, sink);
  if (options.verify != exec::Verify::kNone) {
    SW_TRY(VerifyDigests(comm, input, options.threads, sink));
  }
  if (options.verify == exec::Verify::kReplicas) {
    sink.Pass("replicas");
    exec::Exchange replicas(comm, input.checkpoint.map, *input.bytes, input.file_owner);
    SW_TRY(exec::CompareReplicas(comm, replicas, options.threads, options.memory_bytes, sink));
  }
  Result<exec::RunReport> ran = target.compressed
                                    ? exec::RunCompressed(comm, plan, bytes, run, sink)
                                    : exec::Run(comm, plan, bytes, run, sink);
  if (!ran) {
    SW_TRY_ASSIGN(report.found_done, FoundDone(comm, options, manifest_head, ran.error(), sink));
    if (!report.found_done) return tl::unexpected<Error>(std::move(ran).error());
    return report;
  }
  report.run = *std::move(ran);
  if (comm.rank() == 0) sink.AddWritten(report.run.bytes_written, report.run.files_written);
  return report;
}

namespace {

/// Returns how to create the output's files from the source's, for equal layouts.
plan::CloneMode CloneFor(const Input& input, const ConvertOptions& options) {
  // A clone is not read, so it cannot be verified. Only the root rank creates clones.
  const bool reads =
      options.verify == exec::Verify::kReplicas || options.verify == exec::Verify::kReadback;
  if (reads || !input.file_owner.empty()) return plan::CloneMode::kCopy;
  return options.link ? plan::CloneMode::kLink : plan::CloneMode::kClone;
}

/// Fails if links are requested but not possible. Never falls back to copies.
Status CheckLink(const Input& input, const checkpoints::Layout& layout,
                 const checkpoints::Format& format, const ConvertOptions& options) {
  std::string why;
  if (format.same_files == nullptr) {
    why = StrCat("files of format ", format.name, " are always written");
  } else if (!format.same_files(input.checkpoint.layout, layout)) {
    why = StrCat("the source is ", Explain(input.checkpoint.layout), ", the target ",
                 Explain(layout));
  } else if (!input.mapped.empty()) {
    why = "with --map its tensors get other names";
  } else if (!IsVerbatim(input, format, layout)) {
    why = "the source has no native files of its own";
  } else if (!input.file_owner.empty()) {
    why = "with --node-local no rank sees all of them";
  } else if (CloneFor(input, options) == plan::CloneMode::kCopy) {
    why = "with --verify=replicas and readback they are read and written";
  } else {
    return {};
  }
  return Fail(Errc::kUsage, "--link: files of an equal layout can be linked, but ", why,
              "; leave --link out");
}

/// Copies, clones or links the source's files, for equal layouts.
Result<ConvertReport> RunVerbatim(comm::Comm& comm, const Input& input,
                                  const checkpoints::Format& format,
                                  const checkpoints::Layout& layout,
                                  const nlohmann::ordered_json& head, const ConvertOptions& options,
                                  Sink& sink) {
  const plan::CloneMode clone = CloneFor(input, options);
  const bool link = clone == plan::CloneMode::kLink;
  sink.Note(
      StrCat("source and target layouts are equal (", Explain(input.checkpoint.layout), "); ",
             link ? "the output has hard links to the source's files, so a program that writes "
                    "into one of them changes both checkpoints"
                  : "the source's files are used unchanged"),
      0);
  SW_TRY_ASSIGN(Verbatim verbatim, PlanVerbatim(input, format, clone));
  SiblingReport siblings =
      AddSiblings(input.set, format, std::nullopt, link ? plan::CloneMode::kCopy : clone,
                  &verbatim.map, &verbatim.target, sink);
  SW_TRY(CheckCarried(options, siblings.not_carried));
  exec::FileBytes bytes(verbatim.map, PathsOf(input.set));
  exec::Identity identity = RunIdentity(input);
  AddLayout(format, layout, &identity);
  if (link) identity.Add("--link", "yes");
  SW_TRY_ASSIGN(ConvertReport report, RunPlan(comm, input, verbatim.map, verbatim.target, bytes,
                                              head.dump(), std::move(identity), options, sink));
  report.verbatim = true;
  report.linked = link;
  report.not_carried = siblings.not_carried;
  report.siblings = std::move(siblings);
  return report;
}

}  // namespace

Result<const checkpoints::Format*> DefaultFormat(comm::Comm& comm, const Input& input) {
  const checkpoints::Format* const first = &checkpoints::Formats().front();
  std::string origin = input.checkpoint.origin;
  if (origin == "universal") {  // use the original format, if the manifest records it
    const auto look = [&]() -> Result<std::string> {
      for (const std::string& folder : input.set.save_folders) {
        const Result<std::string> text =
            os::ReadWholeText(folder + "/" + exec::kManifestName, limits::kJsonBytes);
        if (!text) continue;
        const Result<json::Json> manifest = json::Parse(*text, exec::kManifestName);
        if (!manifest || !manifest->is_object()) continue;
        const json::Json* const source = json::Find(*manifest, "source");
        const json::Json* const kind =
            source != nullptr && source->is_object() ? json::Find(*source, "kind") : nullptr;
        if (kind != nullptr && kind->is_string()) return kind->get<std::string>();
      }
      return std::string(first->name);
    };
    SW_TRY_ASSIGN(origin, comm.OnRootText(look));
  }
  const checkpoints::Format* const own = checkpoints::FindFormat(origin);
  return own == nullptr || own->write == nullptr || own->name == "universal" ? first : own;
}

tl::unexpected<Error> WithExport(Error error, const Input& input, const std::string& output) {
  std::string command = "ucp-load " + ShellWord(input.source_paths.front());
  command += " " + (output.empty() ? std::string("OUTPUT") : ShellWord(output));
  for (std::size_t i = 1; i < input.source_paths.size(); ++i) {
    command += " --also " + ShellWord(input.source_paths[i]);
  }
  if (!input.file_owner.empty()) command += " --node-local";
  error.message += "; the weights can be exported: " + command + " --format safetensors";
  return tl::unexpected<Error>(std::move(error));
}

Status CheckCarried(const ConvertOptions& options, const std::vector<std::string>& not_carried) {
  if (!options.strict || not_carried.empty()) return {};
  std::string message = "--strict: nothing is written, because this would not be carried over:";
  for (const std::string& one : not_carried) message += "\n" + one;
  return Fail(Errc::kMismatch, message);
}

namespace {

/// Fails if a hyper-parameter that is a tensor was not read, so that it cannot be converted.
Status CheckOptions(const checkpoints::Checkpoint& source) {
  for (std::size_t g = 0; g < source.groups.size(); ++g) {
    const checkpoints::Group& group = source.groups[g];
    const std::string unread = checkpoints::UnreadTensor(group.options, group.tensors);
    if (unread.empty()) continue;
    return Fail(Errc::kUnsupported, source.tag, ": option ", Quoted(unread), " of parameter group ",
                g, " is a tensor, which cannot be converted from format ", source.origin,
                "; save it as a number, or keep that format");
  }
  return {};
}

}  // namespace

namespace {

/// Merges lines that differ only in numbers: returns the first of them and the number of others.
std::vector<std::string> OneOfEachKind(const std::vector<std::string>& lines) {
  std::vector<std::string> kinds;
  std::map<std::string, std::pair<std::size_t, std::uint64_t>> by_kind;  // index, count
  for (const std::string& line : lines) {
    std::string kind;
    for (const char c : line) {
      if (c < '0' || c > '9') {
        kind += c;
      } else if (kind.empty() || kind.back() != '#') {
        kind += '#';
      }
    }
    const auto [entry, fresh] = by_kind.try_emplace(std::move(kind), kinds.size(), 0);
    ++entry->second.second;
    if (fresh) kinds.push_back(line);
  }
  for (const auto& [kind, found] : by_kind) {
    const auto& [place, count] = found;
    if (count > 1) kinds[place] += StrCat(", and ", count - 1, " more like it");
  }
  return kinds;
}

/// Warns about state that the target does not hold: with one line for all short entries, and with
/// one for each kind of longer ones. The report has the complete list. For a format of weights
/// alone the short entries, such as optimizer states, are printed as a note.
void WarnNotCarried(const checkpoints::Format& format, const std::vector<std::string>& not_carried,
                    Sink& sink) {
  constexpr std::size_t kShort = 60, kShown = 8;
  std::string line;
  std::size_t count = 0;
  for (const std::string& one : OneOfEachKind(not_carried)) {
    if (one.size() > kShort) {
      sink.Warn(StrCat("not carried over: ", one));
    } else if (++count <= kShown) {
      line += StrCat(count == 1 ? "" : "; ", one);
    }
  }
  if (count == 0) return;
  if (count > kShown)
    line += StrCat("; and ", count - kShown, " more, listed in the report (--json)");
  if (format.only_weights) {
    sink.Note(StrCat("not part of --format ", format.name, ": ", line), 0);
  } else {
    sink.Warn(StrCat("not carried over: ", line));
  }
}

}  // namespace

void WarnIfNoConfig(const checkpoints::Format& format, const plan::Target& target, Sink& sink) {
  if (!format.only_weights) return;
  const bool there = std::ranges::any_of(target.files, [](const plan::OutputFile& file) {
    return file.path == "config.json" || file.path == "adapter_config.json";
  });
  if (there) return;
  sink.Warn(
      "no config.json was found next to the checkpoint: from_pretrained of transformers needs "
      "the model's config.json next to the weights; copy it into the output");
}

Result<checkpoints::Written> WriteLayout(const checkpoints::Format& format,
                                         const checkpoints::Checkpoint& source,
                                         const checkpoints::Layout& layout, Sink& sink) {
  if (!format.only_weights) SW_TRY(checkpoints::CheckUnbound(source));
  if (format.name != source.origin) SW_TRY(CheckOptions(source));
  const Interruptible planning(sink);
  SW_TRY_ASSIGN(checkpoints::Written written, format.write(source, layout));
  const std::vector<std::string> optimizer = checkpoints::OptimizerLeftOut(source);
  written.not_carried.insert(written.not_carried.end(), optimizer.begin(), optimizer.end());
  written.not_carried.insert(written.not_carried.end(), source.left_out.begin(),
                             source.left_out.end());
  // Formats of weights alone have named these states with all others.
  if (format.name != checkpoints::dcp::kName && !format.only_weights) {
    for (const checkpoints::Param& param : source.fused) {
      written.not_carried.push_back(StrCat("the optimizer state of ", Quoted(param.name),
                                           ", which the model stores in parts; add a --map that "
                                           "splits it"));
    }
  }
  for (const std::string& one : written.notes) sink.Note(one, 0);
  for (const std::string& one : written.warnings) sink.Warn(one);
  WarnNotCarried(format, written.not_carried, sink);
  return written;
}

void AddLayout(const checkpoints::Format& format, const checkpoints::Layout& layout,
               exec::Identity* identity) {
  identity->Add("--format", std::string(format.name));
  identity->Add("--target", Explain(layout));
  // Large parts of a layout, such as pipeline stages, are not shown.
  identity->AddDigest("the target layout", layout.Json());
  for (const auto& [key, value] : layout.options) identity->Add(key, value);
}

void DescribeLayout(const checkpoints::Layout& layout, nlohmann::ordered_json* head) {
  (*head)["layout"] = ToJson(layout);
  for (const auto& [key, value] : layout.options) (*head)[key] = value;
}

namespace {

/// Returns a sentence about parameters with compute weights that differ from their
/// masters, if the target has only weights derived from masters. Otherwise empty.
std::vector<std::string> WeightsLeftBehind(const Input& input, const plan::Target& target) {
  if (input.one_save.weights_apart.empty()) return {};
  const layout::TensorIndex of_source(input.checkpoint.map);
  const layout::TensorIndex of_target(target.map);
  const bool any = std::any_of(target.map.tensors.begin(), target.map.tensors.end(),
                               [](const auto& one) { return one.state == layout::kWeight; });
  std::vector<std::string> lost;
  for (const std::string& name : input.one_save.weights_apart) {
    const auto from = of_source.Find(name, layout::kWeight);
    const auto to = of_target.Find(name, layout::kWeight);
    // A map has renamed the tensor. Assume that any weights in the target are its own.
    const bool kept =
        from ? to && input.checkpoint.map.tensors[*from].dtype == target.map.tensors[*to].dtype
             : any;
    if (!kept) lost.push_back(Quoted(name));
  }
  if (lost.empty()) return {};
  const std::size_t count = lost.size();
  return {
      StrCat("the compute weights of ", count,
             " parameters, which differ from their master weights (the target's weights are made "
             "from the master weights): ",
             FirstFew(lost))};
}

/// \error kMismatch  options.strict, and the source may be of two saves
Status CheckDoubt(const ConvertOptions& options, const Input& input) {
  if (!options.strict || input.one_save.doubt.empty()) return {};
  return Fail(Errc::kMismatch, "--strict: nothing is written: ", input.one_save.doubt,
              "; pass --allow-mixed to write it anyway");
}

}  // namespace

Result<ConvertReport> Convert(comm::Comm& comm, Input& input, const checkpoints::TargetSpec& spec,
                              const checkpoints::Format& format, const std::string& command,
                              const ConvertOptions& options, Sink& sink) {
  checkpoints::NameForTarget(format, spec, &input.checkpoint);
  const checkpoints::Checkpoint& source = input.checkpoint;
  // State that was not read cannot be written, not even by copying files: some are missing.
  if (source.only_weights && !format.only_weights) {
    return WithExport(source.only_weights->why, input, options.output);
  }
  SW_TRY_ASSIGN(const checkpoints::Layout layout, format.resolve(spec, source));
  SW_TRY(CheckDoubt(options, input));
  ConvertReport report;
  nlohmann::ordered_json head = ManifestHead(command, std::string(format.name), input);
  DescribeLayout(layout, &head);
  if (options.link) {
    SW_TRY(CheckLink(input, layout, format, options));
    head["linked"] = true;
  }
  if (IsVerbatim(input, format, layout)) {
    SW_TRY_ASSIGN(report, RunVerbatim(comm, input, format, layout, head, options, sink));
  } else {
    Result<checkpoints::Written> made = WriteLayout(format, source, layout, sink);
    if (!made) {
      const bool exports = !source.bound.empty() && !format.only_weights;
      if (exports) return WithExport(std::move(made).error(), input, options.output);
      return tl::unexpected<Error>(std::move(made).error());
    }
    checkpoints::Written written = *std::move(made);
    plan::Target& target = written.target;
    for (const MapUsed& map : input.mapped) {
      for (const std::string& one : map.left_behind) {
        sink.Warn("not carried over: " + one);
        written.not_carried.push_back(one);
      }
    }
    if (options.flat) Flatten(format, &target);
    SiblingReport siblings = AddSiblings(input.set, format, layout.ranks, plan::CloneMode::kCopy,
                                         &input.checkpoint.map, &target, sink);
    written.not_carried.insert(written.not_carried.end(), siblings.not_carried.begin(),
                               siblings.not_carried.end());
    if (input.siblings) WarnIfNoConfig(format, target, sink);
    for (std::string& one : WeightsLeftBehind(input, target)) {
      sink.Warn("not carried over: " + one);
      written.not_carried.push_back(std::move(one));
    }
    SW_TRY(CheckCarried(options, written.not_carried));
    if (!written.not_carried.empty()) head["not_carried"] = written.not_carried;
    exec::Identity identity = RunIdentity(input);
    AddLayout(format, layout, &identity);
    if (options.flat) identity.Add("the folders of the output", "tag folder alone");
    SW_TRY_ASSIGN(report, RunPlan(comm, input, source.map, target, *input.bytes, head.dump(),
                                  std::move(identity), options, sink));
    report.siblings = std::move(siblings);
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

}  // namespace shardwright::convert
