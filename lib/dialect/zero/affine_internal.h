#pragma once

#include <span>

#include "base/result.h"
#include "dialect/zero/universal_info.h"
#include "format/pickle/node.h"
#include "layout/cut.h"

namespace shardwright::dialect {

/// The rule that one parameter's entry of an affine_map (format version 1) amounts to: replicated,
/// a cut along one dimension, a stack of sub-tensors, or boxes listed by rank.
/// \param shards shapes of the shards that the checkpoint holds, by tensor-parallel rank
/// \error kBadInput     not an entry, or it disagrees with the shards; kUnsupported for scaled or
///        partly replicated pieces
/// Pure.
Result<Ruled> RuleFromAffine(const pickle::Node* entry, std::span<const Shape> shards);

/// The entry of an affine_map for the cuts of all ranks.
/// \pre  the cuts are of a tensor of this shape, seen without another view and without padding
const pickle::Node* AffineFromCuts(pickle::Arena& arena, const Shape& shape,
                                   std::span<const layout::Cut> cuts, bool replicated);

}  // namespace shardwright::dialect
