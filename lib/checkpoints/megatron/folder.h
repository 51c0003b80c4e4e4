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

/// A folder mp_rank_TT[_NNN[_NNN]]. Only the arguments of the run
/// determine if a single number after TT is a stage or an expert rank.
struct Folder {
  std::uint64_t tensor = 0;
  std::vector<std::uint64_t> more;  ///< stage and expert rank, or one of them
};

/// Parses a folder name. Returns nothing for other names.
std::optional<Folder> ParseFolder(std::string_view name);

/// Returns the name of a rank's folder.
std::string FolderName(const Args& args, std::uint64_t t, std::uint64_t p, std::uint64_t e);

}  // namespace shardwright::checkpoints::megatron
