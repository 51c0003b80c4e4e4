// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoints/deepspeed/common/topology.h"
#include "checkpoints/model/checkpoint.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::deepspeed {

/// Number of experts of a MoE layer (0 if there is none of that id). Pure.
std::uint64_t ExpertsOfLayer(std::span<const Param> params, std::uint32_t layer);

/// The parameters of an expert group by expert-parallel rank, each in the order of its flat buffer
/// without round robin.
/// \param members  of the group, in canonical order
/// \error kInfeasible if `ep` does not divide a layer's experts; kUnsupported if the ranks' parts
///        differ in names or shapes, so that they could not share a group; kBadInput if a member is
///        no expert parameter
/// Pure.
Result<std::vector<std::vector<std::uint32_t>>> SplitExperts(std::span<const Param> params,
                                                             std::span<const std::uint32_t> members,
                                                             std::uint64_t ep);

/// The optimizer groups of a target: dense ones as they are; expert groups that were split because
/// of their size are put together and split again for the target's expert parallelism.
/// \error kInfeasible if `ep` does not divide a layer's experts
/// Pure. Source: docs/formats/deepspeed.md, "Expert groups".
Result<std::vector<Group>> RegroupExperts(const Checkpoint& source, const Topology& topology);

}  // namespace shardwright::checkpoints::deepspeed
