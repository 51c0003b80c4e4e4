// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/base/result.h"

namespace shardwright {

/// Extents, outermost first; row-major; empty means a scalar.
using Shape = std::vector<std::uint64_t>;

/// Number of elements.
/// \error kBadInput if the product does not fit in 64 bits
Result<std::uint64_t> CountElems(std::span<const std::uint64_t> shape);

/// Number of elements of a shape that has been checked before. \pre the product fits
std::uint64_t Elems(std::span<const std::uint64_t> shape);

/// Row-major strides in elements. \pre the product fits
std::vector<std::uint64_t> ContiguousStrides(std::span<const std::uint64_t> shape);

/// "[61, 24]"
std::string ToString(std::span<const std::uint64_t> shape);

}  // namespace shardwright
