// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/layout/cut.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::layout {

enum class Split : std::uint8_t {
  kReplicated,  ///< every tensor-parallel rank has the whole tensor
  kAverage,     ///< every rank has a partial value; the logical value is their mean
  kDim,         ///< cut along one dimension
  kSub,         ///< a stack of sub-tensors along one dimension, each cut on its own
  kMesh,        ///< the ranks form a mesh, and each axis of it cuts its own dimension
  kListed,      ///< as `cuts` lists, for that number of ranks only
  kUnknown,     ///< no known rule; only layouts with one rank are possible
};

/// Describes how tensor parallelism cuts one parameter, for any number of ranks.
/// Source: Universal Checkpointing, the parameter patterns; docs/patterns.md.
struct SplitRule {
  Split split = Split::kReplicated;
  std::uint32_t dim = 0;  ///< kDim, kSub: dimension (of `view` for kSub)
  Shape view;             ///< kSub: reshape of the whole tensor; empty means its own shape
  std::vector<std::uint64_t> sub_sizes;  ///< kSub: sizes along `dim`, they add up to its extent
  /// Explicit widths, [sub-tensor][rank] (one sub-tensor for
  /// kDim). Used if the layout has as many ranks as they list.
  std::vector<std::vector<std::uint64_t>> widths;
  /// Elements along `dim` that must stay together (a head); divides all widths, with `padded`
  /// the padded ones. One entry per sub-tensor for kSub, one for kDim; empty means 1.
  std::vector<std::uint64_t> granule;
  /// If an extent is not divisible, the first ranks get one more
  /// granule, as in AutoTP. If false, MakeCut fails instead.
  bool uneven = false;
  /// Vocabulary: shards may have padding rows after the rows of the
  /// tensor, up to equal widths. The padding is not part of the tensor.
  bool padded = false;
  /// kMesh: the rule of each axis, the outermost first: kReplicated, kDim or kSub, the last two
  /// without `view` and `padded`. Tensor-parallel ranks are numbered row-major in the mesh.
  /// See mesh_rule.h.
  std::vector<SplitRule> axes;
  /// For a rule in `axes`: number of ranks along the axis. 0: the ranks that other axes leave.
  std::uint64_t axis_ranks = 0;
  std::vector<Cut> cuts;  ///< kListed: by rank
  std::string origin;     ///< source of the rule: "universal_checkpoint_info",
                          ///< "patterns/hf_llama.json rule 3", "inferred"

  friend bool operator==(const SplitRule&, const SplitRule&) = default;
};

/// Returns the first rank that has the same elements as `rank`. This is `rank` itself for rules
/// without copies, and for kAverage, because each of its ranks has its own values.
/// \pre MakeCut succeeds for these ranks
/// Pure.
std::uint64_t FirstCopy(const SplitRule& rule, std::uint64_t ranks, std::uint64_t rank);

/// Returns the cut of rank `rank` of `ranks` under a rule.
/// \param shape  of the whole tensor
/// \error kUnsupported  the extents are not divisible and the rule does
///        not allow uneven widths, or the rule does not apply to this
///        number of ranks; kBadInput  the rule does not fit the shape
/// Pure.
Result<Cut> MakeCut(const SplitRule& rule, const Shape& shape, std::uint64_t ranks,
                    std::uint64_t rank);

/// Returns the shape in which a rank's shard is stored: the shape of the cut, or
/// the tensor's own number of dimensions if the rule's view has a different one.
/// \error as MakeCut; kUnsupported  the view mixes dimensions of the tensor
/// Pure.
Result<Shape> ShardShape(const SplitRule& rule, const Shape& shape, std::uint64_t ranks,
                         std::uint64_t rank);

/// Returns the number of elements along the cut dimension, [sub-tensor][rank],
/// without padding. Empty for rules that do not cut, for kMesh and for kListed.
/// \error as MakeCut
/// Pure.
Result<std::vector<std::vector<std::uint64_t>>> RuleWidths(const SplitRule& rule,
                                                           const Shape& shape, std::uint64_t ranks);

/// Returns the whole tensor's shape, computed from the shapes of all ranks' shards.
/// With `padded` it includes padding rows, because the shards do not show their number.
/// \error kBadInput  the shards differ outside the cut dimension, or do not form the mesh; names
///        both shapes. kUnsupported  as MeshSizes
/// Pure.
Result<Shape> WholeShape(const SplitRule& rule, const std::vector<Shape>& shards);

/// Returns "replicated", "rows (dim 0)", "sub-tensors 32+16+16 along dim 0", "mesh 2 x 2: rows
/// (dim 0), columns (dim 1)"; for messages.
std::string Explain(const SplitRule& rule);

}  // namespace shardwright::layout
