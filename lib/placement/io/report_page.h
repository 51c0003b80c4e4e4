// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "placement/core/types.h"
#include "placement/io/plan_text.h"

namespace shardwright::placement {

/// A row of the page's comparison table.
struct PageRow {
  std::string strategy;
  const VerifiedPlan* plan = nullptr;  ///< null if there is none
  double seconds = 0;
  std::string reason;  ///< why there is none
};

/// Mean balance of placements on the loads of one iteration.
struct AgeingPoint {
  std::uint64_t iteration = 0;
  double after = 1;
  std::optional<double> before;
};

/// What a page shows. Everything is borrowed.
struct ReportPage {
  const TokenCounts* loads = nullptr;
  const Cluster* cluster = nullptr;
  const VerifiedPlan* plan = nullptr;
  const Placement* before = nullptr;  ///< null if nothing is known of it
  std::string before_name;
  FailureUnit unit = FailureUnit::kNode;
  std::string loads_name;
  std::vector<PageRow> rows;
  std::vector<AgeingPoint> ageing;  ///< ascending iteration; empty: not known
};

/// One self-contained HTML page: heat maps of experts and devices before and after, loads against
/// the bound, the worst layers, balance on other iterations and for fewer moves, survival by number
/// of failures, migration rounds, comparison. It needs no network and
/// follows the reader's choice of light or dark.
/// \pre loads, cluster and plan are set
/// Pure.
std::string PageText(const ReportPage& report);

}  // namespace shardwright::placement
