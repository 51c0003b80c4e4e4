// SPDX-License-Identifier: Apache-2.0
#include "support/text/text.h"

#include <gtest/gtest.h>

#include <array>
#include <utility>

namespace shardwright::text {
namespace {

TEST(Printable, EscapesWhatSteersATerminal) {
  EXPECT_EQ(Printable("layer.0/weight"), "layer.0/weight");
  EXPECT_EQ(Printable("a\x1b[31mb\n\t\x7f"), "a\\x1b[31mb\\x0a\\x09\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"), "\\xc2\\x9b") << "C1 control";
}

TEST(Printable, EscapesCharactersThatHideOrTurnText) {
  for (const auto& [text, shown] :
       {std::pair("b\u202etxt.exe", "b\\xe2\\x80\\xaetxt.exe"),
        std::pair("\u202a", "\\xe2\\x80\\xaa"),
        std::pair("\u2066a\u2069", "\\xe2\\x81\\xa6a\\xe2\\x81\\xa9"),
        std::pair("\u200e\u200f", "\\xe2\\x80\\x8e\\xe2\\x80\\x8f"),
        std::pair("\u061c", "\\xd8\\x9c"), std::pair("\u200b", "\\xe2\\x80\\x8b"),
        std::pair("\ufeff", "\\xef\\xbb\\xbf"), std::pair("\u2028", "\\xe2\\x80\\xa8"),
        std::pair("\U000e0041", "\\xf3\\xa0\\x81\\x81")}) {
    EXPECT_EQ(Printable(text), shown);
    EXPECT_EQ(VisibleText(text), shown);
  }
  EXPECT_EQ(Printable("\u2010 \u2070 \u0627\u05d0"), "\u2010 \u2070 \u0627\u05d0")
      << "their neighbours, and letters that are written from right to left";
  EXPECT_EQ(VisibleText("a\n\tb\xff"), "a\n\tb\xff");
}

TEST(Printable, KeepsUtf8AndEscapesWhatIsNot) {
  EXPECT_EQ(Printable("größe → 𝛼"), "größe → 𝛼");
  EXPECT_EQ(Printable("\xff\xfe"), "\\xff\\xfe");
  EXPECT_EQ(Printable("\xc0\xaf"), "\\xc0\\xaf") << "overlong";
  EXPECT_EQ(Printable("\xe0\x80\xaf"), "\\xe0\\x80\\xaf") << "overlong in three bytes";
  EXPECT_EQ(Printable("\xf0\x80\x80\xaf"), "\\xf0\\x80\\x80\\xaf") << "and in four";
  EXPECT_EQ(Printable("\xe0\xa0\x80"), "\xe0\xa0\x80") << "the first that needs three";
  EXPECT_EQ(Printable("\xed\xa0\x80"), "\\xed\\xa0\\x80") << "surrogate";
  EXPECT_EQ(Printable("x\xe2\x86"), "x\\xe2\\x86") << "cut off";
}

TEST(Truncate, CountsColumnsAndNotBytes) {
  EXPECT_EQ(Truncate("abcdef", 6), "abcdef");
  EXPECT_EQ(Truncate("abcdef", 5), "abcd…");
  EXPECT_EQ(Truncate("ääää", 4), "ääää");
  EXPECT_EQ(Truncate("ääää", 3), "ää…");
  EXPECT_EQ(Truncate("ab", 1), "…");
}

TEST(Wrap, BreaksAtSpacesOnly) {
  EXPECT_EQ(Wrap("one two three", 7), (std::vector<std::string>{"one two", "three"}));
  EXPECT_EQ(Wrap("a-very-long-word b", 4), (std::vector<std::string>{"a-very-long-word", "b"}));
  EXPECT_EQ(Wrap("one two", 6), (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(Wrap("", 4), (std::vector<std::string>{""}));
}

TEST(RankList, JoinsNeighbours) {
  EXPECT_EQ(RankList(std::array{3}), "rank 3");
  EXPECT_EQ(RankList(std::array{0, 1, 2, 3, 7}), "ranks 0-3,7");
  EXPECT_EQ(RankList(std::array{1, 3}), "ranks 1,3");
}

TEST(Ranges, JoinsNeighbours) {
  EXPECT_EQ(Ranges({}), "none");
  EXPECT_EQ(Ranges({7}), "7");
  EXPECT_EQ(Ranges({5, 0, 4, 3}), "0, 3-5");
  EXPECT_EQ(Ranges({2, 3, 9}), "2-3, 9");
}

TEST(Nearest, FindsSlipsOfTheFingersOnly) {
  const std::vector<std::string> names = {"--threads", "--memory", "--force"};
  EXPECT_EQ(Nearest("--treads", names), "--threads");
  EXPECT_EQ(Nearest("--froce", names), "--force");
  EXPECT_EQ(Nearest("--memroy", names), "--memory");
  EXPECT_EQ(Nearest("--emmoyr", names), "--memory") << "two exchanges are two slips";
  EXPECT_EQ(Nearest("--something-else", names), "");
  EXPECT_EQ(Nearest(std::string(1 << 20, 'x'), names), "");
}

TEST(FormatSeconds, KeepsTwoOrThreeDigits) {
  EXPECT_EQ(FormatSeconds(0), "0.00 s");
  EXPECT_EQ(FormatSeconds(-1), "0.00 s");
  EXPECT_EQ(FormatSeconds(0.42), "0.42 s");
  EXPECT_EQ(FormatSeconds(2.13), "2.1 s");
  EXPECT_EQ(FormatSeconds(9.99), "10 s");
  EXPECT_EQ(FormatSeconds(99.4), "99 s");
  EXPECT_EQ(FormatSeconds(99.6), "1 min 40 s");
  EXPECT_EQ(FormatSeconds(3599.6), "1 h 0 min");
  EXPECT_EQ(FormatSeconds(11520), "3 h 12 min");
}

}  // namespace
}  // namespace shardwright::text
