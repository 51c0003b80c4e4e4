// SPDX-License-Identifier: Apache-2.0
#include "files/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace shardwright {
namespace {

using std::string_literals::operator""s;

TEST(Utf8, AcceptsWellFormedText) {
  for (const std::string& text : {""s, "plain"s, "longer than eight bytes of ASCII"s, "\0"s,
                                  "\xC2\x80"s, "\xDF\xBF"s, "\xE0\xA0\x80"s, "\xEF\xBF\xBF"s,
                                  "\xF0\x90\x80\x80"s, "\xF4\x8F\xBF\xBF"s, "12345678\xC3\xBC"s}) {
    EXPECT_TRUE(IsUtf8(text, Surrogates::kRefuse)) << text;
  }
}

TEST(Utf8, RefusesMalformedText) {
  for (const std::string& text :
       {"\x80"s, "\xC0\x80"s, "\xC1\xBF"s, "\xC2"s, "\xC2x"s, "\xE0\x9F\xBF"s, "\xE1\x80"s,
        "\xF0\x8F\xBF\xBF"s, "\xF4\x90\x80\x80"s, "\xF5\x80\x80\x80"s, "\xFF"s, "12345678\xC3"s}) {
    EXPECT_FALSE(IsUtf8(text, Surrogates::kRefuse));
    EXPECT_FALSE(IsUtf8(text, Surrogates::kAllow));
  }
}

TEST(Utf8, LoneSurrogatesPassWhereTheyMay) {
  EXPECT_FALSE(IsUtf8("\xED\xA0\x80", Surrogates::kRefuse));
  EXPECT_TRUE(IsUtf8("\xED\xA0\x80", Surrogates::kAllow));
  EXPECT_TRUE(IsUtf8("\xED\x9F\xBF", Surrogates::kRefuse));
}

}  // namespace
}  // namespace shardwright
