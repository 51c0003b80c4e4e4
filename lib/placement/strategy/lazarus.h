// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/core/types.h"

namespace shardwright::placement {

/// Replicas per expert, in proportion to its tokens: experts in ascending load take their share of
/// the slots that are left, at least `copies_min` each; the hottest takes the rest. With all loads
/// zero the shares are equal.
/// \pre slots >= tokens.size() * copies_min, copies_min >= 1, tokens not empty
/// \returns counts that sum to `slots` and do not fall with ascending (tokens, id)
/// Local. Source: Lazarus, equation 1.
std::vector<std::uint32_t> ReplicaCounts(std::span<const std::uint64_t> tokens, std::uint64_t slots,
                                         std::uint32_t copies_min);

/// Lowers counts to `most` and gives the excess to the next hottest experts that have room. What no
/// expert can take stays empty.
void CapCounts(std::span<const std::uint64_t> tokens, std::uint32_t most,
               std::vector<std::uint32_t>* counts);

/// Experts of every failure unit (duplicates are possible) for one layer.
struct UnitPlan {
  std::vector<std::vector<std::uint32_t>> experts;  ///< by unit
  bool cut = false;  ///< segments did not fit: repaired by search, no claim of optimality
};

/// The plan of maximum rank overlap: experts in groups of a unit's slots, each group on a segment
/// of units of its own as long as its rarest expert has replicas; other replicas to the least
/// loaded units. As published, without repair.
/// \param slots  by unit
/// \pre counts sum to at most the sum of slots, all counts >= 1
/// Local. Source: Lazarus, section 4.1.
UnitPlan OverlapPlan(std::span<const std::uint64_t> tokens, std::span<const std::uint32_t> counts,
                     std::span<const std::uint64_t> slots, const StopCheck& stop = {});

/// Experts in ascending count dealt to the units in a ring, pointer running on: every expert on
/// min(count, units) units if any plan of these counts can have that for all; else on at least
/// min(copies_min, ...) of them.
/// \param stop  ends it early, as those of the functions below
UnitPlan RingPlan(std::span<const std::uint32_t> counts, std::span<const std::uint64_t> slots,
                  std::uint32_t copies_min, const StopCheck& stop = {});

/// OverlapPlan, and where segments are cut the better of it and RingPlan, both improved by swaps
/// while more failure sets are survived (fewest failures first).
UnitPlan RecoveryPlan(std::span<const std::uint64_t> tokens, std::span<const std::uint32_t> counts,
                      std::span<const std::uint64_t> slots, std::uint32_t copies_min,
                      const StopCheck& stop = {});

/// Swaps replicas between units to lower the largest load per slot while every expert keeps
/// `copies_min` units (as far as it had them) and the mean recovery probability over all numbers of
/// failures falls by at most `loss` (absolute; 1 or more: no limit).
void BalanceUnits(std::span<const std::uint64_t> tokens, std::uint32_t copies_min, double loss,
                  UnitPlan* plan, const StopCheck& stop = {});

/// Improves a plan by swaps of two replicas on different units, best first, while the vector of
/// survived failure sets by size grows lexicographically. Above 16 units only sizes up to one more
/// than the rarest expert's units are compared, and a fixed number of swaps is looked at.
void RepairBySwaps(UnitPlan* plan, std::uint32_t expert_count, const StopCheck& stop = {});

}  // namespace shardwright::placement
