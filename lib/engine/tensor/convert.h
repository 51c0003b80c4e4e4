// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/tensor/dtype.h"

namespace shardwright {

/// Returns true if Convert supports the pair: equal dtypes, every pair of
/// float64, float32, float16 and bfloat16, and 8-bit floating types (IsFloating)
/// with each of these, except float64 to 8 bits. Conversions do not scale.
bool CanConvert(DType from, DType to);

/// Converts elements, rounding to nearest even. NaN stays NaN. Overflow becomes infinity,
/// or in types without infinity the largest value (float8_e4m3fn) or NaN, as in torch.
/// \pre CanConvert(from, to); both spans have the same number of elements; they do not overlap
/// Local.
void Convert(DType from, std::span<const std::byte> source, DType to, std::span<std::byte> target);

/// Returns true for types that StoreMean supports: float64, float32, float16 and bfloat16.
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
