// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::pickle {

/// Checks that all elements of a tensor are within a storage of `elems` elements of its dtype.
/// \error kBadInput  sizes and strides differ in number, an overflow, or an element outside
/// Pure.
Status CheckBounds(const Tensor& tensor, std::uint64_t elems);

}  // namespace shardwright::pickle
