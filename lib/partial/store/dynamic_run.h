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

/// What K has come to in a run.
struct DynamicKReport {
  DynamicK state;
  /// What a fault is expected to cost now; absent before a second checkpoint tells the interval.
  std::optional<double> fault_plt;
  /// Faults that the budget still covers; absent without `fault_plt`, and above 2^53.
  std::optional<std::uint64_t> faults_covered;
};

/// \param interval  iterations between checkpoints, 0: not known
/// \param iteration  of the newest checkpoint: the length of a run that has not said its own
/// Pure. Source: docs/pec-planning.md section 8.2.
DynamicKReport ReportOf(const DynamicK& state, const LayerExperts& experts, std::uint64_t interval,
                        std::uint64_t iteration);

/// Iteration of the newest checkpoint that is not abandoned; 0: there is none.
/// Pure.
std::uint64_t NewestIteration(const std::vector<StoredCheckpoint>& all);

/// Iterations from the checkpoint before `iteration` to it; 0: there is none. Abandoned ones do not
/// count.
/// Pure.
std::uint64_t IntervalBefore(const std::vector<StoredCheckpoint>& all, std::uint64_t iteration);

/// The state of dynamic K that a store has now: that of its last recovery or of the newest
/// checkpoint that is not abandoned, whichever was written later. Manifests that cannot be read are
/// passed over: K changes at recoveries only, but for what foresight tells again.
/// \param all  Store::List
/// \error kBadInput  only manifests that cannot be read
/// Local.
Result<std::optional<DynamicK>> NewestDynamicK(const Store& store,
                                               const std::vector<StoredCheckpoint>& all,
                                               const std::optional<RecoveryRecord>& last);

}  // namespace shardwright::partial
