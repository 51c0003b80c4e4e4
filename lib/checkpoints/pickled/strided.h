// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "engine/layout/cut.h"
#include "engine/tensor/shape.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Returns true if a tensor's elements are stored consecutively in row-major order. Pure.
bool IsRowMajor(const pickle::Tensor& tensor);

/// A range of a storage that contains a complete tensor or a part of one.
struct StoredPart {
  /// Maps the elements of the tensor to the range. Null:
  /// the range contains the tensor in row-major order.
  layout::CutPtr order;
  std::uint64_t first = 0;  ///< element of the storage where the range begins
  std::uint64_t elems = 0;
};

/// Cuts a tensor with any strides into boxes, one for each run of consecutive
/// elements in its storage. The shard of the cut is the whole storage.
/// \param whole    the tensor that `tensor` is a box of
/// \param offsets  position of that box in `whole`
/// \param elems    elements of the storage
/// \param most     maximum number of boxes
/// \pre `tensor` has elements, is not in row-major order, and is inside its storage
/// \error kUnsupported  too many runs, or several elements at the same position
/// Pure.
Result<layout::Cut> CutByRuns(const pickle::Tensor& tensor, const Shape& whole,
                              const Shape& offsets, std::uint64_t elems, std::uint64_t most);

/// Describes a tensor with any strides by byte ranges of its storage.
/// Elements of a range that are not part of the tensor count as padding.
/// \param elems  elements of the storage
/// \param most   maximum number of boxes
/// \pre the tensor is inside its storage
/// \error kUnsupported  the strides need too many boxes, or elements share a position
/// Pure.
Result<std::vector<StoredPart>> StoredParts(const pickle::Tensor& tensor, std::uint64_t elems,
                                            std::uint64_t most);

}  // namespace shardwright::checkpoints
