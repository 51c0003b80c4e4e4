// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "engine/layout/cut.h"
#include "engine/tensor/shape.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// True if the elements of a tensor are stored one after another in row-major order. Pure.
bool IsRowMajor(const pickle::Tensor& tensor);

/// A range of a tensor's storage, which holds all or a part of the tensor.
struct StoredPart {
  /// Maps the elements of the tensor to the range. Null: the range holds the tensor in row-major
  /// order.
  layout::CutPtr order;
  std::uint64_t first = 0;  ///< element of the storage where the range begins
  std::uint64_t elems = 0;
};

/// Cuts a tensor that a storage holds with any strides: a box for each run of consecutive elements.
/// The shard is the whole storage.
/// \param whole    the tensor that `tensor` is a box of
/// \param offsets  of the box
/// \param elems    elements of the storage
/// \param most     boxes that may be made
/// \pre `tensor` has elements, is not in row-major order, and lies inside its storage
/// \error kUnsupported  too many runs, or elements in one place
/// Pure.
Result<layout::Cut> CutByRuns(const pickle::Tensor& tensor, const Shape& whole,
                              const Shape& offsets, std::uint64_t elems, std::uint64_t most);

/// Describes a tensor of any strides by a range of its storage, whose elements that are not the
/// tensor's count as padding.
/// \param elems  elements of the storage
/// \param most   boxes that may be made
/// \pre the tensor lies inside its storage
/// \error kUnsupported  strides that no small number of boxes describes, or elements in one place
/// Pure.
Result<std::vector<StoredPart>> StoredParts(const pickle::Tensor& tensor, std::uint64_t elems,
                                            std::uint64_t most);

}  // namespace shardwright::checkpoints
