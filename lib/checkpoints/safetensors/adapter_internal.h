// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/safetensors/safetensors.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::safetensors {

inline constexpr std::string_view kAdapterFile = "adapter_model.safetensors";
inline constexpr std::string_view kAdapterConfig = "adapter_config.json";

/// A LoRA adapter as a folder that PEFT loads.
struct AdapterFolder {
  /// A tensor of the adapter.
  struct Tensor {
    std::uint32_t param = 0;  ///< into Checkpoint::params
    std::string name;         ///< in PEFT's form, without the name of the adapter
  };
  std::vector<Tensor> tensors;           ///< empty: the checkpoint is written as a model
  std::string config;                    ///< text of adapter_config.json; empty: none is written
  std::vector<std::string> not_carried;  ///< one phrase each
  std::vector<std::string> notes;        ///< messages for the user; one sentence each
};

/// Makes an adapter folder from a checkpoint that has LoRA tensors and trains nothing else.
/// \param names  by parameter: names without the parts that wrappers add
/// \error kUsage  `layout.adapter` names no adapter of the checkpoint; kUnsupported  several
///        adapters and no name in `layout.adapter`
/// Pure. Source: docs/formats/safetensors.md, "Adapters".
Result<AdapterFolder> MakeAdapterFolder(const Checkpoint& source, const FilesLayout& layout,
                                        const std::vector<std::string>& names);

}  // namespace shardwright::checkpoints::safetensors
