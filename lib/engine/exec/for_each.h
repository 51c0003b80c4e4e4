// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>

#include <tbb/task_arena.h>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

#include "support/base/result.h"
#include "support/os/io_threads.h"

namespace shardwright::exec {

using os::FirstError;

namespace internal {

/// What a loop does with an index: `act` is what ParallelFor was given.
using LoopBody = void (*)(const void* act, std::uint64_t index);

/// ParallelFor without its types, so that one file has all of TBB's code for loops.
void RunLoop(std::uint64_t count, LoopBody body, const void* act);

template <class Index, class Act>
void RunLoop(Index count, const Act& act) {
  const auto body = [](const void* of, std::uint64_t index) {
    (*static_cast<const Act*>(of))(static_cast<Index>(index));
  };
  RunLoop(count, body, &act);
}

}  // namespace internal

/// Returns the number of threads to create an arena for: `wanted`, but no more than TBB runs in
/// this process, which the processor affinity, the control group or a tbb::global_control may
/// limit. TBB prints a warning for an arena with more threads and leaves them unused.
/// \pre wanted > 0
/// Local.
int ArenaThreads(unsigned wanted);

/// Calls `act(index)` for every index below `count` on the threads of the arena that the caller is
/// in, as tbb::parallel_for. Race detectors do not see into TBB: they are told that each call comes
/// after what the caller did before, and before what it does next, and no more.
/// Local.
template <class Index, class Act>
void ParallelFor(Index count, const Act& act) {
#ifdef __SANITIZE_THREAD__
  char begun = 0;
  char ended = 0;
  __tsan_release(&begun);
  // What it takes over from the caller is read before that can be told.
  internal::RunLoop(
      count, [&](Index index) __attribute__((no_sanitize_thread)) {
        __tsan_acquire(&begun);
        act(index);
        __tsan_release(&ended);
      });
  __tsan_acquire(&ended);
#else
  internal::RunLoop(count, act);
#endif
}

/// Calls `act(index)`, which returns a Status, for every index below `count` on the threads of an
/// arena, until one fails: what has begun then comes to its end, and nothing more begins.
/// \returns the error of the lowest index that failed
/// Local.
template <class Act>
Status ForEach(tbb::task_arena& arena, std::uint64_t count, const Act& act) {
  FirstError error;
  arena.execute([&] {
    ParallelFor(count, [&](std::uint64_t index) {
      if (error.failed()) return;
      if (Status status = act(index); !status) error.Set(index, std::move(status).error());
    });
  });
  return error.Take();
}

}  // namespace shardwright::exec
