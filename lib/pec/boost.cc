#include "pec/boost.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/checked.h"

namespace shardwright::pec {
namespace {

constexpr std::uint64_t kBoostDivisor = 10;  // 10 % more capacity

/// What an expert would like to process above its capacity.
std::uint64_t WantOf(const BoostExpert& expert) {
  if (expert.tokens <= expert.capacity) return 0;
  return std::min({expert.debt, expert.capacity / kBoostDivisor, expert.tokens - expert.capacity});
}

}  // namespace

Result<std::uint64_t> CapacityOf(double factor, std::uint64_t tokens, std::uint32_t experts) {
  const double capacity = std::floor(factor * static_cast<double>(tokens) / experts);
  if (experts == 0 || !(factor >= 0) || !(capacity < 0x1p53)) {
    return Fail(Errc::kUsage, "no capacity follows from a factor of " + std::to_string(factor) +
                                  ", " + std::to_string(tokens) + " tokens and " +
                                  std::to_string(experts) + " experts");
  }
  return static_cast<std::uint64_t>(capacity);
}

Result<std::uint64_t> BoostIterations(std::uint64_t lost, std::uint64_t capacity) {
  if (capacity < kBoostDivisor) {
    return Fail(Errc::kUsage, "a tenth of a capacity of " + std::to_string(capacity) +
                                  " is not one token: nothing can be made up");
  }
  SW_TRY_ASSIGN(const std::uint64_t tenths, CheckedMul(lost, kBoostDivisor));
  return CeilDiv(tenths, capacity);
}

Result<std::vector<std::uint64_t>> BoostStep(const std::vector<BoostExpert>& experts) {
  std::uint64_t unused = 0;
  std::uint64_t wanting = 0;
  for (const BoostExpert& expert : experts) {
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

}  // namespace shardwright::pec
