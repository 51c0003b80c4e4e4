// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <tbb/task_arena.h>

#include "engine/exec/exchange.h"
#include "engine/exec/for_each.h"
#include "engine/exec/integrity.h"
#include "engine/exec/manifest.h"
#include "engine/exec/run/run.h"
#include "engine/exec/unfinished_writes.h"
#include "engine/exec/units.h"
#include "engine/exec/verify.h"
#include "support/os/commit.h"
#include "support/os/directory.h"

namespace shardwright::exec {

/// Turns kNotFound for an output file into kIo: a missing output is a failed write, not bad input.
template <class T>
T OfOutput(T result) {
  if (!result && result.error().code == Errc::kNotFound) result.error().code = Errc::kIo;
  return result;
}

/// Returns a failed read of the output as kIo: it is not an error of the input.
template <class T>
T OfWritten(T read) {
  if (!read) read.error().code = Errc::kIo;
  return read;
}

/// Returns the error of a file with other bytes than were written.
Status NotAsWritten(const std::string& path);

/// Notes on rank 0 how many files the readback could not read from the device.
/// \param mine   their number on this rank
/// \param files  all output files
/// Collective.
Status NoteReadFromMemory(comm::Comm& comm, std::uint64_t mine, std::uint64_t files, Sink& sink);

/// Writes the manifest into the stage, and reads it back if the options request that.
/// \error kIo
/// Local.
Status WriteManifest(const os::Directory& stage, const RunOptions& options,
                     const std::vector<ManifestFile>& files);

/// Checksums of a file in the manifest, as ranks send them to each other.
struct FileSum {
  Digest digest{};
  std::uint32_t payload_crc32 = 0;  ///< 0 without payloads
};

/// One run: its passes in order, and the state that they share. As a sink
/// it writes units to the output files and records them in the journal.
class Runner final : private UnitSink {
 public:
  Runner(comm::Comm& comm, const plan::Plan& plan, ByteSource& source, const RunOptions& options,
         Sink& sink);
  Result<RunReport> Run();

 private:
  Status Passes();
  Status Begin();         // collective
  Status ReadJournals();  // records of a stopped run for this rank's units; local
  Status OpenJournal();   // local
  Status CreateFiles();   // collective
  Status MakeClones();    // clones and links, by the root; collective
  Result<bool> MakeClone(std::uint32_t index);
  Status CheckSpace();  // root
  // New, or the file of a stopped run.
  Result<os::File> OpenOutput(const os::Directory& folder, std::uint32_t index) const;
  Result<os::Directory> OpenFolder(std::uint32_t index) const;
  Status CreateMyFiles();  // local
  Status CreateFile(const os::Directory& folder, std::uint32_t index);
  void AssignFiles(const std::vector<std::uint64_t>& first_of_rank);
  Status BeginCreating();   // root
  Status ChooseSync();      // collective
  Status SyncFileSystem();  // local
  Status CloseFiles();      // collective
  Status Recover();         // units already written by a stopped run; local
  Status WriteUnits();      // collective
  Status Put(const UnitInHand& unit) override;
  Status WriteUnit(const UnitInHand& unit);
  Status AgreeWritten(Status mine) { return in_hand_.AgreeWritten(comm_, std::move(mine)); }
  Status ShareSums();    // collective
  Status VerifyRead();   // collective
  Status Recheck();      // source files copied without a checksum; local
  Status SyncWritten();  // collective
  Status WriteFrames();  // collective
  Status WriteFrame(std::uint32_t index);
  Status WriteWhole(const UnitInHand& unit, const os::File& out);
  template <class Write>
  Status MakeFrame(std::uint32_t index, const Write& write);
  Status WriteDigestLists();  // collective
  Status WriteText(std::uint32_t index, const std::string& text);
  Status ReadBack(std::uint32_t index);
  Status ReadBackAll();  // collective
  Status Commit();       // collective
  Result<RunReport> Report();

  bool Mine(std::uint32_t file) const { return rank_of_file_[file] == comm_.rank(); }
  /// Returns whether one write makes the file: if it is small, and has one unit.
  bool IsWhole(std::uint32_t index) const;
  bool IsShared(std::uint32_t index) const;
  bool IsClone(std::uint32_t file) const { return is_clone_[file] != std::byte{0}; }
  const std::string& PathOf(std::uint32_t file) const {  // in the stage
    return plan_.target().files[file].path;
  }
  template <class Visit>
  Status ForMyFiles(unsigned threads, Visit&& visit);  // in parallel; local
  unsigned FrameThreads(std::uint64_t largest) const;
  unsigned SmallUnitThreads() const;

  comm::Comm& comm_;
  const plan::Plan& plan_;
  Exchange source_;
  const RunOptions& options_;
  Sink& sink_;

  tbb::task_arena arena_;
  StageInHand in_hand_;
  os::Directory directory_;  // the stage
  os::Directory journals_;   // inside the stage
  bool resumed_ = false;
  bool created_ = false;                       // the resumed run had created all its files
  std::map<std::uint64_t, UnitRecord> noted_;  // by unit
  FilePool output_;
  bool sync_at_once_ = false;              // one sync of the file system for all files
  std::vector<std::byte> is_clone_;        // by output file: a clone or link, not written
  std::set<std::uint32_t> clone_sources_;  // source files with a clone or link

  std::uint64_t first_ = 0;  // this rank's units
  std::uint64_t last_ = 0;
  std::vector<bool> done_;  // by unit of this rank: found intact on resume
  // By unit: of all ranks after ShareSums, of this rank before.
  std::vector<UnitSum> sums_;
  SourceSums source_sums_;
  std::vector<int> rank_of_file_;  // that creates and completes it
  std::vector<FileSum> file_sums_;
  std::vector<std::byte> complete_;                  // by output file: its frame is written
  std::atomic<std::uint64_t> read_from_memory_ = 0;  // files that the readback found in the cache
  RunReport report_;
  UnfinishedWrites writes_;
};

}  // namespace shardwright::exec
