// SPDX-License-Identifier: Apache-2.0
#include "partial/store/dynamic_run.h"

#include <algorithm>
#include <utility>

namespace shardwright::partial {

DynamicKReport ReportOf(const DynamicK& state, const LayerExperts& experts, std::uint64_t interval,
                        std::uint64_t iteration) {
  DynamicKReport report{state, {}, {}};
  const std::uint64_t run = state.iterations > 0 ? state.iterations : iteration;
  if (interval == 0 || run == 0 || experts.empty()) return report;
  const FaultCost cost = EvenFaultCost(experts, interval, run);
  report.fault_plt = cost(state.k);
  report.faults_covered = FaultsCovered(state, cost);
  return report;
}

std::uint64_t NewestIteration(const std::vector<StoredCheckpoint>& all) {
  std::uint64_t newest = 0;
  for (const StoredCheckpoint& one : all) {
    if (!one.abandoned) newest = std::max(newest, one.iteration);
  }
  return newest;
}

std::uint64_t IntervalBefore(const std::vector<StoredCheckpoint>& all, std::uint64_t iteration) {
  std::uint64_t interval = 0;
  for (const StoredCheckpoint& one : all) {
    if (one.abandoned || one.iteration >= iteration) continue;
    const std::uint64_t since = iteration - one.iteration;
    interval = interval == 0 ? since : std::min(interval, since);
  }
  return interval;
}

Result<std::optional<DynamicK>> NewestDynamicK(const Store& store,
                                               const std::vector<StoredCheckpoint>& all,
                                               const std::optional<RecoveryRecord>& last) {
  std::optional<Error> error;
  for (auto one = all.rbegin(); one != all.rend(); ++one) {
    if (one->abandoned) continue;
    // A recovery abandons everything newer than its checkpoint, so the others came later.
    if (last && one->sequence <= last->manifest) break;
    const Result<ManifestLines> manifest = store.ReadManifestLines(*one);
    if (manifest) return manifest->head.state.dynamic_k;
    if (!error) error = manifest.error();
  }
  if (last) return last->state.dynamic_k;
  if (error) return tl::unexpected<Error>(*std::move(error));
  return std::optional<DynamicK>();
}

}  // namespace shardwright::partial
