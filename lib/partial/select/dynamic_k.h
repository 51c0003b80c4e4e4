// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Returns the PLT that one fault is expected to cost for a given K (ExpectedPlt, lost_tokens.h).
using FaultCost = std::function<double(std::uint32_t k)>;

/// Dynamic K: doubles as lost tokens add up, until every checkpoint
/// is full. Plain data that is stored as a part of the checkpoint.
struct DynamicK {
  std::uint32_t experts = 1;  ///< N
  std::uint32_t k = 1;
  std::uint32_t levels = 0;  ///< H, lossy levels from the starting K: ceil(log2(N / K0))
  double limit = 0.0375;     ///< PLT of the whole run
  double spent = 0;          ///< PLT of the faults since k was raised
  double total = 0;          ///< PLT of all faults
  /// True: raise k before a fault could exceed the level's share, so that the total
  /// stays below the limit as long as faults cost no more than expected. False: raise k
  /// afterwards, so that the total stays below the limit plus one fault for each level.
  bool predict = false;
  std::uint64_t iterations = 0;  ///< length of the run, to relate losses to; 0: unknown

  friend bool operator==(const DynamicK&, const DynamicK&) = default;

  /// Returns the PLT that a level may spend: limit / H, or 0 without lossy levels.
  double share() const { return levels == 0 ? 0 : limit / levels; }
};

/// \param k  K0, the initial K
/// \error kUsage  K0 is 0 or above N, or the limit is not a positive number
/// Pure. Source: MoC-System section 6.3.3; docs/pec-planning.md section 8.2.
Result<DynamicK> MakeDynamicK(std::uint32_t experts, std::uint32_t k, double limit, bool predict);

/// Checks that a state that was read from a file is possible.
/// \error kBadInput  names the field and its value
/// Pure.
Status Validate(const DynamicK& state);

/// Checks that a state belongs to a model: N is the number of experts of its largest layer.
/// \error kBadInput  names both numbers
/// Pure.
Status CheckExperts(const DynamicK& state, const LayerExperts& experts);

/// Returns a function for the expected cost of a fault with even routing and the same K on
/// both levels: the mean of SteadyLoss over the layers, relative to the iterations of the run.
/// \pre iterations > 0, and every layer has experts
/// Pure. Source: docs/pec-planning.md sections 2.3, 8.2.
FaultCost EvenFaultCost(LayerExperts experts, std::uint64_t interval, std::uint64_t iterations);

/// Mode `predict`: raises k while one more fault would exceed the level's share.
/// Call it at the start and after each recovery. Does nothing in the other mode.
/// Pure. Source: docs/pec-planning.md section 8.2.
void RaiseAhead(DynamicK* state, const FaultCost& cost);

/// Charges a recovery that cost `plt` to the current level. If the level
/// exceeds its share, k doubles (up to N) and the next level starts at 0.
/// \error kUsage  the cost is negative or not finite
/// Pure. Source: docs/pec-planning.md section 8.2.
Status EnterRecovery(DynamicK* state, double plt);

/// One K on the way to N.
struct KLevel {
  std::uint32_t k = 1;
  double plt = 0;            ///< expected cost of one fault
  std::uint64_t faults = 0;  ///< until K is raised
};

/// Returns the remaining levels, including the current K, without N. Absent:
/// a level lasts more than 2^53 faults, because faults cost nothing there.
/// Pure. Source: docs/pec-planning.md section 8.2.
std::optional<std::vector<KLevel>> LevelsAhead(const DynamicK& state, const FaultCost& cost);

/// Returns the number of faults with a cost before K reaches N, at the expected
/// cost of each. Absent: more than 2^53, because faults cost nothing at some level.
/// Pure. Source: docs/pec-planning.md section 12.
std::optional<std::uint64_t> FaultsCovered(const DynamicK& state, const FaultCost& cost);

}  // namespace shardwright::partial
