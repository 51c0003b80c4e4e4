// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "placement/core/types.h"
#include "placement/cost/cost.h"
#include "placement/io/plan_text.h"

namespace shardwright::placement {

/// A row of the report's comparison table.
struct PageRow {
  std::string strategy;
  const VerifiedPlan* plan = nullptr;  ///< null if there is no plan
  double seconds = 0;
  std::string reason;                 ///< reason for a missing plan
  const PlannedCost* cost = nullptr;  ///< null if unknown
};

/// Mean balance of placements with the token counts of one iteration.
struct AgeingPoint {
  std::uint64_t iteration = 0;
  double after = 1;
  std::optional<double> before;
};

/// Data of the HTML report. All pointers are borrowed.
struct ReportPage {
  const TokenCounts* loads = nullptr;
  const Cluster* cluster = nullptr;
  const VerifiedPlan* plan = nullptr;
  const Placement* before = nullptr;  ///< null if unknown
  std::string before_name;
  FailureUnit unit = FailureUnit::kNode;
  std::string loads_name;
  std::vector<PageRow> rows;
  std::vector<AgeingPoint> ageing;    ///< ascending iteration; empty: unknown
  const PlannedCost* cost = nullptr;  ///< null if unknown
};

/// Returns one self-contained HTML page: heat maps of experts and devices before and after, loads
/// and their bound, the worst layers, balance on other iterations and for fewer moves, times and
/// memory, survival by number of failures, migration rounds, and the comparison table. It loads
/// nothing from the network and follows the light or dark setting of the browser.
/// \pre `loads`, `cluster` and `plan` are set
/// Pure.
std::string PageText(const ReportPage& report);

}  // namespace shardwright::placement
