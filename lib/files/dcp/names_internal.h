// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace shardwright::dcp {

// Module paths of the classes of an index in PyTorch.

inline constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata.";
/// Module of TensorProperties and the memory format before release
/// 2.3. Later releases accept the old module, earlier ones no other.
inline constexpr std::string_view kOldModule = "torch.distributed._shard.sharded_tensor.metadata.";
inline constexpr std::string_view kStorageInfo =
    "torch.distributed.checkpoint.filesystem._StorageInfo";

}  // namespace shardwright::dcp
