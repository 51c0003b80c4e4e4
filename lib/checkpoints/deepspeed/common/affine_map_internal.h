// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "checkpoints/deepspeed/common/universal_info.h"
#include "engine/layout/cut.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Converts a parameter's entry of an affine_map (format version 1) to a rule:
/// replicated, cut along one dimension or several, a stack of sub-tensors, or boxes listed
/// by rank. The map may describe a view of the parameter, as AutoTP does for
/// layers with a `shape`. The returned rule applies to the stored parameter.
/// \param shards  shapes of the shards in the checkpoint, by tensor-parallel rank
/// \error kBadInput  not an entry, or it contradicts the shards; kUnsupported for scaled
///        pieces, for ranks with shards that share some pieces but not all, and for blocks of a
///        view that no rule can describe
/// Pure.
Result<Ruled> RuleFromAffine(const pickle::Node* entry, std::span<const Shape> shards);

/// Returns the entry of an affine_map for the cuts of all ranks, in the shape of the cuts' view.
/// \param rule  of which these are the cuts; shows which ranks have the same elements
/// \pre  there is at least one cut, and all have the same view, without padding
const pickle::Node* AffineFromCuts(pickle::Arena& arena, std::span<const layout::Cut> cuts,
                                   const layout::SplitRule& rule);

}  // namespace shardwright::checkpoints
