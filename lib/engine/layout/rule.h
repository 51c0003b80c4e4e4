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
  kReplicated,  ///< every tensor-parallel rank holds the whole
  kAverage,     ///< every rank holds a partial value; the logical value is their mean
  kDim,         ///< cut along one dimension
  kSub,         ///< a stack of sub-tensors along one dimension, each cut on its own
  kListed,      ///< as `cuts` lists, for that number of ranks only
  kUnknown,     ///< nobody says; only a layout with one rank can be made
};

/// How tensor parallelism cuts one parameter, whatever the number of ranks.
/// Source: Universal Checkpointing, the parameter patterns; docs/patterns.md.
struct SplitRule {
  Split split = Split::kReplicated;
  std::uint32_t dim = 0;  ///< kDim, kSub: dimension (of `view` for kSub)
  Shape view;             ///< kSub: reshape of the whole tensor; empty means its own shape
  std::vector<std::uint64_t> sub_sizes;  ///< kSub: sizes along `dim`, they add up to its extent
  /// Explicit widths, [sub-tensor][rank] (one sub-tensor for kDim); apply when their rank count is
  /// the layout's.
  std::vector<std::vector<std::uint64_t>> widths;
  /// Elements along `dim` that must stay together (a head); widths are multiples of it. Per
  /// sub-tensor for kSub, one entry for kDim; empty means 1. With `padded`: padded widths are.
  std::vector<std::uint64_t> granule;
  /// Extents that do not divide are cut with the first ranks one granule wider, as AutoTP does;
  /// else they are refused.
  bool uneven = false;
  /// Vocabulary: shards may hold rows beyond the whole tensor (padding to equal width), which
  /// belong to nobody.
  bool padded = false;
  std::vector<Cut> cuts;  ///< kListed: by rank
  std::string origin;  ///< who says so: "universal_checkpoint_info", "patterns/hf_llama.json rule
                       ///< 3", "inferred"

  friend bool operator==(const SplitRule&, const SplitRule&) = default;
};

/// The cut of rank `rank` of `ranks` under a rule.
/// \param shape  of the whole tensor
/// \error kUnsupported if the extents do not divide and the rule does not allow uneven widths, or
///        the rule cannot be carried over to this number of ranks; kBadInput if the rule does not
///        fit the shape
/// Pure.
Result<Cut> MakeCut(const SplitRule& rule, const Shape& shape, std::uint64_t ranks,
                    std::uint64_t rank);

/// The shape that a rank's shard is stored in: that of the cut, or for a rule with a view of
/// another rank the same elements in the tensor's own number of dimensions.
/// \error as MakeCut; kUnsupported if the view mixes dimensions of the tensor
/// Pure.
Result<Shape> ShardShape(const SplitRule& rule, const Shape& shape, std::uint64_t ranks,
                         std::uint64_t rank);

/// How many elements along the cut dimension every rank gets, [sub-tensor][rank]; real elements
/// only, padding not counted. Empty for rules that cut nothing, and for kListed.
/// \error as MakeCut
/// Pure.
Result<std::vector<std::vector<std::uint64_t>>> RuleWidths(const SplitRule& rule,
                                                           const Shape& shape, std::uint64_t ranks);

/// The whole tensor's shape, from the shapes of all ranks' shards under a rule. With `padded` the
/// padding rows are counted: the shards do not tell how many there are.
/// \error kBadInput if the shards disagree outside the cut dimension; names both shapes
/// Pure.
Result<Shape> WholeShape(const SplitRule& rule, const std::vector<Shape>& shards);

/// "replicated", "rows (dim 0)", "sub-tensors 32+16+16 along dim 0"; for --explain and messages.
std::string Explain(const SplitRule& rule);

}  // namespace shardwright::layout
