// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/name_maps/maps.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Finds config.json of the model in a source path or its parent. Returns "PATH\nTEXT", or "".
/// \error kLimit, kBadInput  as os::ReadWholeText
/// Local.
Result<std::string> FindConfig(const std::vector<std::string>& source_paths);

/// Returns the text of an adapter_config.json in one of the folders, in its parent, or in a
/// subfolder of either where trainers store adapters; empty if there is none.
/// \error as FindConfig
/// Local.
Result<std::string> FindAdapterConfig(const std::vector<std::string>& source_paths);

/// The model's config values and their origin.
struct KnownConfig {
  ModelConfig values;
  std::string origin;  ///< "ckpt/config.json"; empty: no values are known
};

/// Merges the config values of config.json and of the checkpoint itself.
/// \param config  as FindConfig returns it
/// \error kBadInput  two values contradict each other, both are named; kLimit
/// Pure.
Result<KnownConfig> MergeConfigs(const std::string& config, const Checkpoint& checkpoint);

}  // namespace shardwright::checkpoints
