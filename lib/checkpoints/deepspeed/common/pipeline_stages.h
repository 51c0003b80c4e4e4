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

/// Parses "0-3,4-7": inclusive layer ranges, one per stage, each starting where the one before
/// ended.
/// \error kUsage
/// Pure.
Result<std::vector<StageRange>> ParseStageRanges(std::string_view text);

/// The layers with state of every stage of a target.
/// \param method  "uniform", "parameters", ranges, or empty: as the source's stages were made
/// \error kUsage       if ranges are not one per stage or leave out a layer, or if the source does
///                     not tell which method made its stages and the methods disagree
/// \error kInfeasible  if a stage would hold no layer with state
/// Pure. Source: docs/formats/deepspeed.md, "Pipeline".
Result<std::vector<std::vector<std::uint32_t>>> ChooseStages(std::string_view method,
                                                             const Topology& target,
                                                             const Checkpoint& source);

}  // namespace shardwright::checkpoints
