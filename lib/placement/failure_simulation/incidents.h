// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "placement/failure_simulation/failure_simulation.h"

namespace shardwright::placement {

/// A moment at which strategies lost state or had no plan. Borrows from the replays.
struct TroubledMoment {
  const SimulationStep* step = nullptr;  ///< of the first one in trouble; all see the same nodes
  std::vector<std::string> lost;         ///< strategies
  std::vector<std::string> stalled;      ///< strategies
};

/// By milliseconds: the moments at which something was lost or no plan existed.
/// Pure.
std::map<std::uint64_t, TroubledMoment> TroubleOf(const std::vector<SimulationResult>& results);

/// One line about a moment: "3 experts lost, restored from a checkpoint"; of several strategies who
/// was in trouble: "lost: all but best".
/// Pure.
std::string TroubleText(const TroubledMoment& moment, const std::vector<SimulationResult>& results);

}  // namespace shardwright::placement
