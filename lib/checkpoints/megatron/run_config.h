// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "checkpoints/megatron/args.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// Configuration of a Megatron Bridge run, in the folder of the checkpoint.
inline constexpr std::string_view kRunConfig = "run_config.yaml";
/// Progress of such a run: steps and samples.
inline constexpr std::string_view kTrainState = "train_state.pt";
/// Configuration of a NeMo 2.0 model, next to the folder "weights" with the checkpoint.
inline constexpr std::string_view kNemoFolder = "weights";
inline constexpr std::string_view kNemoConfig = "context/model.yaml";

/// Returns the scalars of YAML text in block style by their path: "model.num_layers" is "32".
/// Leaves out lists, references, texts of several lines, null, and everything in flow style. Never
/// fails. Pure.
std::map<std::string, std::string> YamlScalars(std::string_view text);

/// Reads the arguments that a Megatron Bridge or NeMo configuration states: attention heads,
/// ranks, normalization. Other attributes have Megatron's defaults.
/// \param arena  owner of the values
/// \error as for ReadArgs
/// Pure.
Result<Args> ArgsOfConfig(pickle::Arena& arena, const std::map<std::string, std::string>& scalars);

/// Returns a value of a model's configuration from any of the sections in which the programs store
/// it; empty if there is none.
std::string ModelValue(const std::map<std::string, std::string>& scalars, std::string_view name);

}  // namespace shardwright::checkpoints::megatron
