// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::pickle {

/// Checks that a tensor's elements lie in a storage of `elems` elements of its dtype.
/// \error kBadInput  another number of strides than sizes, an overflow, an element outside
/// Pure.
Status CheckBounds(const Tensor& tensor, std::uint64_t elems);

}  // namespace shardwright::pickle
