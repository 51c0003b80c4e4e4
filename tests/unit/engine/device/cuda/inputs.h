// SPDX-License-Identifier: Apache-2.0
// Elements to convert.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "engine/tensor/dtype.h"

namespace shardwright::device {

/// All values of a type of 8 or 16 bits; of a wider one each exponent with fractions of all kinds
/// and 2^18 random ones, NaN and infinity among them.
inline std::vector<std::byte> Inputs(DType type) {
  std::mt19937_64 random(static_cast<unsigned>(type));
  const std::uint64_t item = ItemSize(type);
  std::vector<std::uint64_t> bits;
  if (item <= 2) {
    for (std::uint64_t code = 0; code < (std::uint64_t{1} << (8 * item)); ++code) {
      bits.push_back(code);
    }
  } else {
    // Each exponent with fractions of all kinds, both signs; NaN and infinity are among them.
    const unsigned fraction = item == 4 ? 23 : 52;
    const std::uint64_t one = std::uint64_t{1} << fraction;
    const std::uint64_t exponents = item == 4 ? 256 : 2048;
    for (std::uint64_t exponent = 0; exponent < exponents; ++exponent) {
      std::vector<std::uint64_t> fractions = {0, 1, one - 1, one >> 1, (one >> 1) + 1};
      for (unsigned bit = 0; bit < fraction; ++bit) {
        for (const std::uint64_t near : {0ULL, 1ULL}) {
          fractions.push_back((one >> 1 >> bit) + near);  // ties and the values next to them
          fractions.push_back((one - (one >> 1 >> bit)) - near);
        }
        fractions.push_back(random() % one);
      }
      for (const std::uint64_t each : fractions) {
        for (const std::uint64_t sign : {0ULL, 1ULL}) {
          bits.push_back(sign << (8 * item - 1) | exponent << fraction | (each & (one - 1)));
        }
      }
    }
    for (int i = 0; i < 1 << 18; ++i) bits.push_back(random());
  }
  std::vector<std::byte> inputs(bits.size() * item);
  for (std::size_t i = 0; i < bits.size(); ++i) std::memcpy(&inputs[i * item], &bits[i], item);
  return inputs;
}

inline constexpr DType kFloating[] = {DType::kF64,        DType::kF32,       DType::kF16,
                                      DType::kBF16,       DType::kF8E4M3,    DType::kF8E5M2,
                                      DType::kF8E4M3Fnuz, DType::kF8E5M2Fnuz};

}  // namespace shardwright::device
