// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>

#include "placement/failure_simulation/failure_simulation.h"

namespace shardwright::placement {

/// Contents of the HTML report of simulated failures.
struct FailuresPage {
  std::span<const SimulationResult> results;  ///< one per strategy, of the same events
  std::string events_name;                    ///< UTF-8 without control characters
  bool bytes_known = false;                   ///< the cluster has the size of an expert
};

/// Makes a self-contained HTML report without scripts: the table of strategies, the balance and
/// the live nodes over time, a timeline of copies and of times without a plan, and a table of the
/// events.
/// \pre there are results, and each has steps
/// Pure.
std::string FailuresPageText(const FailuresPage& page);

}  // namespace shardwright::placement
