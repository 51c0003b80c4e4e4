// SPDX-License-Identifier: Apache-2.0
#include "fuzz/mutate/mutate.h"

namespace shardwright::fuzz {

std::uint64_t Chance::Odd() {
  const std::uint64_t power = std::uint64_t{1} << Below(64);
  return OneIn(4) ? Below(4) : power + Below(3) - 1;
}

std::string Little(std::uint64_t number, std::size_t bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes; ++i) text += static_cast<char>(number >> (8 * i) & 0xff);
  return text;
}

std::uint64_t Number(std::string_view little_endian) {
  std::uint64_t number = 0;
  for (std::size_t i = little_endian.size(); i-- > 0;) {
    number = number * 256 + static_cast<unsigned char>(little_endian[i]);
  }
  return number;
}

}  // namespace shardwright::fuzz
