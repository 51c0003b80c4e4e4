#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tensor/dtype.h"

namespace shardwright {

/// True where Convert knows the pair: equal dtypes, and every pair of float64, float32, float16 and
/// bfloat16.
bool CanConvert(DType from, DType to);

/// Converts elements, rounding to nearest even; NaN stays NaN, overflow becomes infinity, as torch
/// does. \pre CanConvert(from, to); both spans hold the same number of elements; they do not
/// overlap Local.
void Convert(DType from, std::span<const std::byte> source, DType to, std::span<std::byte> target);

/// Adds `source` to `sum` (float64 accumulators), element by element.
/// \pre dtype is a floating type of CanConvert
/// Local.
void Accumulate(DType dtype, std::span<const std::byte> source, std::span<double> sum);

/// Stores sum / count in `dtype`, rounding to nearest even.
/// Local.
void StoreMean(std::span<const double> sum, std::uint64_t count, DType dtype,
               std::span<std::byte> target);

}  // namespace shardwright
