// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/name_maps/maps.h"

namespace shardwright::checkpoints {

/// Returns the model config's values that follow from the sizes of a map. Inverts
/// ModelMap::SizesIn.
/// Pure.
ModelConfig ConfigOf(const ModelMap& map, const ModelSizes& sizes);

}  // namespace shardwright::checkpoints
