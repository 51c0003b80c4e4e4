// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/layout/cut.h"

namespace shardwright::layout {

/// A box of a cut, by its position in the logical tensor or in the shard.
struct PlacedBox {
  std::vector<std::uint64_t> at;
  std::vector<std::uint64_t> sizes;
};

enum class Side : std::uint8_t { kLogical, kShard };

/// Adds the boxes of a cut, positioned in the logical tensor or in the shard.
/// \param axes  as Cut::axes
void AddPlaced(const std::vector<Box>& boxes, const std::vector<std::uint32_t>& axes, Side side,
               std::vector<PlacedBox>* placed);

/// Finds two boxes of one rank that share an element. Returns nothing if there are none.
std::optional<std::pair<PlacedBox, PlacedBox>> FindOverlap(std::vector<PlacedBox> boxes);

}  // namespace shardwright::layout
