// SPDX-License-Identifier: Apache-2.0
#include "support/base/crc32.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright {
namespace {

std::uint32_t CrcOf(std::string_view text) { return Crc32(std::as_bytes(std::span(text))); }

TEST(Crc32, KnownValues) {
  EXPECT_EQ(CrcOf(""), 0U);
  EXPECT_EQ(CrcOf("123456789"), 0xCBF43926U);
}

TEST(Crc32, AgreesWithZlib) {
  std::mt19937_64 random(1);
  for (std::size_t bytes : {1U, 7U, 64U, 1000U, 65537U}) {
    std::string text(bytes, '\0');
    for (char& c : text) c = static_cast<char>(random());
    const auto* data = reinterpret_cast<const Bytef*>(text.data());
    EXPECT_EQ(CrcOf(text), ::crc32(0, data, static_cast<uInt>(bytes)));
  }
}

TEST(Crc32Share, AgreesWithZlibsCombination) {
  std::mt19937_64 random(2);
  std::vector<std::uint64_t> lengths = {0,
                                        1,
                                        2,
                                        2047,
                                        2048,
                                        1 << 22,
                                        0xFFFFFFFE,
                                        0xFFFFFFFF,
                                        0x100000000,
                                        0x100000001,
                                        std::uint64_t{1} << 40};
  for (int i = 0; i < 500; ++i) lengths.push_back(random() >> (random() % 60 + 2));
  for (std::uint64_t length : lengths) {
    const auto first = static_cast<std::uint32_t>(random());
    const auto second = static_cast<std::uint32_t>(random());
    const uLong want = ::crc32_combine64(first, second, static_cast<off_t>(length));
    EXPECT_EQ(Crc32Share(first, length) ^ second, want) << length;
  }
}

TEST(Crc32Share, PiecesInAnyOrderMakeTheWhole) {
  std::mt19937_64 random(3);
  std::string text(100'000, '\0');
  for (char& c : text) c = static_cast<char>(random());
  std::uint32_t whole = 0;
  std::size_t end = text.size();
  while (end > 0) {
    const std::size_t first = end - std::min<std::size_t>(end, random() % 9000);
    whole ^=
        Crc32Share(CrcOf(std::string_view(text).substr(first, end - first)), text.size() - end);
    end = first;
  }
  EXPECT_EQ(whole, CrcOf(text));
}

}  // namespace
}  // namespace shardwright
