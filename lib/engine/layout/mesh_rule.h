// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/layout/cut.h"
#include "engine/layout/mesh_cut.h"
#include "engine/layout/rule.h"
#include "support/base/result.h"

namespace shardwright::layout {

// Rules of kind Split::kMesh, which split a parameter along several dimensions, each by its own
// axis of a mesh of tensor-parallel ranks. MakeCut, WholeShape and Explain accept them too.
// Source: Universal Checkpointing, Figure 3: Shard-Hy.

/// Checks the axes of a kMesh rule: at least two, one of which cuts; at most one without a number
/// of ranks; no dimension cut twice; no other rules than SplitRule::axes lists.
/// \error kBadInput  names the axis, counted from 1
/// Pure.
Status CheckMesh(const SplitRule& rule);

/// Returns the number of ranks along each axis of a kMesh rule, the outermost first.
/// \pre CheckMesh(rule) passes
/// \error kUnsupported  `ranks` ranks do not form the mesh; names both
/// Pure.
Result<std::vector<std::uint64_t>> MeshSizes(const SplitRule& rule, std::uint64_t ranks);

/// Returns the kMesh rule of which these are the cuts, by rank; nothing if there is none. Each axis
/// has a number of ranks, so the rule serves this number of ranks and one.
/// \pre !cuts.empty(), and all have the same view
/// Pure.
std::optional<SplitRule> MeshOfCuts(std::span<const Cut> cuts);

/// Returns the rule that placements on the mesh of tensor-parallel ranks express: kReplicated, kDim
/// or kMesh. Nothing for strided shards, and if axes that are not adjacent split one dimension.
/// \pre sizes.size() == splits.size()
/// Pure.
std::optional<SplitRule> RuleOfSplits(std::span<const std::uint64_t> sizes,
                                      std::span<const MeshSplit> splits);

/// Returns the placements of a rule on a mesh of tensor-parallel ranks. Inverse of RuleOfSplits.
/// \error kUnsupported  no placements can express the rule, or its mesh has other sizes; names both
/// Pure.
Result<std::vector<MeshSplit>> SplitsOfRule(const SplitRule& rule,
                                            std::span<const std::uint64_t> sizes);

}  // namespace shardwright::layout
