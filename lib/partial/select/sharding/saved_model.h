// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "partial/select/sharding/sharding.h"
#include "partial/select/sizes.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Describes how the ranks of a run share the bytes of a model. ZeRO stage 0: PlanSave
/// divides everything. 1, 2: ZeRO has already sharded the optimizer state, PlanSave divides
/// the weights. 3: everything is sharded. Kept components are sharded at every stage.
/// \error kUsage  unknown ZeRO stage; kMismatch  map of other experts; kBadInput  overflow
/// Pure. Source: docs/pec-planning.md section 7.
Result<SavedModel> SavedModelOf(const ModelBytes& model, const Keep& keep, ExpertMap map,
                                SaveRanks ranks, std::uint32_t zero_stage);

}  // namespace shardwright::partial
