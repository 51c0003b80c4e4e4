// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace shardwright::dcp {

// Where PyTorch has the classes of an index.

inline constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata.";
/// Where TensorProperties and the memory format lay before release 2.3. Later ones know the old
/// place, earlier ones no other.
inline constexpr std::string_view kOldModule = "torch.distributed._shard.sharded_tensor.metadata.";
inline constexpr std::string_view kStorageInfo =
    "torch.distributed.checkpoint.filesystem._StorageInfo";

}  // namespace shardwright::dcp
