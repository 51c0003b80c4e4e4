// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/deepspeed/common/topology.h"
#include "checkpoints/model/checkpoint.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Layers [first, last) of one stage.
using StageRange = std::pair<std::uint64_t, std::uint64_t>;

/// Parses "0-3,4-7": inclusive layer ranges, one per stage.
/// Each range starts after the end of the previous one.
/// \error kUsage  the text has another form
/// Pure.
Result<std::vector<StageRange>> ParseStageRanges(std::string_view text);

/// Returns the layers with state in every stage of a target.
/// \param method  "uniform", "parameters", "type" (DeepSpeed's "type:REGEX", for an expression that
///        matches the layers with the most frequent parameters), ranges, or empty: the method of
///        the source's stages, which is "type" for Megatron-DeepSpeed if it fits
/// \error kUsage  the ranges are not one per stage or omit a layer, or `method` is empty,
///        the source does not record its method and the methods yield different stages
/// \error kInfeasible  a stage would have no layer with state, or with "type" none of those layers
/// Pure. Source: docs/formats/deepspeed.md, "Pipeline".
Result<std::vector<std::vector<std::uint32_t>>> ChooseStages(std::string_view method,
                                                             const Topology& target,
                                                             const Checkpoint& source);

}  // namespace shardwright::checkpoints
