// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/deepspeed/common: code that DeepSpeed's native and universal formats
// share. flat.h has the arithmetic of flat buffers: order, padding, partitions, sub-groups,
// experts. topology.h defines DeepSpeed's layout, and target.h parses its specification
// ("dp=4,tp=2"). pipeline_stages.h assigns layers to stages. engine_state.h has the
// engine's state other than tensors, and import_foreign.h creates that state for checkpoints
// of other formats. universal_info.h reads and writes the split rules that checkpoints
// carry. All functions are pure except those of scan.h. Source: docs/formats/deepspeed.md.

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

/// Returns the flat order under `round_robin_gradients`. Position k of the buffer has parameter
/// result[k]: first all parameters with an index of 0 modulo `ranks`, then 1, and so on.
/// \pre ranks > 0
std::vector<std::uint32_t> RoundRobinOrder(std::size_t params, std::uint64_t ranks);

/// Returns the elements per rank of a ZeRO-1/2 or BF16_Optimizer group
/// of `elems` elements. The group is padded to a multiple of 2 · ranks.
/// \pre ranks > 0
/// \error kBadInput if the padded length does not fit in 64 bits
Result<std::uint64_t> PartitionElems(std::uint64_t elems, std::uint64_t ranks);

/// Returns the padding at the end of rank `rank`'s partition of a group of `elems` elements.
/// \pre partition = PartitionElems(elems, ranks), rank < ranks
std::uint64_t PartitionPadding(std::uint64_t elems, std::uint64_t partition, std::uint64_t rank);

/// Returns the elements of one parameter on every rank of a ZeRO-3 group, padding included.
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

/// Splits one parameter group into ZeRO-3 sub-groups. `shares` has the
/// parameters' elements per rank in flat order, and `limit` is sub_group_size.
/// \error kBadInput if the sum does not fit in 64 bits
Result<std::vector<SubGroup>> SubGroups(std::span<const std::uint64_t> shares, std::uint64_t limit);

/// Coordinates of a ZeRO rank on the expert mesh.
struct ExpertRank {
  std::uint64_t ep = 0;   ///< index of its group of experts
  std::uint64_t edp = 0;  ///< index among the ranks that store the same experts
};

/// Returns the expert coordinates of ZeRO rank `rank` of `ranks`.
/// `data_first` is the value of `use_data_before_expert_parallelism`.
/// \pre ep divides ranks, rank < ranks
ExpertRank ExpertRankOf(std::uint64_t rank, std::uint64_t ranks, std::uint64_t ep, bool data_first);

/// Inverse of ExpertRankOf.
std::uint64_t RankOfExpert(ExpertRank place, std::uint64_t ranks, std::uint64_t ep,
                           bool data_first);

/// Returns the name of an expert parameter, "<a>.deepspeed_experts.<id>.<b>",
/// with another id. Maps global ids to local ones and back.
/// \error kBadInput if the name has no such component
Result<std::string> WithExpertId(std::string_view name, std::uint64_t id);

/// Returns the id in an expert parameter's name.
/// \error kBadInput if the name has no such component or the number is out of range
Result<std::uint32_t> ExpertIdOf(std::string_view name);

/// Returns an expert's module: its parameter's name up to the id. Empty if the name has no id.
std::string ExpertModuleOf(std::string_view name);

/// Returns true for an expert of one of DeepSpeed's MoE layers. DeepSpeed treats experts
/// of other programs as ordinary parameters: every rank has them, or ZeRO partitions them.
bool IsNativeExpert(const Param& param);

/// Maximum elements of a MoE parameter group on one rank. DeepSpeed starts another group beyond it.
inline constexpr std::uint64_t kMoeGroupElems = 178'956'971;

/// Returns the stage boundaries of a pipeline (`stages` + 1 layer indices)
/// with equal layer counts, as `partition_method="uniform"` cuts them.
/// \pre stages > 0
std::vector<std::uint64_t> PartitionUniform(std::uint64_t layers, std::uint64_t stages);

/// Returns stage boundaries that balance `weights` (one per layer), as partition_method
/// "parameters" does: minimizes heaviest minus lightest stage, and ties prefer later cuts.
/// \pre stages > 0
std::vector<std::uint64_t> PartitionBalanced(std::span<const std::uint64_t> weights,
                                             std::uint64_t stages);

}  // namespace shardwright::checkpoints
