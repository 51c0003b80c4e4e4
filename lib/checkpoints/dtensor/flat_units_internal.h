// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dtensor {

/// The parameters that FSDP1 keeps in one flat vector, one after the other.
struct FlatUnit {
  std::vector<std::uint32_t> params;   ///< into the list that the units are made of
  std::vector<std::uint64_t> offsets;  ///< of each, elements
  std::uint64_t elems = 0;             ///< of all of them, padding aside
};

/// Which number in a name tells blocks apart: "layers.3" or "experts.5" in "layers.3.experts.5.w".
enum class BlockIndex : std::uint8_t { kFirst, kLast };

/// The units of a model that wraps its blocks: first the root, of parameters outside of blocks,
/// then the blocks in the order of their first parameters. A block is what has the same name up to
/// a number.
/// \pre names.size() == shapes.size(); the products of shapes fit
std::vector<FlatUnit> UnitsOf(const std::vector<std::string>& names,
                              const std::vector<Shape>& shapes, BlockIndex index);

/// The units whose flat vectors have these lengths on each of `shards` ranks: of the two ways to
/// tell blocks apart the one that fits.
/// \error kUnsupported  none does, or both and they differ
struct FoundUnits {
  std::vector<FlatUnit> units;
  BlockIndex index = BlockIndex::kFirst;
};
Result<FoundUnits> UnitsOfLengths(const std::vector<std::string>& names,
                                  const std::vector<Shape>& shapes,
                                  const std::vector<std::uint64_t>& lengths, std::uint64_t shards);

}  // namespace shardwright::checkpoints::dtensor
