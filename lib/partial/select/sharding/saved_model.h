// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "partial/select/sharding/sharding.h"
#include "partial/select/sizes.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// The bytes of a model as its ranks share them. ZeRO stage 0: everything is cut. 1, 2: the
/// optimizer's state is split already, weights are cut. 3: everything is split. What is kept of all
/// experts is split in any case.
/// \error kUsage  another ZeRO stage; kMismatch  a map of other experts; kBadInput  overflow
/// Pure. Source: docs/pec-planning.md section 7.
Result<SavedModel> SavedModelOf(const ModelBytes& model, const Keep& keep, ExpertMap map,
                                SaveRanks ranks, std::uint32_t zero_stage);

}  // namespace shardwright::partial
