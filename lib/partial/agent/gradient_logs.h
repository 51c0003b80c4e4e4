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
#include <string_view>
#include <vector>

#include "partial/agent/memory.h"
#include "partial/gradient_log/log_writer.h"
#include "partial/store/manifest.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// What a process of a trainer hands over after each step of its optimizer: where the gradients of
/// experts lie in memory that it shares. The memory has places for several steps.
struct Handing {
  struct Piece {
    std::string param;
    std::uint64_t elems = 0;  ///< of the whole parameter
    std::uint64_t first = 0;
    std::uint64_t count = 0;
    DType dtype = DType::kF32;
    std::uint64_t offset = 0;  ///< in a place, bytes
    std::uint32_t tensor = 0;  ///< of the optimizer: which of the steps of an iteration
  };
  struct Module {
    std::string name;
    std::vector<Piece> pieces;
  };
  std::uint32_t writer = 0;
  std::uint64_t recovery = 0;  ///< the store's last one when the trainer was filled
  std::uint64_t begun = 0;     ///< iteration after which it begins
  std::uint64_t every = 0;     ///< iterations between snapshots; 0: not known
  int zstd_level = 0;
  std::uint32_t places = 0;
  std::uint64_t place_bytes = 0;
  std::uint32_t tensors = 0;
  std::vector<Module> modules;
};

/// Reads a trainer's description; pieces above what a log takes are cut.
/// \error kBadInput, kUnsupported  what is wrong with it
Result<Handing> ParseHanding(std::string_view text, std::uint32_t writer, const std::string& where);

/// Numbers of the logs.
struct GradientLogStatus {
  std::uint32_t writers = 0;  ///< processes that hand over now
  std::uint64_t records = 0;
  std::uint64_t gradient_bytes = 0;        ///< of gradients, as they were handed over
  std::uint64_t cut_bytes = 0;             ///< torn tails that were cut off
  std::optional<std::uint64_t> newest;     ///< iteration
  std::optional<std::uint64_t> persisted;  ///< iteration whose snapshot's persist has synced them
  std::uint64_t held_bytes = 0;            ///< of gradients that are held back now
  std::uint64_t dropped_bytes = 0;         ///< that a checkpoint has made unnecessary
  std::string forgotten;  ///< which of Kept were forgotten for lack of room; empty: none of use
};

/// Modules by name.
using ModuleNames = std::set<std::string, std::less<>>;

/// Writes the gradients that processes of a trainer hand over into the folder logs/ of a store,
/// each process as a writer of its own. Every call may come from any thread.
///
/// Gradients of modules that the next checkpoint will have (Hold) are held back in memory, since it
/// makes them unnecessary. Before any checkpoint is durable, those that it does not have of its own
/// iteration are appended (Persist), and when it is, those that it has are dropped (Drop): of every
/// durable checkpoint the log is complete, whatever becomes of those that were planned.
/// Source: docs/formats/log.md, docs/lossless.md.
class GradientLogs {
 public:
  /// Bytes that a record that is held back counts besides its gradients.
  static constexpr std::uint64_t kHeldRecordBytes = 1024;

  /// \param most_held  bytes that what is held back counts at most; 0: nothing is held back
  /// \param kept       counts what is known of records, for Kept, and nothing is held back, for who
  ///                   asks for Kept needs all of them; null: nothing is kept
  explicit GradientLogs(std::string store, std::uint64_t most_held = 0,
                        std::shared_ptr<MemoryPool> kept = {})
      : store_(std::move(store)), most_held_(kept ? 0 : most_held), pool_(std::move(kept)) {}

  /// A process begins and ends handing over.
  /// \param begun     the iteration after which it begins
  /// \param restored  it was filled by a restore of that iteration out of the store: what the log
  ///                  has is gone on with
  /// \param every     iterations between snapshots; 0: not known
  void Enter(std::uint32_t writer, std::uint64_t begun, bool restored = false,
             std::uint64_t every = 0);
  void Leave(std::uint32_t writer);

  /// The iteration after which all gradients of all processes have come without a gap, as far as is
  /// known here: of what a restore has brought forward that of the chains, 0. Absent: no process
  /// hands over, or one that did does not.
  std::optional<std::uint64_t> logged_since() const;
  /// Iterations between snapshots, as processes say; 0: they do not.
  std::uint64_t every() const;

  /// From the iteration after `since` on, gradients of these modules are held back.
  void Hold(std::uint64_t since, ModuleNames modules);
  /// No more gradients are held back; those that are stay so.
  void DiscardAll();
  /// Appends what is held back, for somebody may go on from what is only in memory.
  /// \error as LogWriter; what could not be appended stays held back
  Status AppendHeld();
  /// Forgets what is held back up to an iteration of modules that its durable checkpoint has.
  void Drop(std::uint64_t iteration, const ModuleNames& saved);

  /// Forgets what is held back of the past that restores have given up.
  void GiveUp(std::span<const RecoveryRecord> restores);

  /// Keeps a table of square roots for the steps that name it; it is written with the first one.
  /// \returns its name; nothing where all are rounded correctly, and nobody needs it
  Result<std::optional<exec::Digest>> AddRoots(optimizer_steps::RootTable roots);

  /// Appends what a process used in an iteration: a record of each module.
  /// \param place  the gradients
  /// \param steps  of each tensor of the optimizer
  /// \pre the store is there
  /// \returns bytes of gradients
  /// \error as LogWriter::Open and Append; the next call goes on where the log was whole
  Result<std::uint64_t> Append(const Handing& handing, std::uint64_t iteration,
                               std::span<const std::byte> place, std::span<const LogStep> steps);

  /// Makes all durable that was handed over up to an iteration, before the checkpoint of that
  /// iteration is: waits a while for processes that have not got so far.
  /// \param saved  modules that the checkpoint has of its iteration: what is held back of them
  ///               stays so
  /// \returns what the log lacks all the same: a writer is late or has left, or its log cannot be
  ///          synced, and ends there until Append goes on; empty: nothing
  /// \error as LogWriter: what was held back could not be appended, and stays so. The checkpoint
  ///        must not be made durable before this is done again.
  Result<std::string> Persist(std::uint64_t iteration, const ModuleNames& saved = {});

  /// Whether all processes that hand over now have handed over an iteration.
  bool AllAt(std::uint64_t iteration) const;

  /// The records that were appended since this began, but for those that were forgotten: to be read
  /// where they lie.
  GradientLog Kept() const;
  /// Forgets the records up to an iteration. What does not fit into the pool is forgotten too, with
  /// all that came before it: their chains have a gap.
  void Forget(std::uint64_t iteration);

  GradientLogStatus status() const;

 private:
  /// What a process used of a module in an iteration, with bytes of its own.
  struct Used {
    std::uint64_t iteration = 0;
    std::uint64_t recovery = 0;
    int zstd_level = 0;
    std::string module;
    std::vector<LogStep> steps;
    std::vector<std::string> params;
    std::vector<GradientRange> ranges;  // of `params` and `bytes`
    std::vector<std::byte> bytes;
  };
  struct KeptRecord {
    LoggedRecord logged;
    Counted counted;
  };
  struct Writer {
    std::uint32_t number = 0;
    std::mutex mutex;  // of log; before mutex_
    std::optional<LogWriter> log;
    int zstd_level = 0;
    bool dirty = false;
    std::vector<std::byte> own;  // a copy of what is appended
    std::list<Used> held;
    // Under mutex_.
    std::uint32_t entered = 0;
    bool counts = false;  // it has handed over since nobody did
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
  Status AppendHeld(Writer* writer, std::uint64_t last, const ModuleNames& saved);
  std::uint64_t EraseHeld(const std::function<bool(const Used&)>& which);
  bool Planned(std::uint64_t iteration, const std::string& module) const;
  bool TakeRoom(std::uint64_t bytes);
  std::vector<Writer*> All();

  void Keep(LoggedRecord logged);
  bool AllAtLocked(std::uint64_t iteration) const;

  const std::string store_;
  const std::uint64_t most_held_;
  const std::shared_ptr<MemoryPool> pool_;
  mutable std::mutex mutex_;
  std::condition_variable appended_;
  std::map<std::uint32_t, std::unique_ptr<Writer>> writers_;
  std::map<exec::Digest, optimizer_steps::RootTable> roots_;  // that are not in the folder yet
  std::map<std::uint64_t, ModuleNames> held_;  // by the iteration after which it is so
  std::uint64_t held_records_ = 0;
  std::deque<std::shared_ptr<const KeptRecord>> kept_;  // as they were appended
  std::uint64_t gap_ = 0;                               // the last iteration of status_.forgotten
  GradientLogStatus status_;
};

}  // namespace shardwright::partial
