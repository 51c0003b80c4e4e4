// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/core/types.h"

namespace shardwright::placement {

/// Returns the replicas per expert, in proportion to its tokens. Experts in ascending load take
/// their share of the remaining slots, at least `copies_min` each, and the hottest takes the
/// rest. If all experts have zero tokens, the shares are equal.
/// \pre slots >= tokens.size() * copies_min, copies_min >= 1, tokens not empty
/// \returns counts that add up to `slots` and do not decrease with ascending (tokens, id)
/// Local. Source: Lazarus, equation 1.
std::vector<std::uint32_t> ReplicaCounts(std::span<const std::uint64_t> tokens, std::uint64_t slots,
                                         std::uint32_t copies_min);

/// Lowers counts to `most` and gives the excess to the next hottest experts below that limit.
/// Slots that no expert can take stay empty.
void CapCounts(std::span<const std::uint64_t> tokens, std::uint32_t most,
               std::vector<std::uint32_t>* counts);

/// Experts of every failure unit for one layer. A unit may have an expert several times.
struct UnitPlan {
  std::vector<std::vector<std::uint32_t>> experts;  ///< by unit
  bool cut = false;  ///< segments did not fit: repaired by search, optimality not guaranteed
};

/// Returns the plan of maximum rank overlap. Experts form groups of the size of a unit's slots.
/// Each group has its own segment of units, one per replica of its rarest expert. Other replicas
/// go to the least loaded units. As published, without repair.
/// \param slots  number of slots by unit
/// \pre counts add up to at most all slots, all counts >= 1
/// Local. Source: Lazarus, section 4.1.
UnitPlan OverlapPlan(std::span<const std::uint64_t> tokens, std::span<const std::uint32_t> counts,
                     std::span<const std::uint64_t> slots, const StopCheck& stop = {});

/// Deals experts in ascending count to the units in a ring, where each expert starts after the
/// last unit used. Every expert is on min(count, units) units if a plan of these counts can reach
/// that for all experts, otherwise on at least min(copies_min, ...) of them.
/// \param stop  ends the work early, here and in the functions below
UnitPlan RingPlan(std::span<const std::uint32_t> counts, std::span<const std::uint64_t> slots,
                  std::uint32_t copies_min, const StopCheck& stop = {});

/// Returns OverlapPlan. If it cuts segments, returns the better of it and RingPlan, both improved
/// by swaps while more failure sets are survived (fewest failures first).
UnitPlan RecoveryPlan(std::span<const std::uint64_t> tokens, std::span<const std::uint32_t> counts,
                      std::span<const std::uint64_t> slots, std::uint32_t copies_min,
                      const StopCheck& stop = {});

/// Swaps replicas between units to lower the largest load per slot. Every expert keeps its
/// `copies_min` units (if it had them), and the mean recovery probability over all numbers of
/// failures decreases by at most `loss` (absolute; 1 or more: no limit).
void BalanceUnits(std::span<const std::uint64_t> tokens, std::uint32_t copies_min, double loss,
                  UnitPlan* plan, const StopCheck& stop = {});

/// Improves a plan by swaps of two replicas on different units, best first, while the vector of
/// survived failure sets by size grows lexicographically. With more than 16 units it compares only
/// sizes up to the units of the rarest expert plus one, and tries a fixed number of swaps.
void RepairBySwaps(UnitPlan* plan, std::uint32_t expert_count, const StopCheck& stop = {});

}  // namespace shardwright::placement
