// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/name_maps/maps.h"
#include "checkpoints/tp_rules/patterns.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// The built-in map whose sides are what an optimizer has fused and what it is of.
inline constexpr std::string_view kFusedMap = "torchtitan_qkv";
inline constexpr std::string_view kFusedSplit = "split";
/// In place of one of its sides: the model split and its optimizer fused, as torchtitan saves them.
inline constexpr std::string_view kFusedSaved = "saved";

/// A checkpoint of which the optimizer's part has gone through kFusedMap.
struct Unfused {
  Checkpoint checkpoint;
  ModelSizes sizes;  ///< that were used
};

/// Takes apart what the optimizer has fused: every parameter of the model gets its own states.
/// \pre source.fused is not empty
/// \error as ApplyMap; kUnsupported  a fused parameter that no rule takes apart; kBadInput  shapes
///        that are not those of the model
/// Pure.
Result<Unfused> SplitFused(Checkpoint source, const ModelSizes& sizes, const Patterns& patterns);

/// The reverse: query, key and value have their states as one; the model stays as it is.
/// \error as ApplyMap; kUnsupported  there is nothing to fuse
/// Pure.
Result<Unfused> FuseOptimizer(Checkpoint source, const ModelSizes& sizes, const Patterns& patterns);

}  // namespace shardwright::checkpoints
