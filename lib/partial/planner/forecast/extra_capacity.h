// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "support/base/result.h"

namespace shardwright::partial {

// Computes the extra capacity (10 %) with which experts make up for lost tokens.

/// State of an expert of a device in one iteration.
struct ExpertCapacity {
  std::uint64_t capacity = 0;  ///< tokens that it may process
  std::uint64_t tokens = 0;    ///< tokens that were routed to it
  std::uint64_t debt = 0;      ///< lost tokens not yet made up for; 0: not recovering
};

/// Returns the minimum number of iterations to make up `lost`: ceil(lost / (capacity / 10)).
/// \error kUsage  a capacity below 10, which has a tenth of 0 tokens; kBadInput  overflow
/// Pure. Source: docs/pec-planning.md section 9.6.
Result<std::uint64_t> IterationsToMakeUp(std::uint64_t lost, std::uint64_t capacity);

/// Returns the tokens above its capacity that each expert of a device processes in this
/// iteration to reduce its debt: min(debt, capacity / 10, tokens above capacity, its share
/// of the capacity that other experts of the device leave unused). Recovering experts with
/// tokens above capacity have equal shares, and the remainder of the division goes to
/// lower ones. In total the device does not exceed the sum of its capacities.
/// \returns [expert], in the order of the input
/// \error kBadInput  overflow of the unused capacity
/// Pure. Source: MoEtion section 6; docs/pec-planning.md section 9.6.
Result<std::vector<std::uint64_t>> TokensToMakeUp(const std::vector<ExpertCapacity>& experts);

}  // namespace shardwright::partial
