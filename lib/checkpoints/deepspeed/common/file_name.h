// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace shardwright::checkpoints {

/// Kinds of files in a DeepSpeed tag folder, distinguished by name.
enum class FileRole : std::uint8_t {
  kModel,        ///< mp_rank_XX_model_states.pt
  kModelZero3,   ///< zero_pp_rank_D_mp_rank_XX_model_states.pt
  kShard,        ///< [bf16_|fp16_]zero_pp_rank_D_mp_rank_XX_optim_states.pt
  kLayer,        ///< layer_NN[-axes]-model_states.pt
  kExpert,       ///< [layer_L_]expert_E_mp_rank_XX_model_states.pt
  kExpertOptim,  ///< expp_rank_E_mp_rank_XX_optim_states.pt
};

struct FileName {
  FileRole role = FileRole::kModel;
  std::uint64_t rank = 0;    ///< kModelZero3, kShard: in the ZeRO group; kExpertOptim: expert rank
  std::uint64_t mp = 0;      ///< for all roles except kLayer
  std::uint64_t layer = 0;   ///< kLayer: pipeline layer; kExpert: MoE layer
  std::uint64_t expert = 0;  ///< kExpert: global id
  std::string prefix;        ///< kShard: "", "bf16_" or "fp16_"
  std::string axes;          ///< kLayer: "model_01", or empty
  bool old_style = false;    ///< kShard without the second underscore; kExpert without a layer
};

/// Matches a base name against the names that DeepSpeed writes. Returns nothing for other names.
/// Pure. Source: docs/formats/deepspeed.md, "File names".
std::optional<FileName> ParseFileName(std::string_view name);

}  // namespace shardwright::checkpoints
