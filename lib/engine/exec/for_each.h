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

/// Calls the callable `act` of ParallelFor with an index.
using LoopBody = void (*)(const void* act, std::uint64_t index);

/// Implements ParallelFor without templates, so that one file instantiates TBB's loop code.
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

/// Calls `act(index)` for every index below `count` on the threads of the caller's arena,
/// like tbb::parallel_for. ThreadSanitizer cannot follow TBB, so annotations declare that
/// each call runs after the caller's earlier code and before its later code.
/// Local.
template <class Index, class Act>
void ParallelFor(Index count, const Act& act) {
#ifdef __SANITIZE_THREAD__
  char begun = 0;
  char ended = 0;
  __tsan_release(&begun);
  // The lambda is not instrumented: it reads its captures before the acquire.
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

/// Calls `act(index)`, which returns a Status, for every index below `count` on the threads of
/// an arena. After an error, calls that have begun run to their end and no further call begins.
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
