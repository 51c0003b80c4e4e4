// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/layout/cut.h"
#include "engine/layout/rule.h"
#include "support/base/result.h"

namespace shardwright::layout {

/// Cuts each box along `dim` to the part of `rank`, one box for each sub-tensor, and sets the
/// extent of the shard.
/// \param widths  from RuleWidths: [sub-tensor][rank]
/// \pre every box and `shard` have the whole extent along `dim`
void CutBoxes(std::uint32_t dim, const std::vector<std::vector<std::uint64_t>>& widths,
              std::uint64_t rank, std::vector<Box>* boxes, Shape* shard);

// MakeCut, WholeShape and Explain of a kMesh rule.
Result<Cut> MakeMeshCut(const SplitRule& rule, const Shape& shape, std::uint64_t ranks,
                        std::uint64_t rank);
Result<Shape> WholeOfMesh(const SplitRule& rule, const std::vector<Shape>& shards);
std::string ExplainMesh(const SplitRule& rule);

}  // namespace shardwright::layout
