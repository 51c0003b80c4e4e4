// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/megatron/args.h"

namespace shardwright::checkpoints::megatron {

inline constexpr std::string_view kModelFile = "model_optim_rng.pt";
inline constexpr std::string_view kOptimizerFile = "distrib_optim.pt";
inline constexpr std::string_view kLayerWisePrefix = "layer_wise_optimizer_";
inline constexpr std::string_view kCommonFile = "common.pt";

/// A folder mp_rank_TT[_NNN[_NNN]]: whether a number is of a stage or of an expert rank the
/// arguments of the run tell.
struct Folder {
  std::uint64_t tensor = 0;
  std::vector<std::uint64_t> more;  ///< stage, expert rank, or one of them
};

/// Nothing for another name.
std::optional<Folder> ParseFolder(std::string_view name);

/// The folder of a rank.
std::string FolderName(const Args& args, std::uint64_t t, std::uint64_t p, std::uint64_t e);

}  // namespace shardwright::checkpoints::megatron
