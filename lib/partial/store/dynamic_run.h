// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "partial/select/dynamic_k.h"
#include "partial/select/types.h"
#include "partial/store/manifest.h"
#include "partial/store/store.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// State of dynamic K in a run, with its forecast.
struct DynamicKReport {
  DynamicK state;
  /// Expected cost of a fault now; absent until a second checkpoint defines the interval.
  std::optional<double> fault_plt;
  /// Number of faults that the budget still covers; absent without `fault_plt`, or above 2^53.
  std::optional<std::uint64_t> faults_covered;
};

/// \param interval  iterations between checkpoints; 0: unknown
/// \param iteration  of the newest checkpoint, the length of runs that do not specify one
/// Pure. Source: docs/pec-planning.md section 8.2.
DynamicKReport ReportOf(const DynamicK& state, const LayerExperts& experts, std::uint64_t interval,
                        std::uint64_t iteration);

/// Returns the iteration of the newest checkpoint that is not abandoned; 0: there is none.
/// Pure.
std::uint64_t NewestIteration(const std::vector<StoredCheckpoint>& all);

/// Returns the iterations between the previous checkpoint and
/// `iteration`; 0: there is none. Ignores abandoned checkpoints.
/// Pure.
std::uint64_t IntervalBefore(const std::vector<StoredCheckpoint>& all, std::uint64_t iteration);

/// Returns the current state of dynamic K of a store: that of its last recovery or of the newest
/// checkpoint that is not abandoned, whichever was written later. Skips unreadable manifests,
/// because K only changes at recoveries, apart from changes that `predict` computes again.
/// \param all  Store::List
/// \error kBadInput  no manifest can be read
/// Local.
Result<std::optional<DynamicK>> NewestDynamicK(const Store& store,
                                               const std::vector<StoredCheckpoint>& all,
                                               const std::optional<RecoveryRecord>& last);

}  // namespace shardwright::partial
