// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::pickle {

/// Limit of a graph's memory: this many bytes per byte of the pickle, but at least the floor.
inline constexpr std::uint64_t kGraphBytesPerByte = 64;
inline constexpr std::uint64_t kGraphBytesFloor = std::uint64_t{64} << 20;

/// A storage as declared in the pickle.
struct StorageUse {
  std::string key;
  DType dtype = DType::kU8;
  bool untyped = false;     ///< UntypedStorage: `elems` are bytes
  std::uint64_t elems = 0;  ///< of dtype
  std::size_t at = 0;       ///< offset of its first use in the pickle
};

struct Graph {
  std::shared_ptr<Arena> arena;
  const Node* root = nullptr;
  std::vector<StorageUse> storages;  ///< in first-use order; Tensor::storage indexes them
};

/// Interprets a pickle of protocol 2 to 5 with the closed table of
/// docs/formats/pt.md. Nothing is executed or looked up: classes stay names,
/// calls of unknown classes become kObject nodes. The graph has no cycles and
/// at most limits::kPickleDepth levels; every tensor is inside its storage.
/// \error kBadInput  malformed, or naming a global that gives access to code ("refused: ...")
/// \error kUnsupported  sparse, quantized, nested tensors, cycles, bare storages
/// \error kLimit  nesting, memo or memory beyond the caps
/// \param most  memory limit of the graph in bytes, if it
///        is lower than the limit from the pickle's length
/// Pure; messages name the byte offset of the opcode at fault.
Result<Graph> Load(std::string_view pickle, std::uint64_t most = ~std::uint64_t{0});

/// Checks properties that only a finished graph has. Load calls it for its result.
/// \error kUnsupported  a cycle; kLimit  more than limits::kPickleDepth levels; kBadInput
///        a duplicate key of a dict or item of a set, or a value that cannot be one
/// Pure.
Status CheckGraph(const Node* root);

/// Finds the end of the first pickle of a byte stream by scanning its opcodes.
/// \param resume  0 in the first call; stores the position between calls with more of the stream
/// \returns bytes up to and including STOP, nothing if more bytes are needed
/// \error kBadInput  an unknown opcode
/// Pure.
Result<std::optional<std::size_t>> FindEnd(std::string_view stream, std::size_t& resume);

}  // namespace shardwright::pickle
