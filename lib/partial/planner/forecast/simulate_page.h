// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "partial/planner/forecast/simulate.h"

namespace shardwright::partial {

/// Content of a simulation's HTML report. Has pointers to the input and rows.
struct SimulationPage {
  const SimulationInput* input = nullptr;
  std::span<const SimulationRow> rows;
  std::optional<std::size_t> best;  ///< the recommended row
  std::string no_best;              ///< why no row is recommended
  double plt_limit = 0;
  std::uint64_t full_bytes = 0;  ///< of a full checkpoint
  std::string trace_name;        ///< UTF-8 without control characters
};

/// Returns K as text: "4", "4/1" if fewer experts are persisted, "1 to 8" for dynamic K.
/// Pure.
std::string LevelsText(const SimulationRow& row);

/// Returns a row's policy: "sequential", "dynamic K", "replay, least".
/// Pure.
std::string PolicyText(const SimulationRow& row);

/// Returns the name of a row: "load-aware, K 4", "dynamic K, 1 to 8".
/// Pure.
std::string RowText(const SimulationRow& row);

/// Makes a self-contained HTML report without scripts: curves over K of written bytes,
/// loss and cost of the policies, tokens at risk over the run, and the table of all
/// rows with the best one marked. The title of a table cell is its exact number.
/// \pre input is set, there is at least one row
/// Pure. Source: docs/pec-planning.md section 12.
std::string PageText(const SimulationPage& report);

}  // namespace shardwright::partial
