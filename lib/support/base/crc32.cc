// SPDX-License-Identifier: Apache-2.0
#include "support/base/crc32.h"

#include <array>

#include <isa-l/crc.h>

namespace shardwright {

namespace {

// Polynomials over GF(2) modulo the CRC's, bit-reflected: the top bit is the coefficient of x^0.
constexpr std::uint32_t kModulus = 0xEDB88320U;
constexpr std::uint32_t kOne = 0x80000000U;

constexpr std::uint32_t TimesX(std::uint32_t a) {
  return (a >> 1) ^ ((a & 1U) != 0 ? kModulus : 0);
}

// Maps the four bits that a multiplication by x^4 shifts out to their remainder.
constexpr std::array<std::uint32_t, 16> MakeFold() {
  std::array<std::uint32_t, 16> fold{};
  for (std::uint32_t i = 0; i < 16; ++i) {
    fold[i] = TimesX(TimesX(TimesX(TimesX(i))));
  }
  return fold;
}
constexpr std::array<std::uint32_t, 16> kFold = MakeFold();

std::uint32_t Times(std::uint32_t a, std::uint32_t b) {
  // multiples[n] is a times the polynomial of the nibble n (its bit 3 is x^0).
  std::array<std::uint32_t, 16> multiples{};
  multiples[8] = a;
  multiples[4] = TimesX(a);
  multiples[2] = TimesX(multiples[4]);
  multiples[1] = TimesX(multiples[2]);
  for (std::uint32_t i = 3; i < 16; ++i) {
    const std::uint32_t low = i & (~i + 1);
    multiples[i] = multiples[i ^ low] ^ multiples[low];
  }
  std::uint32_t product = 0;
  for (unsigned shift = 0; shift < 32; shift += 4) {
    product = (product >> 4) ^ kFold[product & 15U] ^ multiples[(b >> shift) & 15U];
  }
  return product;
}

constexpr unsigned kDigitBits = 11;
constexpr std::uint64_t kDigits = std::uint64_t{1} << kDigitBits;

// powers[j][d] = x^(8 d 2^(11 j)).
using Powers = std::array<std::array<std::uint32_t, kDigits>, 3>;

Powers MakePowers() {
  Powers powers{};
  std::uint32_t step = kOne >> 8;
  for (auto& digit : powers) {
    digit[0] = kOne;
    for (std::uint64_t d = 1; d < kDigits; ++d) digit[d] = Times(digit[d - 1], step);
    step = Times(digit[kDigits - 1], step);
  }
  return powers;
}

}  // namespace

std::uint32_t Crc32(std::span<const std::byte> data) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(data.data());
  return crc32_gzip_refl(0, bytes, data.size());
}

std::uint32_t Crc32Share(std::uint32_t crc, std::uint64_t bytes_after) {
  static const Powers kPowers = MakePowers();
  // The modulus is primitive: powers of x repeat after 2^32 - 1 steps.
  const std::uint64_t exponent = bytes_after % 0xFFFFFFFFU;
  for (unsigned j = 0; j < kPowers.size(); ++j) {
    const std::uint64_t digit = (exponent >> (j * kDigitBits)) & (kDigits - 1);
    if (digit != 0) crc = Times(crc, kPowers[j][digit]);
  }
  return crc;
}

}  // namespace shardwright
