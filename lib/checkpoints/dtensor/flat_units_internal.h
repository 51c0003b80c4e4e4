// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "checkpoints/pickled/unit_order.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dtensor {

/// Parameters that FSDP1 stores consecutively in one flat vector.
struct FlatUnit {
  std::vector<std::uint32_t> params;   ///< indices into the list from which the units were made
  std::vector<std::uint64_t> offsets;  ///< offset of each parameter, in elements
  std::uint64_t elems = 0;             ///< elements of all parameters, without padding
};

/// Returns the units of a model that wraps its blocks (UnitParams).
/// \pre names.size() == shapes.size(); the products of shapes fit
std::vector<FlatUnit> UnitsOf(std::span<const std::string_view> names,
                              std::span<const Shape> shapes, BlockIndex index);

/// Units that yield flat vectors of the given lengths on each of `shards` ranks.
/// UnitsOfLengths tries both values of BlockIndex and returns the one that fits.
/// \error kUnsupported  neither fits, or both fit and they differ
struct FoundUnits {
  std::vector<FlatUnit> units;
  BlockIndex index = BlockIndex::kFirst;
};
Result<FoundUnits> UnitsOfLengths(std::span<const std::string_view> names,
                                  std::span<const Shape> shapes,
                                  const std::vector<std::uint64_t>& lengths, std::uint64_t shards);

}  // namespace shardwright::checkpoints::dtensor
