// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "partial/planner/forecast/simulate.h"

namespace shardwright::partial {

/// What the page of a simulation shows. Borrowed but for the text and numbers.
struct SimulationPage {
  const SimulationInput* input = nullptr;
  std::span<const SimulationRow> rows;
  std::optional<std::size_t> best;  ///< the row that is recommended
  double plt_limit = 0;
  std::uint64_t full_bytes = 0;  ///< of a checkpoint of everything
  std::string trace_name;        ///< UTF-8 without control characters
};

/// "4", "4/1" with fewer experts to storage, "1 to 8" where K was dynamic.
/// Pure.
std::string LevelsText(const SimulationRow& row);

/// A row's policy: "sequential", "dynamic K", "replay, least".
/// Pure.
std::string PolicyText(const SimulationRow& row);

/// What a row is called: "load-aware, K 4", "dynamic K, 1 to 8".
/// Pure.
std::string RowText(const SimulationRow& row);

/// One self-contained HTML page without scripts: curves over K of what the policies write, lose and
/// cost, tokens at risk over the run, and the table of all rows, the best one marked. The title of
/// a cell of the table is its number in full.
/// \pre input is set, there is a row
/// Pure. Source: docs/pec-planning.md section 12.
std::string PageText(const SimulationPage& report);

}  // namespace shardwright::partial
