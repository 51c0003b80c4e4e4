// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "partial/select/sharding/sharding.h"
#include "support/base/result.h"
#include "support/base/stop.h"

namespace shardwright::partial {

/// Cost of a checkpoint with K experts per layer, for every K: the bytes of the
/// rank that saves most, or of the node, matching the unit of the bandwidths.
struct BottleneckTable {
  std::vector<std::uint64_t> bytes;  ///< [K - 1], K = 1 .. N
};

/// Computes the largest share of sequential selections: for each K, of the first `checkpoints`
/// checkpoints (with equal experts, PhaseCount(K, ep) of them suffice). Returns exactly what
/// PlannedBottleneckByK returns. Makes no plans if checkpoints differ only by a permutation of
/// equal ranks. A K then costs at most as many steps as there are ranks and non-expert pieces.
/// \param ranks_per_node  consecutive data-parallel ranks that share a link; 1: one link per rank
/// \error kUsage  0 checkpoints or ranks per node; kStopped; as PlanSave
/// Pure but for `stop`. Source: docs/pec-planning.md section 8.1.
Result<BottleneckTable> BottleneckByK(const SavedModel& model, std::uint32_t checkpoints,
                                      std::uint32_t ranks_per_node, const StopCheck& stop = {});

/// Computes the same table from a plan of every checkpoint of every K, for any
/// model. The reference for BottleneckByK, which needs it for unequal experts.
/// \error as BottleneckByK
/// Pure but for `stop`. Source: docs/pec-planning.md section 8.1.
Result<BottleneckTable> PlannedBottleneckByK(const SavedModel& model, std::uint32_t checkpoints,
                                             std::uint32_t ranks_per_node,
                                             const StopCheck& stop = {});

}  // namespace shardwright::partial
