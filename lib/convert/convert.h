// SPDX-License-Identifier: Apache-2.0
// lib/convert: the operations behind the commands.
// OpenInput (input.h) finds and reads a source. Convert plans and writes the target, or copies
// the files unchanged if the layouts are equal (clone_output.h). catalogue.h writes catalogues,
// check.h compares two checkpoints, and describe.h describes one. compare.h verifies what a
// reader had to infer. sibling_files.h copies the sibling files of a checkpoint.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "checkpoints/registry.h"
#include "convert/input.h"
#include "convert/sibling_files.h"
#include "engine/exec/run/run.h"
#include "engine/plan/plan.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "support/os/dir.h"

namespace shardwright::convert {

/// Options of a conversion, as the shared flags set them.
struct ConvertOptions {
  std::string output;
  bool force = false;
  Resume resume = Resume::kIfSame;
  bool take_over = false;  ///< as in os::StageOptions
  bool dry_run = false;
  bool link = false;    ///< equal layouts: hard links to the source's files instead of copies
  bool strict = false;  ///< fail if anything cannot be converted completely
  bool flat = false;    ///< write the tag folder alone, as ds_to_universal does, not a save folder
  exec::Verify verify = exec::Verify::kChecksums;
  unsigned threads = 1;
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// Result of a conversion, or its forecast with dry_run.
struct ConvertReport {
  bool dry_run = false;
  bool found_done =
      false;              ///< with kIfSameOrDone: the stopped run had committed its output already
  bool verbatim = false;  ///< the layouts were equal: the source's files are unchanged
  bool linked = false;    ///< verbatim, as hard links
  SiblingReport siblings;
  plan::Totals totals;
  /// Parts of totals.payload_bytes by rank. Empty for a compressed catalogue.
  std::vector<std::uint64_t> rank_bytes;
  exec::RunReport run;
  std::uint64_t buffer_bytes = 0;  ///< per rank
  std::uint64_t needed_bytes = 0;  ///< with dry_run: disk space, without files that can be clones
  os::FreeSpace free;              ///< with dry_run: as FreeSpaceFor
  checkpoints::Layout source;
  checkpoints::Layout target;
  /// Parts of the source and of its sibling files that
  /// the target cannot represent, one sentence each.
  std::vector<std::string> not_carried;
  std::vector<MapUsed> maps;  ///< maps that were applied to the source
};

/// Returns the format that a conversion writes without --format: the format of the source, or for
/// atoms the format of their original checkpoint. DeepSpeed if that is unknown or has no writer.
/// Collective.
Result<const checkpoints::Format*> DefaultFormat(comm::Comm& comm, const Input& input);

/// Adds the command that exports only weights to an error about a
/// missing optimizer, if the failed target needs optimizer state.
/// \param output  the output path of that target; empty: not known
/// Pure.
tl::unexpected<Error> WithExport(Error error, const Input& input, const std::string& output);

/// Fails with `strict` if the target cannot represent everything.
/// \error kMismatch  names each part that is left out
Status CheckCarried(const ConvertOptions& options, const std::vector<std::string>& not_carried);

/// Writes the source in another layout, and its sibling files if OpenInput searched for them.
/// If the layouts are equal, the files are cloned where the file system supports it and nothing
/// has to be verified. Otherwise they are copied and verified like the files of a conversion.
/// \param format  the format to write; it has a writer
/// \param spec  its keys; unset ones keep the source's value
/// \error kMismatch  options.strict, and the target cannot represent everything;
///        kUsage  options.link, and the layouts differ or the source has no files to link to;
///        kUnsupported  options.link, and the file system cannot link; as `resolve` and `write`
///        of the format, plan::Plan::Make and exec::Run
/// Collective.
Result<ConvertReport> Convert(comm::Comm& comm, Input& input, const checkpoints::TargetSpec& spec,
                              const checkpoints::Format& format, const std::string& command,
                              const ConvertOptions& options, Sink& sink);

/// Warns if a folder of weights lacks the model's config.json, which programs need to open it.
void WarnIfNoConfig(const checkpoints::Format& format, const plan::Target& target, Sink& sink);

/// Plans the files of a checkpoint in a layout, and warns of data that it cannot represent.
/// Pure but for the warnings.
Result<checkpoints::Written> WriteLayout(const checkpoints::Format& format,
                                         const checkpoints::Checkpoint& source,
                                         const checkpoints::Layout& layout, Sink& sink);

/// Adds the written layout and the options of its format to the head of a manifest.
void DescribeLayout(const checkpoints::Layout& layout, nlohmann::ordered_json* head);

/// Plans a copy program and runs it, or with dry_run only
/// plans it. `source` is the map that `bytes` reads. A stopped run with the same `identity` is
/// continued.
/// Collective.
Result<ConvertReport> RunPlan(comm::Comm& comm, const Input& input, const layout::ShardMap& source,
                              const plan::Target& target, exec::ByteSource& bytes,
                              const std::string& manifest_head, exec::Identity identity,
                              const ConvertOptions& options, Sink& sink);

/// Returns the free bytes for an output, as rank 0 measures them, and the quota that limits them.
/// \error kNotFound  the parent folder does not exist
/// Collective.
Result<os::FreeSpace> FreeSpaceFor(comm::Comm& comm, const std::string& output);

/// Returns true if --resume has nothing to do because the stopped run had committed.
/// Then OUTPUT exists, and its manifest describes the output of this run.
/// \param error  the run's error; only "the output exists" can mean this
/// Collective.
Result<bool> FoundDone(comm::Comm& comm, const ConvertOptions& options,
                       const std::string& manifest_head, const Error& error, Sink& sink);

/// Returns the common first entries of every manifest.
nlohmann::ordered_json ManifestHead(const std::string& command, const std::string& kind,
                                    const Input& input);

/// Adds the written format and layout to the identity of a run.
void AddLayout(const checkpoints::Format& format, const checkpoints::Layout& layout,
               exec::Identity* identity);

nlohmann::ordered_json ToJson(const checkpoints::Layout& layout);

/// Formats a layout for people: "zero=2 dp=3 tp=1 pp=1 ep=1 dtype=bfloat16".
std::string Explain(const checkpoints::Layout& layout);

}  // namespace shardwright::convert
