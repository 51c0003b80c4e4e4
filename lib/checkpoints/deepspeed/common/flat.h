// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/deepspeed/common: what native files and universal folders of DeepSpeed share.
// flat.h is the arithmetic of flat buffers: order, padding, partitions, sub-groups, experts.
// topology.h is DeepSpeed's layout, target.h the words that name one ("dp=4,tp=2"),
// pipeline_stages.h says which layers a stage holds. engine_state.h is what the engine keeps beside
// tensors, and adopt.h makes it for checkpoints of other formats. universal_info.h reads and
// writes the split rules that checkpoints carry. All of it is pure but scan. Source:
// docs/formats/deepspeed.md.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Flat order under `round_robin_gradients`: position k of the buffer holds parameter result[k];
/// all parameters whose index is 0 modulo `ranks` come first, then 1, and so on.
/// \pre ranks > 0
std::vector<std::uint32_t> RoundRobinOrder(std::size_t params, std::uint64_t ranks);

/// Elements per rank of a ZeRO-1/2 or BF16_Optimizer group of `elems` elements: the group is padded
/// to a multiple of 2 · ranks.
/// \pre ranks > 0
/// \error kBadInput if the padded length does not fit in 64 bits
Result<std::uint64_t> PartitionElems(std::uint64_t elems, std::uint64_t ranks);

/// Padding inside the partition of rank `rank` of a group of `elems` elements (0 … partition).
/// \pre partition = PartitionElems(elems, ranks), rank < ranks
std::uint64_t PartitionPadding(std::uint64_t elems, std::uint64_t partition, std::uint64_t rank);

/// Elements of one parameter that every rank of a ZeRO-3 group keeps, padding included.
/// \pre ranks > 0
constexpr std::uint64_t ShareElems(std::uint64_t elems, std::uint64_t ranks) {
  return elems / ranks + (elems % ranks != 0 ? 1 : 0);
}

/// A half-open range of parameters of a group.
struct SubGroup {
  std::size_t first = 0;
  std::size_t last = 0;
  std::uint64_t elems = 0;  ///< per rank
};

/// ZeRO-3 sub-groups of one parameter group: `shares` are the parameters' elements per rank in flat
/// order, `limit` is sub_group_size.
/// \error kBadInput if the sum does not fit in 64 bits
Result<std::vector<SubGroup>> SubGroups(std::span<const std::uint64_t> shares, std::uint64_t limit);

/// Where a ZeRO rank stands on the expert mesh.
struct ExpertRank {
  std::uint64_t ep = 0;   ///< which experts it holds
  std::uint64_t edp = 0;  ///< its place among the ranks that hold the same experts
};

/// Expert coordinates of ZeRO rank `rank` of `ranks`; `data_first` is
/// `use_data_before_expert_parallelism`.
/// \pre ep divides ranks, rank < ranks
ExpertRank ExpertRankOf(std::uint64_t rank, std::uint64_t ranks, std::uint64_t ep, bool data_first);

/// The inverse of ExpertRankOf.
std::uint64_t RankOfExpert(ExpertRank place, std::uint64_t ranks, std::uint64_t ep,
                           bool data_first);

/// Renames an expert parameter: "<a>.deepspeed_experts.<id>.<b>" with another id (global to local
/// and back).
/// \error kBadInput if the name holds no such component
Result<std::string> WithExpertId(std::string_view name, std::uint64_t id);

/// The id in an expert parameter's name.
/// \error kBadInput if the name holds no such component or the number is out of range
Result<std::uint32_t> ExpertIdOf(std::string_view name);

/// The module of an expert: its parameter's name up to the id; empty if the name holds no id.
std::string ExpertModuleOf(std::string_view name);

/// True for an expert of one of DeepSpeed's MoE layers. Experts that another program has are
/// parameters like others to it, held by every rank or shared out by ZeRO.
bool IsNativeExpert(const Param& param);

/// Most elements of a MoE parameter group of one rank; DeepSpeed starts another group beyond it.
inline constexpr std::uint64_t kMoeGroupElems = 178'956'971;

/// Stage boundaries of a pipeline (`stages` + 1 layer indices) with equal layer counts, as
/// `partition_method="uniform"` cuts them.
/// \pre stages > 0
std::vector<std::uint64_t> PartitionUniform(std::uint64_t layers, std::uint64_t stages);

/// Stage boundaries that balance `weights` (one per layer), as `partition_method="parameters"` cuts
/// them: the least difference between the heaviest and the lightest stage, later cuts preferred.
/// \pre stages > 0
std::vector<std::uint64_t> PartitionBalanced(std::span<const std::uint64_t> weights,
                                             std::uint64_t stages);

}  // namespace shardwright::checkpoints
