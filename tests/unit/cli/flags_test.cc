#include "cli/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/exit_code.h"

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

TEST(ParseWords, NamesWhatExists) {
  EXPECT_EQ(ParseProgressMode("json").value(), ProgressMode::kJson);
  EXPECT_EQ(ParseColorMode("never").value(), ColorMode::kNever);
  EXPECT_EQ(ParseVerify("replicas").value(), Verify::kReplicas);
  EXPECT_EQ(ParseVerify("readback").value(), Verify::kReadback);
  EXPECT_EQ(ParseVerify("sum").error().message,
            "\"sum\" is none of none, sums, replicas, readback");
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
