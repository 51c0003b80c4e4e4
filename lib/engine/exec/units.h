// SPDX-License-Identifier: Apache-2.0
// lib/engine/exec: what carries out plans, into files or anything else.
// Ranks and threads share the units of a plan. gather.h fills one unit from a ByteSource, which
// reads files or, where a file is on another node, asks other ranks for it (exchange.h); what
// becomes of it is up to a UnitSink. integrity.h holds the checksums: of source members, put
// together from the pieces that were read, and of units, from which manifest.h makes those of
// files. for_each.h is the loop of threads, zpack.h compresses packs, run/ writes outputs.

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

// The one loop over units: whatever is made of a plan, be it files, blobs, memory or a comparison,
// is a UnitSink that takes its units.

namespace shardwright::exec {

/// A unit that was gathered, on its way to a sink.
struct UnitInHand {
  std::uint64_t index = 0;  ///< in the plan
  plan::Unit unit;
  std::span<const std::byte> bytes;
  /// Its sums, and the pieces of source members that it is made of. Null: they are not known yet
  /// (CopyUnits), the sink has no use for them, or it converts, and then it makes them.
  const UnitRecord* record = nullptr;
  /// Not null: the sink converts. `bytes` are what the source has, one read of the program after
  /// the other; FinishUnit makes the unit of them. It is there until Put returns.
  const plan::Program* program = nullptr;
};

/// Takes the units of a loop. Buffer and Put are called from many threads at once, in any order.
class UnitSink {
 public:
  UnitSink() = default;
  UnitSink(const UnitSink&) = delete;
  UnitSink& operator=(const UnitSink&) = delete;
  virtual ~UnitSink() = default;

  /// True: units come as the source has them, and the sink scatters and converts. So bytes may be
  /// brought somewhere else first, and be converted there.
  virtual bool converts() const { return false; }

  /// False: Put has no use for a record, and none is made.
  virtual bool sums() const { return true; }

  /// Before the units of a round are gathered: what the sink itself has to fetch for them.
  /// Collective, as ForUnitsInRounds is, the only one that calls it.
  virtual Status BeginRound(std::span<const std::uint64_t> /*units*/) { return {}; }

  /// The sink's own memory for a unit: its place in something greater, or memory that a device can
  /// reach. The loop writes into it until Put, and never again after that. May wait until some is
  /// free. Empty: the loop's memory, whose bytes are there until Put returns.
  /// \param bytes  how many are needed: unit.bytes, or more for a sink that converts
  virtual Result<std::span<std::byte>> Buffer(const plan::Unit& /*unit*/, std::uint64_t /*bytes*/) {
    return std::span<std::byte>();
  }

  /// Takes a unit. A sink that has the bytes in its own memory may return before it is done with
  /// them.
  virtual Status Put(const UnitInHand& unit) = 0;

  /// Ends what Put has begun: called by one thread when all units of a call or a round were put.
  /// Not called after an error.
  virtual Status Drain() { return {}; }
};

/// What a loop does beside gathering.
struct UnitLoopOptions {
  /// Gets the pieces of source members of every unit that was put. Null: their checksums are not
  /// worked out.
  SourceSums* sums = nullptr;
  std::uint64_t bytes_total = 0;  ///< of all units that it will be called for, for progress
  std::string stopped = "stopped on request";  ///< message of kStopped
};

/// Gathers units on the threads of an arena and hands them to sinks. It keeps the threads' memory
/// between calls; one call at a time.
class UnitLoop {
 public:
  /// \pre all outlive it
  UnitLoop(const plan::Plan& plan, ByteSource& source, tbb::task_arena& arena, Sink& sink,
           UnitLoopOptions options)
      : plan_(plan), source_(source), arena_(arena), sink_(sink), options_(std::move(options)) {}

  /// Gathers units, sums them up if the sink has a use for that, and puts them.
  /// \param units  indices of the plan
  /// \error kStopped  asked to stop; what source and sink return: of several the one of the unit
  ///        that is first in `units`
  /// Local.
  Status ForUnits(std::span<const std::uint64_t> units, UnitSink& to);

  /// The same in two calls, for a sink that gives Buffer: to have the bytes as early as can be, and
  /// their sums later. CopyUnits puts units without record; SumUnits, of the same units, takes what
  /// is in their buffers and puts them again, with their record. It neither reads the source, which
  /// may be gone by then, nor stops on request.
  /// \error as ForUnits
  /// Local.
  Status CopyUnits(std::span<const std::uint64_t> units, UnitSink& to);
  Status SumUnits(std::span<const std::uint64_t> units, UnitSink& to);

 private:
  template <class Work>
  Status ForAll(std::span<const std::uint64_t> units, UnitSink& to, const Work& work);
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

/// Puts units into the order in which their source makes its bytes with the least work; as it is
/// where that is none in particular.
/// Local.
void SortByPlace(const plan::Plan& plan, ByteSource& source, std::vector<std::uint64_t>* units);

/// UnitLoop::ForUnits in rounds of at most `most` units, before each of which the ranks send each
/// other what it needs.
/// \param loop    reads from `source`
/// \param source  of the loop's plan
/// \pre most > 0
/// \error as ForUnits, agreed on
/// Collective: ranks with fewer units take part with none.
Status ForUnitsInRounds(comm::Comm& comm, UnitLoop& loop, const plan::Plan& plan, Exchange& source,
                        std::span<const std::uint64_t> units, std::uint64_t most, UnitSink& to);

}  // namespace shardwright::exec
