// SPDX-License-Identifier: Apache-2.0
// lib/engine/exec: executes plans and sends their bytes to files or any other sink.
// Ranks and threads share the units of a plan. gather.h fills one unit from a ByteSource. It
// reads files, or requests the bytes from other ranks if a file is on another node (exchange.h).
// A UnitSink consumes the unit. integrity.h has the checksums: of source members, combined from
// the pieces that were read, and of units. manifest.h combines the latter into the checksums of
// files. for_each.h is the parallel loop, zpack.h compresses packs, run/ writes outputs.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <tbb/enumerable_thread_specific.h>
#include <tbb/task_arena.h>

#include "engine/exec/exchange.h"
#include "engine/exec/gather.h"
#include "engine/exec/integrity.h"
#include "engine/plan/plan.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

// The loop over units. All users of a plan (files, blobs,
// memory, comparisons) are UnitSinks that consume its units.

namespace shardwright::exec {

/// A gathered unit that is passed to a sink.
struct UnitInHand {
  std::uint64_t index = 0;  ///< in the plan
  plan::Unit unit;
  std::span<const std::byte> bytes;
  /// Its checksums and pieces of source members. Null if they are not known yet (CopyUnits),
  /// the sink does not use them, or the sink converts and computes them itself.
  const UnitRecord* record = nullptr;
  /// If not null, the sink converts: `bytes` are the source's bytes, one read of the program
  /// after the other, and FinishUnit makes the unit from them. Valid until Put returns.
  const plan::Program* program = nullptr;
};

/// Consumes the units of a loop. Many threads call Buffer and Put at the same time, in any order.
class UnitSink {
 public:
  UnitSink() = default;
  UnitSink(const UnitSink&) = delete;
  UnitSink& operator=(const UnitSink&) = delete;
  virtual ~UnitSink() = default;

  /// Returns true if the sink scatters and converts itself and wants the source's bytes. It
  /// can then move the bytes somewhere else first, for example to a device, and convert there.
  virtual bool converts() const { return false; }

  /// Returns false if Put does not use records; the loop then computes none.
  virtual bool sums() const { return true; }

  /// Prepares a round before its units are gathered, for example fetches data for the sink itself.
  /// Collective, like ForUnitsInRounds, its only caller.
  virtual Status BeginRound(std::span<const std::uint64_t> /*units*/) { return {}; }

  /// Returns the sink's own memory for a unit: its place in a larger buffer, or memory that a
  /// device can access. The loop writes into it only until Put. The call may wait until memory
  /// is free. If empty, the loop uses its own memory, which is valid until Put returns.
  /// \param bytes  required size: unit.bytes, or the bytes of all reads for a sink that converts
  virtual Result<std::span<std::byte>> Buffer(const plan::Unit& /*unit*/, std::uint64_t /*bytes*/) {
    return std::span<std::byte>();
  }

  /// Consumes a unit. A sink that owns the bytes' memory
  /// may return before it has finished with them.
  virtual Status Put(const UnitInHand& unit) = 0;

  /// Completes the work that Put has started. One thread calls it after
  /// all units of a call or round were put. Not called after an error.
  virtual Status Drain() { return {}; }
};

/// Options of a UnitLoop.
struct UnitLoopOptions {
  /// Receives the pieces of source members of every unit that was
  /// put. If null, the loop does not compute their checksums.
  SourceSums* sums = nullptr;
  std::uint64_t bytes_total = 0;               ///< of all units of all calls, for progress
  std::string stopped = "stopped on request";  ///< message of kStopped
};

/// Gathers units on the threads of an arena and passes them to sinks.
/// Keeps the threads' memory between calls. For one call at a time.
class UnitLoop {
 public:
  /// \pre all references outlive it
  UnitLoop(const plan::Plan& plan, ByteSource& source, tbb::task_arena& arena, Sink& sink,
           UnitLoopOptions options)
      : plan_(plan), source_(source), arena_(arena), sink_(sink), options_(std::move(options)) {}

  /// Gathers units, computes their checksums if the sink uses them, and puts them.
  /// \param units  indices of the plan
  /// \param io_threads  if not 0, the number of threads to use instead of the arena's: for small
  ///        units, where reads and writes mostly wait for a file system
  /// \error kStopped  stop requested; errors of source and sink: of
  ///        several, the one of the unit that is first in `units`
  /// Local.
  Status ForUnits(std::span<const std::uint64_t> units, UnitSink& to, unsigned io_threads = 0);

  /// Split ForUnits into two calls, for a sink with its own Buffer that needs the bytes early and
  /// their checksums later. CopyUnits puts units without a record. SumUnits, with the same units,
  /// computes checksums of the bytes in the sink's buffers and puts the units again with their
  /// record. It does not read the source, which may no longer exist, and ignores stop requests.
  /// \error as ForUnits
  /// Local.
  Status CopyUnits(std::span<const std::uint64_t> units, UnitSink& to);
  Status SumUnits(std::span<const std::uint64_t> units, UnitSink& to);

 private:
  template <class Work>
  Status ForAll(std::span<const std::uint64_t> units, UnitSink& to, unsigned io_threads,
                const Work& work);
  Status Gather(std::uint64_t index, bool sum_later, UnitSink& to);
  Status PutAsRead(UnitInHand unit, Workspace* workspace, UnitSink& to);
  Status PutSummed(UnitInHand unit, std::optional<std::uint32_t> crc32, UnitRecord* record,
                   UnitSink& to);
  void Count(const plan::Unit& unit, std::span<const Share> shares);

  const plan::Plan& plan_;
  ByteSource& source_;
  tbb::task_arena& arena_;
  Sink& sink_;
  const UnitLoopOptions options_;
  tbb::enumerable_thread_specific<Workspace> workspaces_;
  std::atomic<std::uint64_t> bytes_done_ = 0;
};

/// Sorts units into the order in which their source computes its bytes
/// with the least work. Does nothing if the source has no preferred order.
/// Local.
void SortByPlace(const plan::Plan& plan, ByteSource& source, std::vector<std::uint64_t>* units);

/// Runs UnitLoop::ForUnits in rounds of at most `most` units. Before
/// each round the ranks send each other the bytes that it reads.
/// \param loop    reads from `source`
/// \param source  source of the loop's plan
/// \param io_threads  as ForUnits
/// \pre most > 0
/// \error as ForUnits, agreed on by all ranks
/// Collective: ranks with fewer units take part with none.
Status ForUnitsInRounds(comm::Comm& comm, UnitLoop& loop, const plan::Plan& plan, Exchange& source,
                        std::span<const std::uint64_t> units, std::uint64_t most, UnitSink& to,
                        unsigned io_threads = 0);

}  // namespace shardwright::exec
