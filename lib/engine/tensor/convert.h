// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/tensor/dtype.h"

namespace shardwright {

/// True where Convert knows the pair: equal dtypes, every pair of float64, float32, float16 and
/// bfloat16, and an 8-bit floating type (IsFloating) with each of these but for float64 to 8 bits.
/// Nothing is scaled.
bool CanConvert(DType from, DType to);

/// Converts elements, rounding to nearest even; NaN stays NaN, overflow becomes infinity; in
/// types without infinity the largest value (float8_e4m3fn) or NaN, as torch does.
/// \pre CanConvert(from, to); both spans hold the same number of elements; they do not overlap
/// Local.
void Convert(DType from, std::span<const std::byte> source, DType to, std::span<std::byte> target);

/// True for the types whose means are formed: float64, float32, float16 and bfloat16.
bool CanAverage(DType dtype);

/// Adds `source` to `sum` (float64 accumulators), element by element.
/// \pre CanAverage(dtype)
/// Local.
void Accumulate(DType dtype, std::span<const std::byte> source, std::span<double> sum);

/// Stores sum / count in `dtype`, rounding to nearest even.
/// \pre CanAverage(dtype)
/// Local.
void StoreMean(std::span<const double> sum, std::uint64_t count, DType dtype,
               std::span<std::byte> target);

}  // namespace shardwright
