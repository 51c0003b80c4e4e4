#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <limits>

namespace shardwright::internal {

/// `a` if `condition`, else `b`; never a branch, which the ternary operator may become.
constexpr std::uint32_t Choose(bool condition, std::uint32_t a, std::uint32_t b) {
  return b ^ ((a ^ b) & (0U - static_cast<std::uint32_t>(condition)));
}

/// An 8-bit floating type: a sign, `8 - 1 - kMantissa` bits of exponent, kMantissa bits of
/// mantissa. \tparam kBias  subtracted from the stored exponent \tparam kMost  code of the largest
/// finite value \tparam kOver  code of what is larger: infinity where the type has one, else NaN
/// \tparam kNan   code of NaN; 0x80, the place of negative zero, in types that have no such zero
template <unsigned kMantissa, int kBias, std::uint8_t kMost, std::uint8_t kOver, std::uint8_t kNan>
struct Float8 {
  static constexpr bool kNegativeZero = kNan != 0x80;

  static constexpr float Decode(std::uint8_t code) {
    const std::uint8_t magnitude = code & 0x7FU;
    if (!kNegativeZero && code == kNan) return std::numeric_limits<float>::quiet_NaN();
    if (magnitude > kMost) {
      const bool infinite = kOver != kNan && magnitude == kOver;
      const float value = infinite ? std::numeric_limits<float>::infinity()
                                   : std::numeric_limits<float>::quiet_NaN();
      return (code & 0x80U) != 0 ? -value : value;
    }
    const unsigned exponent = magnitude >> kMantissa;
    const unsigned fraction = magnitude & ((1U << kMantissa) - 1U);
    const auto digits = static_cast<float>(exponent == 0 ? fraction : fraction | 1U << kMantissa);
    const float value = digits * PowerOfTwo(static_cast<int>(exponent == 0 ? 1 : exponent) - kBias -
                                            static_cast<int>(kMantissa));
    return (code & 0x80U) != 0 ? -value : value;
  }

  /// Rounds to nearest even.
  static constexpr std::uint8_t Encode(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 24 & 0x80U;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    // Subnormal: adding this number lines the digits up so that the sum is rounded to a whole
    // number of the smallest steps.
    constexpr std::uint32_t kSmallestNormal = static_cast<std::uint32_t>(127 + 1 - kBias) << 23;
    constexpr float kAlign = PowerOfTwo(1 - kBias - static_cast<int>(kMantissa) + 23);
    const std::uint32_t subnormal =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + kAlign) -
        std::bit_cast<std::uint32_t>(kAlign);
    constexpr unsigned kDrop = 23 - kMantissa;
    const std::uint32_t rebased =
        magnitude - (static_cast<std::uint32_t>(127 - kBias) << 23);  // with the type's own bias
    std::uint32_t code = (rebased + (1U << (kDrop - 1)) - 1U + (rebased >> kDrop & 1U)) >> kDrop;
    code = Choose(magnitude < kSmallestNormal, subnormal, code);
    code = Choose(code > kMost, kOver, code);
    code = Choose(magnitude > 0x7F800000U, kNan, code);
    // Where 0x80 is NaN there is one zero, and one NaN.
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

}  // namespace shardwright::internal
