// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/base/result.h"

namespace shardwright {

/// Extents, outermost first; row-major; empty for a scalar.
using Shape = std::vector<std::uint64_t>;

/// Returns the number of elements.
/// \error kBadInput  the product does not fit in 64 bits
Result<std::uint64_t> CountElems(std::span<const std::uint64_t> shape);

/// Returns the number of elements of a shape that was checked before. \pre the product fits
std::uint64_t Elems(std::span<const std::uint64_t> shape);

/// Returns row-major strides in elements. \pre the product fits
std::vector<std::uint64_t> ContiguousStrides(std::span<const std::uint64_t> shape);

/// Returns the shape as text: "[61, 24]".
std::string ToString(std::span<const std::uint64_t> shape);

}  // namespace shardwright
