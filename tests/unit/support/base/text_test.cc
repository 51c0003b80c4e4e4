// SPDX-License-Identifier: Apache-2.0
#include "support/base/text.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace shardwright {
namespace {

TEST(Text, ShowsNumbers) {
  EXPECT_EQ(Fixed(0.5, 3), "0.500");
  EXPECT_EQ(Fixed(-1.25, 0), "-1");
  EXPECT_EQ(Fixed(std::numeric_limits<double>::infinity(), 2), "inf");
  EXPECT_EQ(Fixed(std::numeric_limits<double>::max(), 1).size(), 311U);
  EXPECT_EQ(Percent(0.125, 1), "12.5 %");
  EXPECT_EQ(Percent(1, 0), "100 %");
}

TEST(Text, CountsThings) {
  EXPECT_EQ(Plural(0, "file"), "0 files");
  EXPECT_EQ(Plural(1, "file"), "1 file");
  EXPECT_EQ(Plural(2, "more file"), "2 more files");
}

TEST(Text, JoinsWords) {
  const std::vector<std::string> none;
  const std::vector<std::string> words = {"a", "", "c"};
  EXPECT_EQ(Joined(none, ", "), "");
  EXPECT_EQ(Joined(words, "|"), "a||c");
}

TEST(Text, NamesTheFirstFew) {
  std::vector<std::string> names = {"1", "2", "3", "4", "5", "6", "7", "8"};
  EXPECT_EQ(FirstFew({}), "");
  EXPECT_EQ(FirstFew(names), "1, 2, 3, 4, 5, 6, 7, 8");
  names.emplace_back("9");
  EXPECT_EQ(FirstFew(names), "1, 2, 3, 4, 5, 6, 7, 8, ... (9 in all)");
}

TEST(Text, TrimsBothEnds) {
  EXPECT_EQ(Trimmed(" \t\r\n\v\fa b \n"), "a b");
  EXPECT_EQ(Trimmed("a"), "a");
  EXPECT_EQ(Trimmed(" \n"), "");
  EXPECT_EQ(Trimmed(""), "");
}

TEST(Text, Quotes) {
  EXPECT_EQ(Quoted("a\"b"), "\"a\"b\"");
  EXPECT_EQ(Quoted(""), "\"\"");
}

TEST(Text, ShowsBytes) {
  const std::vector<std::byte> bytes = {std::byte{0}, std::byte{0x0f}, std::byte{0xa5}};
  EXPECT_EQ(Hex(bytes), "000fa5");
  EXPECT_EQ(Hex(std::span<const std::byte>()), "");
}

}  // namespace
}  // namespace shardwright
