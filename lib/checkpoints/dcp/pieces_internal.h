// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "engine/layout/cut.h"
#include "engine/layout/mesh_cut.h"
#include "engine/tensor/shape.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dcp {

/// Creates cuts for boxes of tensors and caches them; equal boxes share one cut.
class PieceCuts {
 public:
  struct StoredPiece {
    layout::CutPtr cut;
    std::uint64_t first = 0;  ///< element of the storage where the shard begins
    std::uint64_t elems = 0;
  };

  /// Returns the cut for a box of a tensor. \error kBadInput  the box exceeds the tensor
  Result<layout::CutPtr> Of(const Shape& shape, const layout::Piece& piece);

  /// Returns the cut for a box in a stored tensor, which may have any strides.
  /// \param offsets  offsets of the box in the full tensor
  /// \param elems    number of elements of the storage
  /// \error kUnsupported  several elements share a position, or the box needs too many runs
  Result<StoredPiece> Stored(const Shape& shape, const Shape& offsets, const pickle::Tensor& tensor,
                             std::uint64_t elems);

 private:
  std::map<std::vector<std::uint64_t>, layout::CutPtr> known_;
};

/// Returns true if two plain values are equal. Dicts may differ in the order of their entries.
bool SameOptions(const pickle::Node* a, const pickle::Node* b);

}  // namespace shardwright::checkpoints::dcp
