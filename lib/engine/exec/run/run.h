// SPDX-License-Identifier: Apache-2.0
// lib/engine/exec/run: carries out plans.
// Run writes an output, in the steps that run.cc begins with. A stopped run goes on from its
// journal.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/exec/byte_source.h"
#include "engine/plan/plan.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/base/verify.h"
#include "support/comm/comm.h"
#include "support/os/directory.h"
#include "support/os/io_threads.h"
#include "support/os/journal.h"

namespace shardwright::exec {

using Verify = shardwright::Verify;

struct RunOptions {
  std::string output;
  bool force = false;
  bool resume = false;
  bool take_over = false;  ///< as os::StageOptions
  Verify verify = Verify::kSums;
  unsigned threads = 1;  ///< of this rank
  /// Files that this rank creates, completes and syncs at the same time, whatever `threads` is.
  unsigned io_threads = os::kIoThreads;
  /// Bytes of buffers that this rank may use; at least one workspace per thread is needed.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
  os::Fingerprint
      fingerprint{};     ///< of inputs, flags and version: a resumed run must have the same
  std::string manifest;  ///< JSON object: what the manifest says beside the files
  /// --node-local: the rank that can read each source file; empty when every rank sees every file.
  std::vector<int> file_owner;
};

/// What a run did. Sums over all ranks.
struct RunReport {
  std::uint64_t bytes_read = 0;     ///< source payload bytes
  std::uint64_t bytes_written = 0;  ///< output files, the manifest aside
  std::uint64_t files_read = 0;
  std::uint64_t files_written = 0;
  std::uint64_t files_cloned = 0;  ///< neither read nor written, nor in the numbers above
  std::uint64_t files_linked = 0;  ///< likewise
  std::uint64_t units = 0;
  std::uint64_t units_resumed = 0;
  std::uint64_t members_verified = 0;
  std::uint64_t members_without_sum = 0;
};

/// Bytes of buffers that Run uses on each rank, for --dry-run.
std::uint64_t BufferBytes(const RunOptions& options);

/// Compares what an output needs with what is free where it is made.
/// \param output  for the message
/// \param folder  an existing one
/// \param files   files and directories
/// \error kIo; kNotFound
/// Local.
Status CheckSpace(const std::string& output, const std::string& folder, std::uint64_t bytes,
                  std::uint64_t files);

/// Opens the stage that rank 0 has made, on every rank.
/// \error kIo  a rank does not see it, names the output; as os::OpenStage
/// Collective.
Result<os::Directory> OpenShared(comm::Comm& comm, const std::string& stage,
                                 const std::string& output);

/// Carries out a plan: writes every output file beside `output` and gives it its name when all of
/// it is complete, synced and described by a manifest (support/os/commit.h). Units are cut over
/// ranks by bytes, then over threads; the output is the same, byte for byte, for every number of
/// ranks and threads.
/// \error kStopped  asked to stop; what is done stays for a resumed run; kBadInput  a source member
///        has not its checksum; kIo, kBusy  the output; kLimit  memory_bytes is too small
/// Collective. Source: docs/architecture.md, "Plan and run".
Result<RunReport> Run(comm::Comm& comm, const plan::Plan& plan, ByteSource& source,
                      const RunOptions& options, Sink& sink);

}  // namespace shardwright::exec
