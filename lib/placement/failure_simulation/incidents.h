// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "placement/failure_simulation/failure_simulation.h"

namespace shardwright::placement {

/// A time at which strategies lost state or had no plan. Refers to the simulation results.
struct Incident {
  const SimulationStep* step = nullptr;  ///< of the first affected strategy; all have equal nodes
  std::vector<std::string> lost;         ///< strategies
  std::vector<std::string> stalled;      ///< strategies
};

/// Returns the times, in milliseconds, at which strategies lost state or had no plan.
/// Pure.
std::map<std::uint64_t, Incident> IncidentOf(const std::vector<SimulationResult>& results);

/// Returns one line about a time: "3 experts lost, restored from a checkpoint". With several
/// strategies it names those affected: "lost: all but best".
/// Pure.
std::string IncidentText(const Incident& moment, const std::vector<SimulationResult>& results);

}  // namespace shardwright::placement
