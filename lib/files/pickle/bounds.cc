// SPDX-License-Identifier: Apache-2.0
#include "files/pickle/bounds.h"

#include <algorithm>

#include "support/base/checked.h"

namespace shardwright::pickle {

Status CheckBounds(const Tensor& tensor, std::uint64_t elems) {
  if (tensor.shape.size() != tensor.strides.size()) {
    return Fail(Errc::kBadInput, "tensor with ", tensor.shape.size(), " sizes but ",
                tensor.strides.size(), " strides");
  }
  SW_TRY_ASSIGN(std::uint64_t count, CountElems(tensor.shape));
  SW_TRY_ASSIGN(count, CheckedMul(count, ItemSize(tensor.dtype)));
  if (count == 0) return {};
  std::uint64_t last = tensor.offset;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    SW_TRY_ASSIGN(const std::uint64_t step, CheckedMul(tensor.shape[i] - 1, tensor.strides[i]));
    SW_TRY_ASSIGN(last, CheckedAdd(last, step));
  }
  if (last >= elems) {
    return Fail(Errc::kBadInput, "tensor ", ToString(tensor.shape), " reaches element ", last,
                " of a storage of ", elems);
  }
  return {};
}

}  // namespace shardwright::pickle
