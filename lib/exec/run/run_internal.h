#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <tbb/task_arena.h>

#include "exec/exchange.h"
#include "exec/for_each.h"
#include "exec/integrity.h"
#include "exec/manifest.h"
#include "exec/run/run.h"
#include "exec/units.h"
#include "exec/verify.h"
#include "os/commit.h"
#include "os/file_system.h"

namespace shardwright::exec {

/// What a manifest tells of a file's bytes, as ranks send it to each other.
struct FileSum {
  Digest digest{};
  std::uint32_t payload_crc32 = 0;  ///< 0 without payloads
};

/// One run: its passes in order, and what they hand to each other. As a sink it writes units into
/// the output files and notes them in the journal.
class Runner final : private UnitSink {
 public:
  Runner(comm::Comm& comm, const plan::Plan& plan, ByteSource& source, const RunOptions& options,
         Sink& sink);
  Result<RunReport> Go();

 private:
  Status Passes();
  Status Begin();         // collective
  Status ReadJournals();  // what a stopped run noted about this rank's units; local
  Status OpenJournal();   // local
  Status CreateFiles();   // collective
  Status MakeTwins();     // clones and links, by the root; collective
  Result<bool> MakeTwin(std::uint32_t index);
  Status CheckSpace();                                     // root
  Result<os::File> OpenOutput(std::uint32_t index) const;  // new, or what a stopped run left of it
  Status CreateFile(std::uint32_t index);
  Status Recover();     // units that a stopped run has written; local
  Status WriteUnits();  // collective
  Status Put(const UnitInHand& unit) override;
  Status ShareSums();    // collective
  Status VerifyRead();   // collective
  Status LookAgain();    // at source files that no checksum vouches for; local
  Status SyncWritten();  // collective
  Status WriteFrames();  // collective
  Status WriteFrame(std::uint32_t index);
  Status WriteDigestLists();  // collective
  Status WriteText(std::uint32_t index, const std::string& text);
  Status ReadBack(std::uint32_t index) const;
  Status ReadBackAll();  // collective
  Status Commit();       // collective
  Result<RunReport> Report();

  bool Mine(std::uint64_t index) const {
    return index % static_cast<std::uint64_t>(comm_.size()) ==
           static_cast<std::uint64_t>(comm_.rank());
  }
  bool IsTwin(std::uint32_t file) const { return is_twin_[file] != std::byte{0}; }
  std::string StagePath(std::uint32_t file) const {
    return stage_path_ + "/" + plan_.target().files[file].path;
  }
  template <class Visit>
  Status ForMyFiles(Visit&& visit);  // in parallel; local

  comm::Comm& comm_;
  const plan::Plan& plan_;
  Exchange source_;
  const RunOptions& options_;
  Sink& sink_;

  tbb::task_arena arena_;
  std::optional<os::Stage> stage_;  // root only
  std::string stage_path_;
  bool resumed_ = false;
  std::map<std::uint64_t, UnitRecord> noted_;  // by unit
  std::optional<os::Journal> journal_;
  FilePool output_;
  std::optional<os::FileSystem> file_system_;  // set when all files are synced at once
  std::vector<std::byte> is_twin_;  // by output file: a clone or link, there is nothing to write
  std::set<std::uint32_t> twin_sources_;  // source files that were cloned or linked

  std::uint64_t first_ = 0;  // this rank's units
  std::uint64_t last_ = 0;
  std::vector<bool> done_;  // of this rank's units: found whole on resume
  // By unit: of all after ShareSums, before of this rank's.
  std::vector<UnitSum> sums_;
  SourceSums source_sums_;
  std::vector<FileSum> file_sums_;
  RunReport report_;
};

}  // namespace shardwright::exec
