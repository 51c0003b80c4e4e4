// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "checkpoints/megatron/megatron.h"
#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/format.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

// Megatron-LM resumes another trainer's checkpoint if it finds arguments, parameter groups and a
// schedule that agree with its own. Source: load_checkpoint in megatron/training/checkpointing.py,
// _filter_and_reorder_param_groups in megatron/core/optimizer/optimizer.py and
// megatron/core/optimizer_param_scheduler.py.

/// Returns what Megatron-LM needs, from --target or as the source has it. Nothing if neither has
/// it.
/// \error kUsage  a key is missing; kUnsupported  Megatron-LM cannot resume the source
/// Pure.
Result<std::optional<NewRun>> NewRunOf(const TargetSpec& spec, const Checkpoint& source);

/// Returns true for a checkpoint that Megatron wrote, not Shardwright from that of another trainer.
bool IsOfMegatron(const Checkpoint& source);

inline constexpr const char* kHeadsFact = "num_attention_heads";
inline constexpr const char* kGroupsFact = "num_key_value_heads";

/// Returns a size of the model that a map or the checkpoint states; 0: neither does.
/// \param key  in Checkpoint::facts
std::uint64_t KnownSize(const Checkpoint& source, const char* key);

/// Returns the width of the embedding; 0: the model has none of that name.
std::uint64_t HiddenSize(const Checkpoint& source);

}  // namespace shardwright::checkpoints::megatron
