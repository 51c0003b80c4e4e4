// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "engine/tensor/convert.h"

// The mean of partial values in a conversion: added as doubles, rounded once.

namespace shardwright {
namespace {

template <class T>
std::vector<T> MeanOf(DType dtype, const std::vector<std::vector<T>>& parts) {
  std::vector<double> sums(parts.front().size());
  for (const std::vector<T>& part : parts) {
    Accumulate(dtype, std::as_bytes(std::span(part)), sums);
  }
  std::vector<T> out(sums.size());
  StoreMean(sums, parts.size(), dtype, std::as_writable_bytes(std::span(out)));
  return out;
}

TEST(Mean, IsTakenOfEachElement) {
  EXPECT_EQ(MeanOf<float>(DType::kF32, {{1, 2, -3}, {3, 2, 5}}), (std::vector<float>{2, 2, 1}));
  EXPECT_EQ(MeanOf<double>(DType::kF64, {{1}, {2}, {6}}), (std::vector<double>{3}));
}

TEST(Mean, OfOneIsThatOne) {
  EXPECT_EQ(MeanOf<float>(DType::kF32, {{0.1F, -7}}), (std::vector<float>{0.1F, -7}));
}

TEST(Mean, LosesNothingOnTheWay) {
  // Added as floats, the ones would vanish next to the large one.
  EXPECT_EQ(MeanOf<float>(DType::kF32, {{16777216}, {1}, {1}}), (std::vector<float>{5592406}));
}

TEST(Mean, OfHalvesIsRoundedToTheNearest) {
  // 1 and 1 + 2^-7 are adjacent in bfloat16; the tie rounds to even.
  EXPECT_EQ(MeanOf<std::uint16_t>(DType::kBF16, {{0x3F80}, {0x3F81}}),
            (std::vector<std::uint16_t>{0x3F80}));
  EXPECT_EQ(MeanOf<std::uint16_t>(DType::kBF16, {{0x3F81}, {0x3F82}}),
            (std::vector<std::uint16_t>{0x3F82}));
  EXPECT_EQ(MeanOf<std::uint16_t>(DType::kF16, {{0x3C00}, {0x3C01}, {0x3C01}}),
            (std::vector<std::uint16_t>{0x3C01}));
}

}  // namespace
}  // namespace shardwright
