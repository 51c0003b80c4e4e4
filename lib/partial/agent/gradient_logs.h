// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "partial/agent/memory/memory.h"
#include "partial/gradient_log/log_writer.h"
#include "partial/gradient_log/submitted_gradients.h"
#include "partial/store/manifest.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Statistics of the logs.
struct GradientLogStatus {
  std::uint32_t writers = 0;  ///< processes that submit gradients now
  std::uint64_t records = 0;
  std::uint64_t gradient_bytes = 0;        ///< size of gradients as submitted
  std::uint64_t cut_bytes = 0;             ///< incomplete records truncated from ends of logs
  std::optional<std::uint64_t> newest;     ///< iteration
  std::optional<std::uint64_t> persisted;  ///< iteration of the persist that synced the logs last
  std::uint64_t held_bytes = 0;            ///< gradients that are buffered now
  std::uint64_t dropped_bytes = 0;         ///< gradients that a checkpoint has made unnecessary
  std::string forgotten;  ///< records of Kept dropped for lack of memory; empty: none of use
};

/// Names of modules.
using ModuleNames = std::set<std::string, std::less<>>;

/// Writes the gradients that processes of a trainer submit into the folder logs/
/// of a store. Each process is a separate writer. Every method is thread-safe.
///
/// Buffers gradients of modules that the next checkpoint will contain (Hold), since that
/// makes them unnecessary. Before any checkpoint becomes durable, Persist appends the
/// buffered gradients that it does not replace. Afterwards Drop discards those that it
/// replaces. So the log is complete for every durable checkpoint, even if planned ones fail.
/// Source: docs/formats/log.md, docs/lossless.md.
class GradientLogs {
 public:
  /// Bytes that count for each buffered record in addition to its gradients.
  static constexpr std::uint64_t kBufferedRecordBytes = 1024;

  /// \param most_held  limit for buffered bytes; 0: append everything at once
  /// \param kept  accounts for records in memory, for Kept. Nothing is buffered then, because
  ///                   users of Kept need all records. Null: no records are kept in memory
  explicit GradientLogs(std::string store, std::uint64_t most_held = 0,
                        std::shared_ptr<MemoryPool> kept = {})
      : store_(std::move(store)), most_held_(kept ? 0 : most_held), pool_(std::move(kept)) {}

  /// Registers and unregisters a process that submits gradients.
  /// \param begun     last iteration before the first submitted one
  /// \param restored  the process started from a restore of that iteration out
  ///                  of the store, so its gradients continue the existing log
  /// \param every     iterations between snapshots; 0: unknown
  void Enter(std::uint32_t writer, std::uint64_t begun, bool restored = false,
             std::uint64_t every = 0);
  void Leave(std::uint32_t writer);

  /// Returns the iteration after which the gradients of all processes are known
  /// to be without a gap; 0 if a restore has replayed the chains that they
  /// continue. Absent: no process submits gradients, or one that did has stopped.
  std::optional<std::uint64_t> logged_since() const;
  /// Returns the iterations between snapshots that processes report; 0: none does.
  std::uint64_t every() const;

  /// Buffers gradients of these modules from iteration `since` + 1 on.
  void Hold(std::uint64_t since, ModuleNames modules);
  /// Stops buffering further gradients. Buffered gradients stay buffered.
  void DiscardAll();
  /// Appends all buffered gradients, because a restore may resume from a state in memory.
  /// \error as LogWriter; gradients that could not be appended stay buffered
  Status AppendBuffered();
  /// Discards buffered gradients of `saved` modules up to the iteration of a durable checkpoint.
  void Drop(std::uint64_t iteration, const ModuleNames& saved);

  /// Discards buffered gradients of iterations that restores have rolled back.
  void GiveUp(std::span<const RecoveryRecord> restores);

  /// Keeps a table of square roots for the steps that name it, and writes it with the first one.
  /// \returns its name; nullopt if all are rounded correctly, so that no table is needed
  Result<std::optional<exec::Digest>> AddRoots(optimizer_steps::RootTable roots);

  /// Appends the gradients that a process used in an iteration, one record per module.
  /// \param place  slot of shared memory with the gradients
  /// \param steps  one for each tensor of the optimizer
  /// \pre the store exists
  /// \returns number of gradient bytes
  /// \error as LogWriter::Open and Append; the next call continues after the last intact record
  Result<std::uint64_t> Append(const Handing& handing, std::uint64_t iteration,
                               std::span<const std::byte> place, std::span<const LogStep> steps);

  /// Makes all submitted gradients up to an iteration durable, before the checkpoint
  /// of that iteration. Waits for processes that are late, for a limited time.
  /// \param saved  modules that the checkpoint contains at its own
  ///               iteration; buffered gradients of these stay buffered
  /// \returns a description of the gap that remains, empty if none: a writer is late or has
  ///          left, or its log cannot be synced and is incomplete until Append reopens it
  /// \error as LogWriter: buffered gradients could not be appended, and stay buffered.
  ///        The caller must repeat the call before it makes the checkpoint durable.
  Result<std::string> Persist(std::uint64_t iteration, const ModuleNames& saved = {});

  /// Returns true if all registered processes have submitted the gradients of an iteration.
  bool AllAt(std::uint64_t iteration) const;

  /// Returns the records appended since construction, except
  /// forgotten ones, in that order, to be read from their segments.
  std::vector<std::shared_ptr<const LoggedRecord>> KeptRecords() const;
  /// Returns the log of KeptRecords.
  GradientLog Kept() const;
  /// Forgets the records up to an iteration. Records that do not fit into the pool are
  /// forgotten too, with all earlier ones, because chains through them have a gap.
  void Forget(std::uint64_t iteration);
  /// Makes Forget keep the records after an iteration for one more user, as far as memory allows.
  /// Replaces the user's previous iteration.
  /// \param iteration  absent: the user needs no records
  void Retain(const void* user, std::optional<std::uint64_t> iteration);

  GradientLogStatus status() const;

 private:
  /// Copy of the gradients that a process used of a module in an iteration.
  struct Used {
    std::uint64_t iteration = 0;
    std::uint64_t recovery = 0;
    int zstd_level = 0;
    std::string module;
    std::vector<LogStep> steps;
    std::vector<std::string> params;
    std::vector<GradientRange> ranges;  // ranges of `params` in `bytes`
    std::vector<std::byte> bytes;
  };
  struct KeptRecord {
    LoggedRecord logged;
    Counted counted;
  };
  struct Writer {
    std::uint32_t number = 0;
    std::mutex mutex;  // guards log; before mutex_
    std::optional<LogWriter> log;
    int zstd_level = 0;
    bool dirty = false;
    std::vector<std::byte> own;  // copy of the bytes being appended
    std::list<Used> held;
    // Under mutex_.
    std::uint32_t entered = 0;
    bool counts = false;  // entered since the last time without any process
    std::uint64_t newest = 0;
    std::uint64_t since = 0;  // as logged_since
    std::uint64_t every = 0;
  };

  Writer& Find(std::uint32_t number);
  Status Open(std::uint64_t recovery, int zstd_level, Writer* writer);
  Status PutRootsOf(std::span<const LogStep> steps);
  Status AppendModule(const Handing& handing, const Handing::Module& module,
                      std::uint64_t iteration, std::span<const std::byte> place,
                      std::span<const LogStep> steps, Writer* writer);
  Status AppendBuffered(Writer* writer, std::uint64_t last, const ModuleNames& saved);
  std::uint64_t EraseBuffered(const std::function<bool(const Used&)>& which);
  bool Planned(std::uint64_t iteration, const std::string& module) const;
  bool TakeRoom(std::uint64_t bytes);
  std::vector<Writer*> All();

  void Keep(LoggedRecord logged);
  void ForgetLocked(std::uint64_t last);
  bool AllAtLocked(std::uint64_t iteration) const;

  const std::string store_;
  const std::uint64_t most_held_;
  const std::shared_ptr<MemoryPool> pool_;
  mutable std::mutex mutex_;
  std::condition_variable appended_;
  std::map<std::uint32_t, std::unique_ptr<Writer>> writers_;
  std::map<exec::Digest, optimizer_steps::RootTable> roots_;  // not yet written to the folder
  std::map<std::uint64_t, ModuleNames> held_;  // key: iteration after which these are buffered
  std::uint64_t held_records_ = 0;
  std::deque<std::shared_ptr<const KeptRecord>> kept_;  // in the order of appending
  std::map<const void*, std::uint64_t> retained_;       // by user of Retain
  std::uint64_t forgotten_ = 0;                         // by the last call of Forget
  std::uint64_t gap_ = 0;                               // the last iteration in status_.forgotten
  GradientLogStatus status_;
};

}  // namespace shardwright::partial
