// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoints/deepspeed/common/topology.h"
#include "checkpoints/model/checkpoint.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::deepspeed {

/// Returns the number of experts in a MoE layer, or 0 if no layer has that id. Pure.
std::uint64_t ExpertsOfLayer(std::span<const Param> params, std::uint32_t layer);

/// Splits the parameters of an expert group by expert-parallel
/// rank, each in the order of its flat buffer without round robin.
/// \param members  parameters of the group, in canonical order
/// \error kInfeasible if `ep` does not divide a layer's experts; kUnsupported
///        if the ranks' parts have different names or shapes, so that they
///        cannot share a group; kBadInput if a member is not an expert parameter
/// Pure.
Result<std::vector<std::vector<std::uint32_t>>> SplitExperts(std::span<const Param> params,
                                                             std::span<const std::uint32_t> members,
                                                             std::uint64_t ep);

/// Returns the optimizer groups of a target. Dense groups stay unchanged. Expert groups that
/// DeepSpeed split by size are merged and split again for the target's expert parallelism.
/// \error kInfeasible if `ep` does not divide a layer's experts
/// Pure. Source: docs/formats/deepspeed.md, "Expert groups".
Result<std::vector<Group>> RegroupExperts(const Checkpoint& source, const Topology& topology);

}  // namespace shardwright::checkpoints::deepspeed
