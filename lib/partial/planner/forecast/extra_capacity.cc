// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/extra_capacity.h"

#include <algorithm>
#include <string>

#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

constexpr std::uint64_t kExtraDivisor = 10;  // 10 % more capacity

/// Returns the tokens above its capacity that an expert needs to process to reduce its debt.
std::uint64_t WantOf(const ExpertCapacity& expert) {
  if (expert.tokens <= expert.capacity) return 0;
  return std::min({expert.debt, expert.capacity / kExtraDivisor, expert.tokens - expert.capacity});
}

}  // namespace

Result<std::uint64_t> IterationsToMakeUp(std::uint64_t lost, std::uint64_t capacity) {
  if (capacity < kExtraDivisor) {
    return Fail(Errc::kUsage, "10 % more capacity than ", capacity,
                " tokens is less than one token, so lost tokens cannot be made up");
  }
  SW_TRY_ASSIGN(const std::uint64_t tenths, CheckedMul(lost, kExtraDivisor));
  return CeilDiv(tenths, capacity);
}

Result<std::vector<std::uint64_t>> TokensToMakeUp(const std::vector<ExpertCapacity>& experts) {
  std::uint64_t unused = 0;
  std::uint64_t wanting = 0;
  for (const ExpertCapacity& expert : experts) {
    if (expert.tokens < expert.capacity) {
      SW_TRY_ASSIGN(unused, CheckedAdd(unused, expert.capacity - expert.tokens));
    }
    if (WantOf(expert) > 0) ++wanting;
  }
  std::vector<std::uint64_t> extra(experts.size(), 0);
  if (wanting == 0) return extra;
  std::uint64_t served = 0;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const std::uint64_t want = WantOf(experts[i]);
    if (want == 0) continue;
    extra[i] = std::min(want, unused / wanting + (served < unused % wanting ? 1 : 0));
    ++served;
  }
  return extra;
}

}  // namespace shardwright::partial
