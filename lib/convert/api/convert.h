// SPDX-License-Identifier: Apache-2.0
// lib/convert/api: the library for other programs.
// Has Convert, Describe (source.h) and Compare (compare.h), which do the same as the
// command ucp-load on one or more processes (ranks.h). The installed headers are those
// of this folder and result, sink, work and version of base. Everything else is
// internal. Each function only combines calls of lib/convert. Source: docs/library.md.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convert/api/api.h"
#include "convert/api/ranks.h"
#include "convert/api/source.h"
#include "support/base/result.h"
#include "support/base/run_options.h"
#include "support/base/sink.h"

namespace shardwright {

/// Options of a conversion: the output, its format and layout, and how to write it.
struct ConvertOptions {
  std::string output;                ///< the folder to create; its parent must exist
  std::string format = "deepspeed";  ///< as --format
  /// As --target, for example "zero=3,dp=48". Keys you omit keep the source's value. Options
  /// that have a flag of their own on the command line (--flavour, --trainer) are keys here.
  std::string target;
  bool force = false;  ///< replace an existing output once the new one is complete
  /// Handling of the work that a stopped run has left next to `output`.
  Resume resume = Resume::kIfSame;
  bool take_over = false;  ///< remove another machine's lock with an expired heartbeat
  bool dry_run = false;    ///< plan only, without reading payloads or writing files
  bool link = false;       ///< equal layouts only: make hard links to the files of the source
  bool strict = false;     ///< fail if anything cannot be converted completely
  bool siblings = true;    ///< also copy the sibling files of the tag folder
  Verify verify = Verify::kChecksums;
  unsigned threads = 1;  ///< per rank
  /// Limit for the buffers of a rank, in bytes.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// Result of a conversion, or its forecast with dry_run. Numbers are totals over all ranks.
struct ConvertReport {
  std::string source_layout;  ///< "zero=2 dp=3 tp=1 pp=1 ep=1 dtype=bfloat16"
  std::string target_layout;
  std::uint64_t output_files = 0;  ///< without the manifest
  std::uint64_t output_bytes = 0;
  std::uint64_t bytes_read = 0;     ///< of payloads; 0 with dry_run
  std::uint64_t bytes_written = 0;  ///< 0 with dry_run
  bool same_files = false;          ///< the layouts were equal: the source's files are unchanged
  bool found_done = false;          ///< kIfSameOrDone: the stopped run had finished
  /// Parts of the source that the target cannot represent, one sentence each.
  std::vector<std::string> not_carried;
  /// The whole report as a JSON object: the `result` of `ucp-load --json` (docs/report.md).
  std::string json;
};

/// Writes a source in another layout or format. The output is atomic, and its bytes are the
/// same for every number of ranks and threads.
/// \param sink  receives warnings and progress, and can request a stop
/// \error kUsage  invalid or contradictory options; kBusy  the output exists, or a stopped run
///        had other inputs or options; kIo  writing failed; kLimit  out of memory; kMismatch
///        `strict`, and the target cannot represent everything; kInfeasible  the source cannot have
///        this layout; kStopped  the sink requested it, the same call continues; as Describe for
///        the source. If one of several ranks runs out of memory, the others wait: end the job
///        after kLimit "out of memory".
/// Collective.
SW_API Result<ConvertReport> Convert(Ranks& ranks, const Source& source,
                                     const ConvertOptions& options, Sink& sink);

}  // namespace shardwright
