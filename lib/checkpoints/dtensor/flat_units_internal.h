// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dtensor {

/// Parameters that FSDP1 stores consecutively in one flat vector.
struct FlatUnit {
  std::vector<std::uint32_t> params;   ///< indices into the list from which the units were made
  std::vector<std::uint64_t> offsets;  ///< offset of each parameter, in elements
  std::uint64_t elems = 0;             ///< elements of all parameters, without padding
};

/// Selects the number that identifies a block: "layers.3" or "experts.5" of "layers.3.experts.5.w".
enum class BlockIndex : std::uint8_t { kFirst, kLast };

/// Returns the units of a model that wraps its blocks. The root comes first,
/// with all parameters outside of blocks, then the blocks in the order of their
/// first parameters. Parameters of one block have the same name up to a number.
/// \pre names.size() == shapes.size(); the products of shapes fit
std::vector<FlatUnit> UnitsOf(const std::vector<std::string>& names,
                              const std::vector<Shape>& shapes, BlockIndex index);

/// Units that yield flat vectors of the given lengths on each of `shards` ranks.
/// UnitsOfLengths tries both values of BlockIndex and returns the one that fits.
/// \error kUnsupported  neither fits, or both fit and they differ
struct FoundUnits {
  std::vector<FlatUnit> units;
  BlockIndex index = BlockIndex::kFirst;
};
Result<FoundUnits> UnitsOfLengths(const std::vector<std::string>& names,
                                  const std::vector<Shape>& shapes,
                                  const std::vector<std::uint64_t>& lengths, std::uint64_t shards);

}  // namespace shardwright::checkpoints::dtensor
