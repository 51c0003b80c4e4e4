// SPDX-License-Identifier: Apache-2.0
#include "partial/optimizer_steps/square_roots.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "support/base/text.h"

namespace shardwright::optimizer_steps {
namespace {

constexpr std::uint32_t kKeyMask = 0x00FFFFFFU;
constexpr std::uint32_t kOne = 0x3F800000U;      // bits of 1.0
constexpr std::uint32_t kLargest = 0x7F7FFFFFU;  // bits of the largest finite number
constexpr std::uint32_t kCorrect = 0x55555555U;  // 16 times code 1

static_assert(std::endian::native == std::endian::little);

std::string HexOf(std::uint32_t bits) {
  const std::uint32_t big_endian = __builtin_bswap32(bits);
  return "0x" + Hex(std::as_bytes(std::span(&big_endian, 1)));
}

Status CheckLast(std::uint32_t last) {
  last &= ~RootTable::kSubnormals;
  if (last <= kLargest && last >= kOne + kKeyMask) return {};
  return BadInput("table of square roots: expected an end from ", HexOf(kOne + kKeyMask), " to ",
                  HexOf(kLargest), ", found ", HexOf(last));
}

}  // namespace

Result<RootTable> RootTable::FromRoots(std::span<const float> roots, std::uint32_t last) {
  if (roots.size() != kRoots) {
    return BadInput("table of square roots: ", kRoots, " entries expected, found ", roots.size());
  }
  SW_TRY(CheckLast(last));
  std::vector<std::uint32_t> words(kRoots / 16, 0);
  for (std::uint32_t i = 0; i < kRoots; ++i) {
    const std::uint32_t bits = kOne + i;
    const auto correct = std::bit_cast<std::uint32_t>(std::sqrt(std::bit_cast<float>(bits)));
    const std::uint32_t code = std::bit_cast<std::uint32_t>(roots[i]) - correct + 1;
    if (code > 2) {
      return BadInput("square root of ", HexOf(bits), ": ",
                      HexOf(std::bit_cast<std::uint32_t>(roots[i])), " differs from ",
                      HexOf(correct), " by more than one unit in the last place");
    }
    const std::uint32_t key = bits & kKeyMask;
    words[key / 16] |= code << (2 * (key % 16));
  }
  return RootTable(std::move(words), last);
}

Result<RootTable> RootTable::FromBytes(std::span<const std::byte> bytes, std::uint32_t last) {
  if (bytes.size() != kBytes) {
    return BadInput("table of square roots: ", kBytes, " bytes expected, found ", bytes.size());
  }
  SW_TRY(CheckLast(last));
  std::vector<std::uint32_t> words(kRoots / 16);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  const auto bad = std::find_if(words.begin(), words.end(), [](std::uint32_t word) {
    return (word & (word >> 1) & kCorrect) != 0;  // code 3 is invalid
  });
  if (bad != words.end()) {
    return BadInput("table of square roots: invalid code near root ", 16 * (bad - words.begin()));
  }
  return RootTable(std::move(words), last);
}

bool RootTable::IsCorrect() const {
  return std::all_of(words_.begin(), words_.end(),
                     [](std::uint32_t word) { return word == kCorrect; });
}

}  // namespace shardwright::optimizer_steps
