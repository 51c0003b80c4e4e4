// SPDX-License-Identifier: Apache-2.0
#include "support/base/bytes.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "support/base/checked.h"

namespace shardwright {
namespace {

TEST(ParseBytes, ReadsBinaryAndDecimalUnits) {
  EXPECT_EQ(*ParseBytes("0"), 0U);
  EXPECT_EQ(*ParseBytes("512B"), 512U);
  EXPECT_EQ(*ParseBytes("256MiB"), 256U << 20);
  EXPECT_EQ(*ParseBytes("4G"), 4'000'000'000U);
  EXPECT_EQ(*ParseBytes("4GB"), 4'000'000'000U);
}

TEST(ParseBytes, ReadsDecimalNumbers) {
  EXPECT_EQ(*ParseBytes("1.5G"), 1'500'000'000U);
  EXPECT_EQ(*ParseBytes("12.5GB"), 12'500'000'000U);
  EXPECT_EQ(*ParseBytes("62.5MB"), 62'500'000U);
  EXPECT_EQ(*ParseBytes("0.5KiB"), 512U);
  EXPECT_EQ(*ParseBytes("1.0"), 1U);
  EXPECT_EQ(*ParseBytes("0.1GiB"), 107'374'182U);  // 107374182.4
  EXPECT_EQ(*ParseBytes("0.0005K"), 1U);           // half a byte is rounded up
  EXPECT_EQ(*ParseBytes("1.000000000000000001TiB"), std::uint64_t{1} << 40);
  // Exact above the precision of a double.
  EXPECT_EQ(*ParseBytes("9007199.254740993T"), 9'007'199'254'740'993'000U);
  EXPECT_EQ(*ParseBytes("16777215.99999999999TiB"), 18'446'744'073'709'551'605U);
  EXPECT_EQ(*ParseBytes("18446744073709551615"), ~std::uint64_t{0});
}

void ExpectRefused(const Result<std::uint64_t>& parsed, const std::string& text,
                   const std::string& part) {
  ASSERT_FALSE(parsed) << text << " as " << *parsed;
  EXPECT_EQ(parsed.error().code, Errc::kUsage) << text;
  EXPECT_NE(parsed.error().message.find("\"" + text + "\" " + part), std::string::npos)
      << parsed.error().message;
}

TEST(ParseBytes, RefusesWhatIsNotASize) {
  for (const char* text : {"", "MiB", "-1", "-0.5GB", "+1", ".5GB", "nan", "inf", " 1GB", "GB"}) {
    ExpectRefused(ParseBytes(text), text, "is not a size (examples: 256MiB");
  }
  for (const auto& [text, unit] :
       {std::pair("1 GiB", " GiB"), std::pair("1gib", "gib"), std::pair("1e9", "e9"),
        std::pair("1.5e3MB", "e3MB"), std::pair("1.2.3GB", ".3GB"), std::pair("1GB/s", "GB/s"),
        std::pair("0x10", "x10"), std::pair("1,5GB", ",5GB"), std::pair("1GB ", "GB ")}) {
    ExpectRefused(ParseBytes(text), text,
                  "is not a size: unknown unit \"" + std::string(unit) + "\"");
  }
  ExpectRefused(ParseBytes("5.GB"), "5.GB", "is not a size: digits must follow the point");
  ExpectRefused(ParseBytes("1.0000000000000000001GB"), "1.0000000000000000001GB",
                "is not a size: more than 18 digits after the point");
  ExpectRefused(ParseBytes("1.5"), "1.5", "is not a size: it is not a whole number of bytes");
  ExpectRefused(ParseBytes("0.25B"), "0.25B", "is not a size: it is not a whole number of bytes");
  for (const char* text : {"18446744073709551616", "18446744073709551615K", "16777216TiB",
                           "16777215.9999999999999999TiB", "99999999999999999999999999GB",
                           "18446744073.709551616GB"}) {
    ExpectRefused(ParseBytes(text), text, "does not fit in 64 bits");
  }
}

TEST(ParseBandwidth, IsASizeEverySecond) {
  EXPECT_EQ(*ParseBandwidth("12.5GB/s"), 12'500'000'000U);
  EXPECT_EQ(*ParseBandwidth("12.5GB"), 12'500'000'000U);
  EXPECT_EQ(*ParseBandwidth("500MiB/s"), 500U << 20);
  EXPECT_EQ(*ParseBandwidth("1048576/s"), 1U << 20);
  EXPECT_EQ(*ParseBandwidth("0"), 0U);
  for (const char* text : {"", "/s", "fast", "-1GB/s", "nan/s"}) {
    ExpectRefused(ParseBandwidth(text), text,
                  "is not a bandwidth in bytes per second (examples: 12.5GB/s");
  }
  for (const auto& [text, unit] :
       {std::pair("100Gbit/s", "Gbit"), std::pair("100Gb/s", "Gb"), std::pair("1GB/h", "GB/h"),
        std::pair("1GB/s/s", "GB/s"), std::pair("1e9/s", "e9")}) {
    ExpectRefused(
        ParseBandwidth(text), text,
        "is not a bandwidth in bytes per second: unknown unit \"" + std::string(unit) + "\"");
  }
  ExpectRefused(ParseBandwidth("1.5/s"), "1.5/s",
                "is not a bandwidth in bytes per second: it is not a whole number of bytes");
}

TEST(FormatBytes, KeepsThreeDigits) {
  EXPECT_EQ(FormatBytes(512), "512 B");
  EXPECT_EQ(FormatBytes(4'680'000'000), "4.36 GiB");
  EXPECT_EQ(FormatBytes(256U << 20), "256 MiB");
}

TEST(Checked, OverflowIsAnError) {
  EXPECT_EQ(*CheckedMul(1U << 31, 2), 1ULL << 32);
  EXPECT_EQ(CheckedMul(1ULL << 63, 2).error().code, Errc::kBadInput);
  EXPECT_EQ(CheckedAdd(~0ULL, 1).error().code, Errc::kBadInput);
}

}  // namespace
}  // namespace shardwright
