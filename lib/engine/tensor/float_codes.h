// SPDX-License-Identifier: Apache-2.0
// Converts between the bits of 16-bit or 8-bit floating types and those of float. All
// functions are constexpr and handle NaN as bits, so that every compiler and processor
// gives the same bits. They compute all cases and choose one without branches, so that
// compilers can vectorize loops over them.

#pragma once

#include <bit>
#include <cstdint>

namespace shardwright::codes {

/// Returns condition ? a : b, without the branch that the ternary operator may become.
constexpr std::uint32_t Choose(bool condition, std::uint32_t a, std::uint32_t b) {
  return b ^ ((a ^ b) & (0U - static_cast<std::uint32_t>(condition)));
}

inline constexpr std::uint32_t kInfinity = 0x7F800000U;
inline constexpr std::uint32_t kQuietNan = 0x7FC00000U;

constexpr float FromBf16(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

/// Rounds to nearest even. Every NaN becomes the same quiet NaN, as in torch.
constexpr std::uint16_t ToBf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const bool nan = (bits & 0x7FFFFFFFU) > kInfinity;
  return static_cast<std::uint16_t>(nan ? 0x7FC0U : rounded);
}

constexpr float FromF16(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t{half & 0x8000U} << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  const auto subnormal = std::bit_cast<std::uint32_t>(
      static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24F);
  std::uint32_t bits = (magnitude << 13) + (112U << 23);
  bits = Choose(magnitude < 0x0400U, subnormal, bits);
  bits = Choose(magnitude >= 0x7C00U, kInfinity | ((magnitude & 0x3FFU) << 13), bits);
  return std::bit_cast<float>(sign | bits);
}

/// Rounds to nearest even.
constexpr std::uint16_t ToF16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  // Subnormal: adding 0.5 aligns the 24-bit mantissa
  // so that the FPU rounds to nearest even at 2^-24.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000U;
  std::uint32_t half = (magnitude - (112U << 23) + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
  half = Choose(magnitude < 0x38800000U, subnormal, half);
  half = Choose(magnitude >= 0x477FF000U, 0x7C00U, half);  // rounds to 65536 or more
  half = Choose(magnitude > kInfinity, 0x7E00U, half);
  return static_cast<std::uint16_t>(sign | half);
}

/// An 8-bit float: a sign, `8 - 1 - kMantissa` exponent bits and kMantissa mantissa bits.
/// \tparam kBias  subtracted from the stored exponent \tparam kMost  code of the largest
///        finite value \tparam kOver  code of larger values: infinity, or NaN if the
///        type has none \tparam kNan  code of NaN; 0x80 if there is no negative zero
template <unsigned kMantissa, int kBias, std::uint8_t kMost, std::uint8_t kOver, std::uint8_t kNan>
struct Float8 {
  static constexpr bool kNegativeZero = kNan != 0x80;

  /// Returns the bits of the float.
  static constexpr std::uint32_t DecodeBits(std::uint8_t code) {
    const std::uint8_t magnitude = code & 0x7FU;
    if (!kNegativeZero && code == kNan) return kQuietNan;
    const std::uint32_t sign = std::uint32_t{code & 0x80U} << 24;
    if (magnitude > kMost) {
      const bool infinite = kOver != kNan && magnitude == kOver;
      return sign | (infinite ? kInfinity : kQuietNan);
    }
    const unsigned exponent = magnitude >> kMantissa;
    const unsigned fraction = magnitude & ((1U << kMantissa) - 1U);
    const auto digits = static_cast<float>(exponent == 0 ? fraction : fraction | 1U << kMantissa);
    const float value = digits * PowerOfTwo(static_cast<int>(exponent == 0 ? 1 : exponent) - kBias -
                                            static_cast<int>(kMantissa));
    return sign | std::bit_cast<std::uint32_t>(value);
  }

  static constexpr float Decode(std::uint8_t code) {
    return std::bit_cast<float>(DecodeBits(code));
  }

  /// Rounds to nearest even.
  static constexpr std::uint8_t Encode(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 24 & 0x80U;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    // Subnormal: adding kAlign aligns the digits so that the
    // sum is rounded to a multiple of the type's smallest step.
    constexpr std::uint32_t kSmallestNormal = static_cast<std::uint32_t>(127 + 1 - kBias) << 23;
    constexpr float kAlign = PowerOfTwo(1 - kBias - static_cast<int>(kMantissa) + 23);
    const std::uint32_t subnormal =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + kAlign) -
        std::bit_cast<std::uint32_t>(kAlign);
    constexpr unsigned kDrop = 23 - kMantissa;
    const std::uint32_t rebased =
        magnitude - (static_cast<std::uint32_t>(127 - kBias) << 23);  // with the type's bias
    std::uint32_t code = (rebased + (1U << (kDrop - 1)) - 1U + (rebased >> kDrop & 1U)) >> kDrop;
    code = Choose(magnitude < kSmallestNormal, subnormal, code);
    code = Choose(code > kMost, kOver, code);
    code = Choose(magnitude > kInfinity, kNan, code);
    // Types with NaN at 0x80 have no negative zero and one NaN.
    const bool signs = kNegativeZero || (code != 0 && code != kNan);
    return static_cast<std::uint8_t>(code | Choose(signs, sign, 0));
  }

 private:
  static constexpr float PowerOfTwo(int exponent) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
  }
};

using Float8E4M3 = Float8<3, 7, 0x7E, 0x7E, 0x7F>;
using Float8E5M2 = Float8<2, 15, 0x7B, 0x7C, 0x7F>;
using Float8E4M3Fnuz = Float8<3, 8, 0x7F, 0x80, 0x80>;
using Float8E5M2Fnuz = Float8<2, 16, 0x7F, 0x80, 0x80>;

}  // namespace shardwright::codes
