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

/// What a checkpoint writes of a module.
struct ModuleBlobs {
  ModuleId id;
  bool selected = false;                           ///< an expert that is saved whole
  std::array<std::uint64_t, kComponents> bytes{};  ///< of each blob; 0: none
};

/// Who writes which blob.
struct BlobWriters {
  std::vector<std::array<std::uint32_t, kComponents>> rank;  ///< [module][component]
  std::vector<std::uint64_t> rank_bytes;                     ///< [rank]
  std::uint64_t bottleneck = 0;                              ///< largest of rank_bytes
  /// max(ceil(bytes of all / ranks), largest blob): no cut into whole blobs does better.
  std::uint64_t bound = 0;
  /// Expert-parallel ranks by which the selected experts were cut; 0: experts were shared as all
  /// modules are.
  std::uint32_t ep = 0;
};

/// Says which rank writes which blob of a checkpoint, where all ranks can read every byte of it.
/// Two cuts are made: one by PlanSave, where the expert-parallel ranks divide `ranks`, in which a
/// module stays together unless it is larger than an equal share, and one that gives blob after
/// blob, largest first, to the rank with least. The smaller bottleneck counts, the first cut where
/// they are equal; so the bottleneck is at most 4/3 of the best.
/// \param map  of the experts; without any where the model has none
/// \error as PlanSave
/// Pure. Source: docs/pec-planning.md section 7.5.
Result<BlobWriters> AssignBlobs(const ExpertMap& map, std::span<const ModuleBlobs> modules,
                                std::uint32_t ranks);

}  // namespace shardwright::partial
