#include "base/bytes.h"

#include <gtest/gtest.h>

#include "base/checked.h"

namespace shardwright {
namespace {

TEST(ParseBytes, ReadsBinaryAndDecimalUnits) {
  EXPECT_EQ(*ParseBytes("0"), 0U);
  EXPECT_EQ(*ParseBytes("512B"), 512U);
  EXPECT_EQ(*ParseBytes("256MiB"), 256U << 20);
  EXPECT_EQ(*ParseBytes("4G"), 4'000'000'000U);
  EXPECT_EQ(*ParseBytes("4GB"), 4'000'000'000U);
}

TEST(ParseBytes, RefusesWhatIsNotASize) {
  for (const char* text : {"", "MiB", "-1", "1.5G", "1 GiB", "1gib", "18446744073709551616",
                           "18446744073709551615K"}) {
    const auto bytes = ParseBytes(text);
    ASSERT_FALSE(bytes) << text;
    EXPECT_EQ(bytes.error().code, Errc::kUsage) << text;
  }
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
