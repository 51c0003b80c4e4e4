#include "exec/for_each.h"

#include <tbb/parallel_for.h>

namespace shardwright::exec::internal {

void RunLoop(std::uint64_t count, LoopBody body, const void* act) {
  tbb::parallel_for(std::uint64_t{0}, count, [=](std::uint64_t index) { body(act, index); });
}

}  // namespace shardwright::exec::internal
