// SPDX-License-Identifier: Apache-2.0
// lib/engine/exec/run: executes plans and writes outputs.
// Run writes an output in the steps listed at the top
// of run.cc. A stopped run resumes from its journal.

#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/exec/byte_source.h"
#include "engine/exec/run/identity.h"
#include "engine/plan/plan.h"
#include "support/base/result.h"
#include "support/base/run_options.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "support/os/commit.h"
#include "support/os/dir.h"
#include "support/os/directory.h"
#include "support/os/io_threads.h"
#include "support/os/journal.h"

namespace shardwright::exec {

using Verify = shardwright::Verify;

struct RunOptions {
  std::string output;
  bool force = false;
  Resume resume = Resume::kIfSame;
  bool take_over = false;  ///< see os::StageOptions
  Verify verify = Verify::kChecksums;
  unsigned threads = 1;  ///< of this rank
  /// Number of files that this rank creates or syncs in parallel, independent of `threads`.
  unsigned io_threads = os::kIoThreads;
  /// Bytes of buffers that this rank may use; at least one workspace per thread is needed.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
  Identity identity;     ///< must be equal to that of a stopped run to continue it
  std::string manifest;  ///< JSON object: the manifest without its list of files
  /// --node-local: rank that reads each source file; empty if every rank sees every file.
  std::vector<int> file_owner;
};

/// Results of a run, added up over all ranks.
struct RunReport {
  std::uint64_t bytes_read = 0;     ///< source payload bytes
  std::uint64_t bytes_written = 0;  ///< bytes of output files without the manifest
  std::uint64_t files_read = 0;
  std::uint64_t files_written = 0;
  std::uint64_t files_cloned = 0;  ///< not read or written, and not in the numbers above
  std::uint64_t files_linked = 0;  ///< also not in the numbers above
  std::uint64_t units = 0;
  std::uint64_t units_resumed = 0;
  std::uint64_t members_verified = 0;
  std::uint64_t members_without_checksum = 0;
};

/// Returns the bytes of buffers that Run uses on each rank, for --dry-run.
std::uint64_t BufferBytes(const RunOptions& options);

/// Checks that the memory suffices for the buffers of all threads. Ranks may have different
/// resources, so they must agree on the result.
/// \error kLimit
/// Pure.
Status CheckBuffers(unsigned threads, std::uint64_t memory_bytes);

/// Compares the space that an output needs with the free space of its file system.
/// \param output  name of the output for the message
/// \param folder  an existing folder on that file system
/// \param files   number of files and directories
/// \error kIo  too little space; kNotFound
/// Local.
Status CheckSpace(const std::string& output, const std::string& folder, std::uint64_t bytes,
                  std::uint64_t files);

/// Checks that an output fits into free space. Pure.
/// \error kIo  it does not
Status CheckFits(const os::FreeSpace& free, const std::string& output, std::uint64_t bytes,
                 std::uint64_t files);

/// Opens the stage directory, which rank 0 has created, on every rank.
/// \error kIo  a rank cannot see it (names the output); as os::OpenStage
/// Collective.
Result<os::Directory> OpenShared(comm::Comm& comm, const std::string& stage,
                                 const std::string& output);

/// Begins to write the output: takes its lock and finds or creates its stage
/// (os::Stage::Begin). Prints the notes of the stage.
/// \param sources  files of the source, which --force must not replace
/// \error kBusy  also if a stopped run has another identity; as os::Stage::Begin and
///        CheckReplaceable
/// Local, on rank 0.
Result<os::Stage> BeginStage(const RunOptions& options, const std::vector<std::string>& sources,
                             Sink& sink);

/// An output that is being written, as one rank holds it.
struct StageInHand {
  std::optional<os::Stage> stage;          ///< rank 0 only
  std::optional<os::Journal> journal;      ///< of this rank
  std::atomic<bool> failed_write = false;  ///< a write, sync or readback of this rank

  /// Notes in failed_write if a write has failed (kIo). Returns `written` unchanged. Thread-safe.
  Status Note(Status written);
  /// Agrees on the end of a step that writes, and notes it.
  /// \error as comm::Comm::Agree
  /// Collective.
  Status AgreeWritten(comm::Comm& comm, Status mine);
};

/// Ends an unsuccessful run: closes the journal and frees the lock. Keeps the stage if the next
/// run may continue it. After a failed write or sync the kernel may show pages that never reached
/// the disk, so a later run cannot detect which data are intact: such a stage is removed.
/// \param code  the error that ended the run, the same on all ranks
/// \pre this rank has closed its output files, as removing an open file leaves a hidden file on
///      NFS and FUSE
/// \error kIo  the journal could not be cleared, or the stage not be removed
/// Collective.
Status LeaveStage(comm::Comm& comm, Errc code, StageInHand& in_hand);

/// Removes the files of a resumed stage that are not in the plan. If the output was removed after
/// an interrupted commit, the stage may be the output before it (support/os/commit.cc).
/// \error kIo, kNotFound
/// Local.
Status RemoveUnplanned(const os::Directory& stage, const plan::Target& target);

/// Makes an error in the journals of a stopped run kBusy, with the way out. Errors of the file
/// system are returned unchanged.
/// Pure.
Status OfStoppedRun(const std::string& output, Status status);

/// Executes a plan: writes every output file into a stage next to `output`,
/// which it renames when complete, synced and described by a manifest
/// (support/os/commit.h). Units are divided over ranks and threads; the
/// output has the same bytes for every number of ranks and threads.
/// \error kStopped  stop requested, the next run continues; kBadInput  a source member
///        has a wrong checksum; kIo, kBusy  the output; kLimit  memory_bytes is too small
/// Collective. Source: docs/architecture.md, "Plan and run".
Result<RunReport> Run(comm::Comm& comm, const plan::Plan& plan, ByteSource& source,
                      const RunOptions& options, Sink& sink);

}  // namespace shardwright::exec
