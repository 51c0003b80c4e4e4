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

/// Cuts of boxes of tensors, one for all that are alike.
class PieceCuts {
 public:
  struct Held {
    layout::CutPtr cut;
    std::uint64_t first = 0;  ///< element of the storage where the shard begins
    std::uint64_t elems = 0;
  };

  /// The cut of a shard that is a box of a tensor. \error kBadInput  it leaves the tensor
  Result<layout::CutPtr> Of(const Shape& shape, const layout::Piece& piece);

  /// Of a box as a stored tensor has it, which may have strides of its own.
  /// \param offsets  of the box in the whole
  /// \param elems    of the storage
  /// \error kUnsupported  elements that lie in one place, or in too many runs
  Result<Held> Stored(const Shape& shape, const Shape& offsets, const pickle::Tensor& tensor,
                      std::uint64_t elems);

 private:
  std::map<std::vector<std::uint64_t>, layout::CutPtr> known_;
};

/// Whether two plain values are equal.
bool SameOptions(const pickle::Node* a, const pickle::Node* b);

}  // namespace shardwright::checkpoints::dcp
