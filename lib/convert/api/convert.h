// SPDX-License-Identifier: Apache-2.0
// lib/convert/api: the library for other programs.
// Convert, Describe (source.h) and Compare (compare.h) are what the command ucp-load does, by one
// process or by several (ranks.h). Its headers, with result, sink, work and version of base, are
// what is installed; whatever they do not mention is internal. Each function here only puts
// together calls of lib/convert. Source: docs/library.md.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convert/api/api.h"
#include "convert/api/ranks.h"
#include "convert/api/source.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/base/verify.h"

namespace shardwright {

/// What is written, and how.
struct ConvertOptions {
  std::string output;                ///< the folder to make; its parent is there
  std::string format = "deepspeed";  ///< as --format
  /// As --target, "zero=3,dp=48": what is not named stays as it is in the source. What is a flag of
  /// its own (--flavour, --trainer) is a key here.
  std::string target;
  bool force = false;      ///< replace an output that is there, once the new one is complete
  bool resume = false;     ///< go on from what a stopped run has left
  bool take_over = false;  ///< remove the lock of another machine whose heartbeat has expired
  bool dry_run = false;    ///< plan only: no payload is read, nothing is written
  bool link = false;       ///< equal layouts only: hard links to the files of the source
  bool strict = false;     ///< refuse what cannot be carried over whole
  bool siblings = true;    ///< take along the files beside the tag folder
  Verify verify = Verify::kSums;
  unsigned threads = 1;  ///< of each rank
  /// Of buffers that a rank may use.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// What was done, or with dry_run would be. Numbers are sums over all ranks.
struct ConvertReport {
  std::string source_layout;  ///< "zero=2 dp=3 tp=1 pp=1 ep=1 dtype=bfloat16"
  std::string target_layout;
  std::uint64_t output_files = 0;  ///< without the manifest
  std::uint64_t output_bytes = 0;
  std::uint64_t bytes_read = 0;     ///< of payloads; 0 with dry_run
  std::uint64_t bytes_written = 0;  ///< 0 with dry_run
  bool same_files = false;          ///< the layouts were equal: the files of the source as they are
  bool found_done = false;          ///< resume: the stopped run had finished
  /// What has no place in the target, one sentence each.
  std::vector<std::string> not_carried;
  /// All of it as a JSON object: the `result` of `ucp-load --json` (docs/report.md).
  std::string json;
};

/// Writes a source in another layout or format. The output is whole or not there, and the same,
/// byte for byte, for every number of ranks and threads.
/// \param sink  hears of warnings and progress, and may ask to stop
/// \error kUsage  options that are wrong or contradict each other; kBusy  the output exists; kIo  a
///        write; kLimit  memory; kMismatch  `strict`, and something is left behind; kInfeasible  no
///        such layout of this source; kStopped  the sink asked: `resume` continues; of the source
///        as Describe. Of several ranks, one that runs out of memory leaves the others waiting:
///        after kLimit "out of memory" end the job.
/// Collective.
SW_API Result<ConvertReport> Convert(Ranks& ranks, const Source& source,
                                     const ConvertOptions& options, Sink& sink);

}  // namespace shardwright
