// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "support/base/result.h"

namespace shardwright::partial {

// After a recovery, experts make up for lost tokens with a tenth more than their capacity.

/// An expert of a device in one iteration.
struct ExpertCapacity {
  std::uint64_t capacity = 0;  ///< tokens that it may process
  std::uint64_t tokens = 0;    ///< tokens that were routed to it
  std::uint64_t debt = 0;      ///< lost tokens that it has not made up yet; 0: not recovering
};

/// Iterations that making up for `lost` tokens takes at least: ceil(lost / (capacity / 10)).
/// \error kUsage  a capacity below 10: a tenth of it is no token; kBadInput  overflow
/// Pure. Source: docs/pec-planning.md section 9.6.
Result<std::uint64_t> IterationsToMakeUp(std::uint64_t lost, std::uint64_t capacity);

/// Tokens above its capacity that each expert of a device processes in this iteration, by which its
/// debt falls: min(debt, capacity / 10, tokens above capacity, its share of the capacity that other
/// experts of the device leave unused). The shares of the recovering experts that have tokens above
/// capacity are equal, lower ones get what division leaves; in total the device processes no more
/// than the sum of its capacities.
/// \returns [expert], as given
/// \error kBadInput  overflow of the unused capacity
/// Pure. Source: MoEtion section 6; docs/pec-planning.md section 9.6.
Result<std::vector<std::uint64_t>> TokensToMakeUp(const std::vector<ExpertCapacity>& experts);

}  // namespace shardwright::partial
