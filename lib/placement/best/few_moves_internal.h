// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/best/ground_internal.h"

namespace shardwright::placement::internal {

/// Searches the most even slots for each small number of moves, by a beam search: keeps the best
/// slots of each number of moves, and extends them by all single changes that involve the busiest
/// device. A change puts an expert in place of another one (one move), or swaps two (up to two).
/// No device gets an expert twice and no expert loses its last replica.
/// \param slots  to start from: no device has an expert twice, and every expert has a replica
/// \param held  [live device][expert]: 1 for a replica in the current placement: it costs no move
/// \param most  moves beyond those that `slots` needs
/// \param goal  peak at which the search ends
/// \param steps  changes to evaluate; nothing is searched where they do not suffice for all moves
/// \returns the slots for 1, 2, ... further moves that are more even than with fewer
/// \pre ground.copies_min is 1
/// Local.
std::vector<std::vector<std::int32_t>> FewMoves(
    const SearchGround& ground, const WindowShares& shares, std::span<const std::int32_t> slots,
    std::span<const std::uint8_t> held, std::uint64_t most, double goal, std::uint64_t steps);

}  // namespace shardwright::placement::internal
