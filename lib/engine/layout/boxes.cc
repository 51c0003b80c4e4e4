// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "engine/layout/boxes_internal.h"

namespace shardwright::layout {

void AddPlaced(const std::vector<Box>& boxes, const std::vector<std::uint32_t>& axes, Side side,
               std::vector<PlacedBox>* placed) {
  for (const Box& box : boxes) {
    PlacedBox& one = placed->emplace_back();
    one.at = side == Side::kLogical ? box.at_view : box.at_shard;
    one.sizes = box.sizes;
    if (side == Side::kLogical) continue;
    for (std::size_t i = 0; i < axes.size(); ++i) one.sizes[i] = box.sizes[axes[i]];
  }
}

std::optional<std::pair<PlacedBox, PlacedBox>> FindOverlap(std::vector<PlacedBox> boxes) {
  // Boxes are sorted by the first coordinate, so
  // compare only those that overlap in that dimension.
  std::sort(boxes.begin(), boxes.end(),
            [](const PlacedBox& a, const PlacedBox& b) { return a.at < b.at; });
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const PlacedBox& a = boxes[i];
    for (std::size_t j = i + 1; j < boxes.size(); ++j) {
      const PlacedBox& b = boxes[j];
      if (!a.at.empty() && b.at[0] >= a.at[0] + a.sizes[0]) break;
      bool overlap = true;
      for (std::size_t dim = 0; overlap && dim < a.at.size(); ++dim) {
        overlap = a.at[dim] < b.at[dim] + b.sizes[dim] && b.at[dim] < a.at[dim] + a.sizes[dim];
      }
      if (overlap) return std::pair(a, b);
    }
  }
  return std::nullopt;
}

}  // namespace shardwright::layout
