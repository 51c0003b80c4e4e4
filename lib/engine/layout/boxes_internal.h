// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/layout/cut.h"

namespace shardwright::layout {

/// A box on one of its two sides.
struct PlacedBox {
  std::vector<std::uint64_t> at;
  std::vector<std::uint64_t> sizes;
};

enum class Side : std::uint8_t { kLogical, kShard };

/// Adds the boxes of a cut as they lie on one side.
/// \param axes  as Cut::axes
void AddPlaced(const std::vector<Box>& boxes, const std::vector<std::uint32_t>& axes, Side side,
               std::vector<PlacedBox>* placed);

/// Two boxes of one rank that share an element, or nothing.
std::optional<std::pair<PlacedBox, PlacedBox>> FindOverlap(std::vector<PlacedBox> boxes);

}  // namespace shardwright::layout
