// SPDX-License-Identifier: Apache-2.0
// lib/convert: the operations behind the commands.
// OpenInput (input.h) finds and understands a source; Convert makes the target, plans and runs, or
// copies the files as they are where the layouts are equal (verbatim.h). catalogue.h writes
// catalogues, check.h compares two checkpoints, describe.h tells what one holds. compare.h
// proves what a reader had to assume, siblings.h takes along what lies beside a checkpoint.

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

namespace shardwright::convert {

/// How a command writes; the fields are the shared flags.
struct ConvertOptions {
  std::string output;
  bool force = false;
  bool resume = false;
  bool take_over = false;  ///< as os::StageOptions
  bool dry_run = false;
  bool link = false;    ///< equal layouts: hard links to the source's files instead of copies
  bool strict = false;  ///< refuse what cannot be carried over whole
  bool flat = false;    ///< the tag folder itself, as ds_to_universal writes it, not a save folder
  exec::Verify verify = exec::Verify::kSums;
  unsigned threads = 1;
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// What a conversion did, or with dry_run what it would do.
struct ConvertReport {
  bool dry_run = false;
  bool found_done = false;  ///< with resume: the stopped run had committed, nothing was left to do
  bool verbatim = false;    ///< the layouts were equal: the source's files as they are
  bool linked = false;      ///< verbatim, by hard links
  SiblingReport siblings;
  plan::Totals totals;
  exec::RunReport run;
  std::uint64_t buffer_bytes = 0;  ///< of each rank
  std::uint64_t needed_bytes = 0;  ///< with dry_run: of disk, without files that can be clones
  std::uint64_t free_bytes = 0;    ///< with dry_run: on the output's file system
  checkpoints::Layout source;
  checkpoints::Layout target;
  /// What of the source's state, and of what lies beside it, has no place in the target; one
  /// sentence each.
  std::vector<std::string> not_carried;
  std::vector<MapUsed> maps;  ///< that the source went through
};

/// Finds the format that a conversion writes without --format: that of the source, of atoms that of
/// the checkpoint which they were made from. DeepSpeed where it is not known or cannot be written.
/// Collective.
Result<const checkpoints::Format*> DefaultFormat(comm::Comm& comm, const Input& input);

/// Adds the command that exports only the weights to the error of a target that needs the
/// optimizer.
/// \param output  the output path of that target; empty: not known
/// Pure.
tl::unexpected<Error> WithExport(Error error, const Input& input, const std::string& output);

/// With `strict`: nothing is left behind.
/// \error kMismatch  names each thing that is
Status CheckCarried(const ConvertOptions& options, const std::vector<std::string>& not_carried);

/// Writes the source in another layout, and what lies beside it if the input was searched for that.
/// Equal layouts: its files as they are, as clones where the file system can and nothing is to be
/// verified, else as copies that are checked like those of a conversion.
/// \param format  the format to write; it has a writer
/// \param spec  its keys; unset ones keep the source's value
/// \error kMismatch  options.strict, and something is not carried over;
///        kUsage  options.link, and the layouts differ or the source has no files to link to;
///        kUnsupported  options.link, and the file system cannot; else as the format's `resolve`
///        and `write`, plan::Plan::Make and exec::Run
/// Collective.
Result<ConvertReport> Convert(comm::Comm& comm, Input& input, const checkpoints::TargetSpec& spec,
                              const checkpoints::Format& format, const std::string& command,
                              const ConvertOptions& options, Sink& sink);

/// Writes a checkpoint as a format's layout says, and warns of what has no place in it.
/// Pure but for the warnings.
Result<checkpoints::Written> WriteLayout(const checkpoints::Format& format,
                                         const checkpoints::Checkpoint& source,
                                         const checkpoints::Layout& layout, Sink& sink);

/// Adds to a manifest the layout and the options of the format that it was written with.
void DescribeLayout(const checkpoints::Layout& layout, nlohmann::ordered_json* head);

/// Plans and runs a copy program, or with dry_run only plans it. `source` is the map that `bytes`
/// reads.
/// Collective.
Result<ConvertReport> RunPlan(comm::Comm& comm, const Input& input, const layout::ShardMap& source,
                              const plan::Target& target, exec::ByteSource& bytes,
                              const std::string& manifest_head, const std::string& parameters,
                              const ConvertOptions& options, Sink& sink);

/// Free bytes of the file system that an output will be on, as rank 0 sees it; the largest number
/// where the file system does not say.
/// \error kNotFound  its parent folder
/// Collective.
Result<std::uint64_t> FreeBytesFor(comm::Comm& comm, const std::string& output);

/// Whether --resume has nothing to do because the stopped run had committed: OUTPUT is there and
/// its manifest says what this run would write.
/// \param error  what the run failed with; only "the output exists" can mean this
/// Collective.
Result<bool> FoundDone(comm::Comm& comm, const ConvertOptions& options,
                       const std::string& manifest_head, const Error& error, Sink& sink);

/// What every manifest begins with.
nlohmann::ordered_json ManifestHead(const std::string& command, const std::string& kind,
                                    const Input& input);

nlohmann::ordered_json ToJson(const checkpoints::Layout& layout);

/// "zero=2 dp=3 tp=1 pp=1 ep=1 dtype=bfloat16"
std::string Explain(const checkpoints::Layout& layout);

}  // namespace shardwright::convert
