// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "partial/select/selection.h"
#include "partial/select/types.h"
#include "partial/store/modules.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Blobs that a checkpoint writes for a module.
struct ModuleBlobs {
  ModuleId id;
  bool selected = false;                           ///< an expert that is saved with all components
  std::array<std::uint64_t, kComponents> bytes{};  ///< of each blob; 0: none
};

/// Assignment of blobs to the ranks that write them.
struct BlobWriters {
  std::vector<std::array<std::uint32_t, kComponents>> rank;  ///< [module][component]
  std::vector<std::uint64_t> rank_bytes;                     ///< [rank]
  std::uint64_t bottleneck = 0;                              ///< largest of rank_bytes
  /// max(ceil(all bytes / ranks), largest blob), a lower bound for any cut into whole blobs.
  std::uint64_t bound = 0;
  /// Number of expert-parallel ranks by which the selected experts
  /// were divided; 0: experts were divided like all other modules.
  std::uint32_t ep = 0;
};

/// Assigns the blobs of a checkpoint to ranks that can all read every byte of it. Computes
/// two cuts. PlanSave makes the first one if the expert-parallel ranks divide `ranks`; it
/// keeps a module together unless it is larger than an equal share. The second one gives
/// blob after blob, largest first, to the rank with the fewest bytes. The smaller
/// bottleneck wins, or else the first cut. The bottleneck is at most 4/3 of the optimum.
/// \param map  of the experts; empty if the model has no experts
/// \error as PlanSave
/// Pure. Source: docs/pec-planning.md section 7.5.
Result<BlobWriters> AssignBlobs(const ExpertMap& map, std::span<const ModuleBlobs> modules,
                                std::uint32_t ranks);

}  // namespace shardwright::partial
