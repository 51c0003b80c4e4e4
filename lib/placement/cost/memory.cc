// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <nlohmann/json.hpp>

#include "placement/cost/cost.h"
#include "support/base/checked.h"

namespace shardwright::placement {
namespace {

/// Replicas on a GPU.
struct Counts {
  std::uint64_t state = 0;        ///< with optimizer state, over all layers
  std::uint64_t copies = 0;       ///< for one iteration, over all layers
  std::uint64_t most_copies = 0;  ///< for one iteration, of the layer with the most
};

/// Returns the replicas of a layer on a GPU that it does not own.
std::uint64_t CopiesOf(const Placement& placement, const Placement& owners, std::uint32_t layer,
                       std::uint32_t device) {
  const auto owned = owners.slots(layer, device);
  std::vector<std::int32_t> sorted(owned.begin(), owned.end());
  std::sort(sorted.begin(), sorted.end());
  std::uint64_t copies = 0;
  for (const std::int32_t e : placement.slots(layer, device)) {
    if (e != kNoExpert && !std::binary_search(sorted.begin(), sorted.end(), e)) ++copies;
  }
  return copies;
}

Counts CountsOf(const Placement& placement, const Placement* owners, std::uint32_t device) {
  const Placement& state = owners != nullptr ? *owners : placement;
  Counts counts;
  for (std::uint32_t l = 0; l < placement.layers; ++l) {
    for (const std::int32_t e : state.slots(l, device)) counts.state += e != kNoExpert ? 1 : 0;
    if (owners == nullptr) continue;
    const std::uint64_t copies = CopiesOf(placement, *owners, l, device);
    counts.copies += copies;
    counts.most_copies = std::max(counts.most_copies, copies);
  }
  return counts;
}

/// \param copies  number of copies that have weights at the same time
GpuMemory MemoryOf(const Counts& counts, std::uint64_t copies, const Cluster& cluster) {
  const std::uint64_t weights = cluster.param_bytes;
  const std::uint64_t optimizer = cluster.expert_bytes - std::min(cluster.expert_bytes, weights);
  return {counts.state * optimizer, (counts.state + counts.most_copies) * weights,
          (counts.state + copies) * weights};
}

void KeepLarger(const GpuMemory& other, GpuMemory* memory) {
  if (other.bytes() > memory->bytes()) *memory = other;
}

}  // namespace

Result<PlanMemory> MemoryOf(const Placement& placement, const Placement* owners,
                            const Cluster& cluster) {
  const std::uint64_t slots = placement.slot_count() + std::uint64_t{1};
  const auto largest = [&]() -> Result<std::uint64_t> {
    SW_TRY_ASSIGN(const std::uint64_t both, CheckedMul(cluster.param_bytes, 2));
    SW_TRY_ASSIGN(const std::uint64_t replica, CheckedAdd(cluster.expert_bytes, both));
    SW_TRY_ASSIGN(const std::uint64_t layer, CheckedMul(replica, slots));
    return CheckedMul(layer, std::uint64_t{2} * placement.layers);
  }();
  if (!largest) {
    return Fail(Errc::kLimit, "memory of a plan with experts of ", cluster.expert_bytes,
                " bytes: ", largest.error().message);
  }
  PlanMemory memory;
  if (owners != nullptr) memory.rematerialized.emplace();
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    const Counts counts = CountsOf(placement, owners, d);
    KeepLarger(MemoryOf(counts, counts.copies, cluster), &memory.gpu);
    if (owners != nullptr) {
      KeepLarger(MemoryOf(counts, counts.most_copies, cluster), &*memory.rematerialized);
    }
  }
  return memory;
}

nlohmann::json MemoryJson(const GpuMemory& memory) {
  return {{"bytes", memory.bytes()},
          {"weight_bytes", memory.weights},
          {"gradient_bytes", memory.gradients},
          {"optimizer_bytes", memory.optimizer}};
}

}  // namespace shardwright::placement
