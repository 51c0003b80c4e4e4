#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "pec/agent/memory.h"
#include "pec/log/log_writer.h"

namespace shardwright::pec {

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
  std::string forgotten;  ///< which of Kept were forgotten for lack of room; empty: none of use
};

/// Writes the gradients that processes of a trainer hand over into the folder logs/ of a store,
/// each process as a writer of its own. Every call may come from any thread.
/// Source: docs/formats/log.md, docs/lossless.md.
class GradientLogs {
 public:
  /// \param kept  counts what is known of records, for Kept; null: nothing is kept
  explicit GradientLogs(std::string store, std::shared_ptr<MemoryPool> kept = {})
      : store_(std::move(store)), pool_(std::move(kept)) {}

  /// A process begins and ends handing over. \param begun  the iteration after which it begins
  void Enter(std::uint32_t writer, std::uint64_t begun);
  void Leave(std::uint32_t writer);

  /// Keeps a table of square roots for the steps that name it; it is written with the first one.
  /// \returns its name; nothing where all are rounded correctly, and nobody needs it
  Result<std::optional<exec::Digest>> AddRoots(replay::RootTable roots);

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
  /// \error kIo  all that was there is durable, but a writer is late; or the log of a writer cannot
  ///        be synced, and ends there until Append goes on
  Status Persist(std::uint64_t iteration);

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
  struct KeptRecord {
    LoggedRecord logged;
    Counted counted;
  };
  struct Writer {
    std::mutex mutex;  // of log; before mutex_
    std::optional<LogWriter> log;
    int zstd_level = 0;
    bool dirty = false;
    std::vector<std::byte> own;  // a copy of what is appended
    // Under mutex_.
    std::uint32_t entered = 0;
    std::uint64_t newest = 0;
  };

  Writer& Find(std::uint32_t number);
  Status Open(const Handing& handing, Writer* writer);
  Status PutRootsOf(std::span<const LogStep> steps);
  void Keep(LoggedRecord logged);
  bool AllAtLocked(std::uint64_t iteration) const;

  const std::string store_;
  const std::shared_ptr<MemoryPool> pool_;
  mutable std::mutex mutex_;
  std::condition_variable appended_;
  std::map<std::uint32_t, std::unique_ptr<Writer>> writers_;
  std::map<exec::Digest, replay::RootTable> roots_;     // that are not in the folder yet
  std::deque<std::shared_ptr<const KeptRecord>> kept_;  // as they were appended
  std::uint64_t gap_ = 0;                               // the last iteration of status_.forgotten
  GradientLogStatus status_;
};

}  // namespace shardwright::pec
