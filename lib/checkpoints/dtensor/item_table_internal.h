// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/layout/mesh_cut.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dtensor {

/// The distribution of a tensor over some ranks, from torch_checkpointing's metadata.pkl.
struct ListedTensor {
  std::string path;  ///< as written in the file: ["state","a.weight","exp_avg"]
  std::vector<std::uint64_t> ranks;
  Shape shape;
  std::string dtype;  ///< "torch.float32"
  std::vector<std::uint64_t> mesh;
  std::vector<layout::MeshSplit> splits;
};

/// Contents of metadata.pkl: the number of ranks, and the distribution of some items' tensors.
struct ItemTable {
  std::uint64_t world = 0;
  struct Of {
    std::string item;
    std::vector<ListedTensor> tensors;
  };
  std::vector<Of> items;
};

/// \error kBadInput  not such a table; kUnsupported  another
///        version, or files with names other than ITEM_RANK.pt
/// Pure.
Result<ItemTable> ReadItemTable(std::string_view bytes);

}  // namespace shardwright::checkpoints::dtensor
