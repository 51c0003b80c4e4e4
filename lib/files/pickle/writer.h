// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "files/pickle/node.h"
#include "files/pickle/reader.h"
#include "support/base/result.h"

namespace shardwright::pickle {

/// A pickle and the storages in the order of their first use in it.
struct Dumped {
  std::string bytes;
  /// order[k] is the index of the storage with key "k". Storages that no tensor uses come last.
  std::vector<std::uint32_t> order;
};

/// Writes a graph in protocol 2 with the opcodes that torch.load(weights_only=True)
/// reads. Writes nodes with several parents once and shares them.
/// \param storages  by the index that tensors use; their keys are ignored
/// \error kBadInput  a value that protocol 2 cannot store, a tensor outside its storage, a cycle,
///        or nesting beyond limits::kPickleDepth; kUnsupported  a tensor of a type that torch lacks
/// Pure: same input, same bytes.
Result<Dumped> Dump(const Node* root, std::span<const StorageUse> storages);

}  // namespace shardwright::pickle
