// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/for_each.h"

#include <algorithm>

#include <tbb/global_control.h>
#include <tbb/parallel_for.h>

namespace shardwright::exec {

int ArenaThreads(unsigned wanted) {
  using tbb::global_control;
  const std::size_t most = global_control::active_value(global_control::max_allowed_parallelism);
  return static_cast<int>(std::min<std::size_t>(wanted, most));
}

namespace internal {

void RunLoop(std::uint64_t count, LoopBody body, const void* act) {
  tbb::parallel_for(std::uint64_t{0}, count, [=](std::uint64_t index) { body(act, index); });
}

}  // namespace internal
}  // namespace shardwright::exec
