// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/core/types.h"
#include "support/base/result.h"

namespace shardwright::placement::internal {

/// Choices of every layer, as returned by LayerPlan::Run.
using Choices = std::vector<std::vector<LayerChoice>>;

/// Returns the index of the choice with the fewest moves among those with an imbalance of at most
/// `target`. If there are none, returns the index of the most even choice.
/// Local.
std::size_t FewestMoves(std::span<const LayerChoice> choices, double target);

/// Chooses one placement per layer so that all layers together need at most `most` moves and
/// the mean imbalance is small.
/// \error kInfeasible  even the fewest moves exceed `most`: names them
/// Local.
Result<std::vector<std::size_t>> WithinMoves(const Choices& choices, std::uint64_t most);

/// Returns the least mean imbalance by number of moves, from the fewest moves to the most, in
/// at most `points` points plus both ends.
/// \param counted  by layer: true if it counts for the mean
/// Local.
std::vector<MovesPoint> CurveOf(const Choices& choices, const std::vector<bool>& counted,
                                std::size_t points);

}  // namespace shardwright::placement::internal
