// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/core/types.h"
#include "support/base/result.h"

namespace shardwright::placement::internal {

/// The choices of every layer, as LayerPlan::Run returns them.
using Choices = std::vector<std::vector<LayerChoice>>;

/// Returns the index of the choice with the fewest moves whose imbalance is at most `target`, else
/// of the most even one.
/// Local.
std::size_t FewestMoves(std::span<const LayerChoice> choices, double target);

/// Chooses for each layer so that all layers together need at most `most` moves and the mean
/// imbalance is small.
/// \error kInfeasible  names the least number of moves
/// Local.
Result<std::vector<std::size_t>> WithinMoves(const Choices& choices, std::uint64_t most);

/// Returns the least mean imbalance for a number of moves, from the fewest moves to the most, in at
/// most `points` points and both ends.
/// \param counted  by layer: whether it counts for the mean
/// Local.
std::vector<MovesPoint> CurveOf(const Choices& choices, const std::vector<bool>& counted,
                                std::size_t points);

}  // namespace shardwright::placement::internal
