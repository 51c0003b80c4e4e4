// SPDX-License-Identifier: Apache-2.0
#include "support/cli/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "support/cli/exit_code.h"

namespace shardwright::cli {
namespace {

using ::testing::HasSubstr;

TEST(ParseCount, TakesDigitsInRangeOnly) {
  EXPECT_EQ(ParseCount("1", 1, 8).value(), 1U);
  EXPECT_EQ(ParseCount("18446744073709551615", 0, UINT64_MAX).value(), UINT64_MAX);
  for (const char* text :
       {"0", "9", "-1", "+1", " 1", "1 ", "1.0", "0x1", "", "18446744073709551616"}) {
    const auto count = ParseCount(text, 1, 8);
    ASSERT_FALSE(count) << text;
    EXPECT_EQ(count.error().code, Errc::kUsage);
    EXPECT_THAT(count.error().message, HasSubstr("from 1 to 8"));
  }
}

TEST(ParseMemory, RefusesAForgottenUnit) {
  EXPECT_EQ(ParseMemory("2GiB").value(), std::uint64_t{2} << 30);
  EXPECT_EQ(ParseMemory("2G").value(), 2'000'000'000U);
  EXPECT_EQ(ParseMemory("1MiB").value(), kMemoryMinBytes);
  const auto memory = ParseMemory("4");
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().message, "\"4\" is 4 B, at least 1.00 MiB is needed");
}

TEST(ParseMode, TakesRightsToReadAndWrite) {
  for (const auto& [text, mode, umask] : std::vector<std::tuple<const char*, unsigned, unsigned>>{
           {"600", 0600, 077}, {"0640", 0640, 027}, {"0660", 0660, 007}, {"0664", 0664, 002}}) {
    EXPECT_EQ(ParseMode(text).value(), mode) << text;
    EXPECT_EQ(UmaskOf(mode), umask) << text;
  }
  for (const char* text :
       {"", "0", "0400", "0700", "0620", "0601", "1600", "00600", "0o600", "x"}) {
    EXPECT_EQ(ParseMode(text).error().code, Errc::kUsage) << text;
  }
}

TEST(ParseWords, NamesWhatExists) {
  EXPECT_EQ(ParseProgressMode("json").value(), ProgressMode::kJson);
  EXPECT_EQ(ParseColorMode("never").value(), ColorMode::kNever);
  EXPECT_EQ(ParseVerify("replicas").value(), Verify::kReplicas);
  EXPECT_EQ(ParseVerify("readback").value(), Verify::kReadback);
  EXPECT_EQ(ParseVerify("sum").error().message,
            "\"sum\" is not one of none, checksums, replicas, readback");
}

TEST(ExitCode, IsTheValueOfTheErrc) {
  EXPECT_EQ(ExitCode({}), 0);
  EXPECT_EQ(ExitCode(Fail(Errc::kMismatch, "")), 5);
  EXPECT_EQ(ExitCode(Fail(Errc::kStopped, "")), 75);
  EXPECT_EQ(RunState({}), "done");
  EXPECT_EQ(RunState(Fail(Errc::kStopped, "")), "stopped");
  EXPECT_EQ(RunState(Fail(Errc::kIo, "")), "failed");
  EXPECT_EQ(ErrcName(Errc::kInfeasible), "infeasible");
}

}  // namespace
}  // namespace shardwright::cli
