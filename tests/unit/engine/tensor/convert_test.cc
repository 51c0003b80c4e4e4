// SPDX-License-Identifier: Apache-2.0
#include "engine/tensor/convert.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace shardwright {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// One number through Convert.
template <class From, class To>
To One(DType from, From value, DType to) {
  To out{};
  Convert(from, std::as_bytes(std::span(&value, 1)), to,
          std::as_writable_bytes(std::span(&out, 1)));
  return out;
}

/// A floating type of 16 bits, described by its fields alone.
struct Half {
  DType dtype;
  int mantissa_bits;
  int bias;
  std::uint16_t infinity;

  /// Returns the value of the bits. \pre not a NaN
  double Value(std::uint16_t bits) const {
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int exponent = (bits & 0x7FFF) >> mantissa_bits;
    const double sign = (bits & 0x8000) != 0 ? -1 : 1;
    if ((bits & 0x7FFF) == infinity) return sign * kInfinity;
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  bool IsNan(std::uint16_t bits) const { return (bits & 0x7FFF) > infinity; }
};

class Halves : public testing::TestWithParam<Half> {};

TEST_P(Halves, MeanWhatTheirFieldsSay) {
  const Half half = GetParam();
  for (std::uint32_t i = 0; i <= 0xFFFF; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const auto wide = One<std::uint16_t, float>(half.dtype, bits, DType::kF32);
    if (half.IsNan(bits)) {
      ASSERT_TRUE(std::isnan(wide)) << i;
      continue;
    }
    ASSERT_EQ(static_cast<double>(wide), half.Value(bits)) << i;
    ASSERT_EQ(std::signbit(wide), (bits & 0x8000) != 0) << i;
    ASSERT_EQ((One<std::uint16_t, double>(half.dtype, bits, DType::kF64)), half.Value(bits)) << i;
  }
}

TEST_P(Halves, AreTheSameAfterThereAndBack) {
  const Half half = GetParam();
  for (std::uint32_t i = 0; i <= 0xFFFF; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const auto wide = One<std::uint16_t, float>(half.dtype, bits, DType::kF32);
    const auto back = One<float, std::uint16_t>(DType::kF32, wide, half.dtype);
    if (half.IsNan(bits)) {
      ASSERT_TRUE(half.IsNan(back)) << i;
    } else {
      ASSERT_EQ(back, bits);
    }
  }
}

// Halfway between two adjacent values is a tie, which rounds to even; others round to the nearer.
TEST_P(Halves, AreRoundedToTheNearest) {
  const Half half = GetParam();
  for (std::uint16_t bits = 0; bits + 1 < half.infinity; ++bits) {
    const auto next = static_cast<std::uint16_t>(bits + 1);
    const auto tie = static_cast<float>((half.Value(bits) + half.Value(next)) / 2);
    ASSERT_EQ(static_cast<double>(tie) * 2, half.Value(bits) + half.Value(next)) << "not exact";
    const std::uint16_t even = bits % 2 == 0 ? bits : next;
    ASSERT_EQ((One<float, std::uint16_t>(DType::kF32, tie, half.dtype)), even) << bits;
    ASSERT_EQ((One<float, std::uint16_t>(DType::kF32, -tie, half.dtype)), even | 0x8000) << bits;
    const float below = std::nextafterf(tie, -1);
    const float above = std::nextafterf(tie, std::numeric_limits<float>::infinity());
    ASSERT_EQ((One<float, std::uint16_t>(DType::kF32, below, half.dtype)), bits);
    ASSERT_EQ((One<float, std::uint16_t>(DType::kF32, above, half.dtype)), next);
  }
}

TEST_P(Halves, AreInfiniteBeyondTheLargest) {
  const Half half = GetParam();
  const auto largest = static_cast<std::uint16_t>(half.infinity - 1);
  const auto before = static_cast<std::uint16_t>(half.infinity - 2);
  // Half a step beyond the largest one is where the next one would have to be taken.
  const double limit = half.Value(largest) + (half.Value(largest) - half.Value(before)) / 2;
  const auto at = static_cast<float>(limit);
  ASSERT_EQ(static_cast<double>(at), limit);
  EXPECT_EQ((One<float, std::uint16_t>(DType::kF32, at, half.dtype)), half.infinity);
  EXPECT_EQ((One<float, std::uint16_t>(DType::kF32, -at, half.dtype)), half.infinity | 0x8000);
  EXPECT_EQ((One<float, std::uint16_t>(DType::kF32, std::nextafterf(at, 0), half.dtype)), largest);
  EXPECT_EQ((One<double, std::uint16_t>(DType::kF64, kInfinity, half.dtype)), half.infinity);
  EXPECT_EQ((One<double, std::uint16_t>(DType::kF64, 1e300, half.dtype)), half.infinity);
}

INSTANTIATE_TEST_SUITE_P(Types, Halves,
                         testing::Values(Half{DType::kF16, 10, 15, 0x7C00},
                                         Half{DType::kBF16, 7, 127, 0x7F80}),
                         [](const auto& test) { return std::string(Name(test.param.dtype)); });

// As in torch, which has no direct way either.
TEST(Converted, DoublesReachHalvesByFloats) {
  const double above_tie = 1 + 0x1p-11 + 0x1p-30;  // as a float it is the tie itself
  EXPECT_EQ((One<double, std::uint16_t>(DType::kF64, above_tie, DType::kF16)), 0x3C00);
  EXPECT_EQ((One<double, std::uint16_t>(DType::kF64, 1 + 0x1p-11 + 0x1p-23, DType::kF16)), 0x3C01);
}

TEST(Converted, OneHalfToTheOther) {
  // bfloat16 cannot distinguish 65504 from 65536, which is more than float16 can represent.
  EXPECT_EQ((One<std::uint16_t, std::uint16_t>(DType::kF16, 0x7BFF, DType::kBF16)), 0x4780);
  EXPECT_EQ((One<std::uint16_t, std::uint16_t>(DType::kBF16, 0x4780, DType::kF16)), 0x7C00);
  EXPECT_EQ((One<std::uint16_t, std::uint16_t>(DType::kF16, 0x3C01, DType::kBF16)), 0x3F80);
}

TEST(Converted, EqualTypesKeepTheirBits) {
  // A NaN with a payload, which a conversion would not keep.
  const std::uint32_t nan = 0xFF812345;
  EXPECT_EQ((One<std::uint32_t, std::uint32_t>(DType::kF32, nan, DType::kF32)), nan);
  const std::uint64_t number = 0x0123456789ABCDEF;
  EXPECT_EQ((One<std::uint64_t, std::uint64_t>(DType::kI64, number, DType::kI64)), number);
  Convert(DType::kI8, {}, DType::kI8, {});
}

TEST(Converted, EveryElementOfMany) {
  std::vector<float> values;
  values.reserve(1000);
  for (int i = 0; i < 1000; ++i) values.push_back(static_cast<float>(i) / 8 - 40);
  std::vector<double> wide(values.size());
  Convert(DType::kF32, std::as_bytes(std::span(values)), DType::kF64,
          std::as_writable_bytes(std::span(wide)));
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(wide[i], values[i]) << i;
}

TEST(Converted, OnlyWhatHasAMeaning) {
  const std::vector<DType> floats = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
  for (int a = 0; a <= static_cast<int>(DType::kF4E2M1x2); ++a) {
    for (int b = 0; b <= static_cast<int>(DType::kF4E2M1x2); ++b) {
      const auto from = static_cast<DType>(a);
      const auto to = static_cast<DType>(b);
      const auto wide = [&](DType type) {
        return std::count(floats.begin(), floats.end(), type) == 1;
      };
      // 8-bit floating types with each of these, but not out of 64 bits.
      const auto narrow = [&](DType type) { return IsFloating(type) && !wide(type); };
      const bool both = (wide(from) && wide(to)) || (narrow(from) && wide(to)) ||
                        (wide(from) && narrow(to) && from != DType::kF64);
      EXPECT_EQ(CanConvert(from, to), from == to || both) << Name(from) << " to " << Name(to);
    }
  }
}

}  // namespace
}  // namespace shardwright
