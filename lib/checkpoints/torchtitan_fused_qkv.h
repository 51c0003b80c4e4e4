// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/name_maps/maps.h"
#include "checkpoints/tp_rules/patterns.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Names the built-in map between fused query-key-value states and the model's split projections.
inline constexpr std::string_view kFusedMap = "torchtitan_qkv";
inline constexpr std::string_view kFusedSplit = "split";
/// Stands for a naming scheme of the map: split model, fused optimizer, as torchtitan saves them.
inline constexpr std::string_view kFusedSaved = "saved";

/// A checkpoint and the sizes that kFusedMap used to convert its optimizer state.
struct Unfused {
  Checkpoint checkpoint;
  ModelSizes sizes;  ///< the sizes that the conversion used
};

/// Splits fused optimizer states so that every parameter of the model has states of its own.
/// \pre source.fused is not empty
/// \error as ApplyMap; kUnsupported  no rule splits a fused
///        parameter; kBadInput  shapes that do not match the model's
/// Pure.
Result<Unfused> SplitFused(Checkpoint source, const ModelSizes& sizes, const Patterns& patterns);

/// Removes the fused states, for targets that have weights alone.
/// Pure.
Checkpoint WithoutFused(Checkpoint source);

/// Inverse of SplitFused: query, key and value share one state. The model itself is unchanged.
/// \error as ApplyMap; kUnsupported  the checkpoint has no projections to fuse
/// Pure.
Result<Unfused> FuseOptimizer(Checkpoint source, const ModelSizes& sizes, const Patterns& patterns);

}  // namespace shardwright::checkpoints
