// SPDX-License-Identifier: Apache-2.0
#include "partial/report/sends_page.h"

#include <gtest/gtest.h>

#include <string>

#include "unit/support/html/count.h"

namespace shardwright::partial {
namespace {

using html::Count;

TEST(SendsPage, ShowsSendsAboveIdleRanks) {
  const auto page =
      SendsPage(R"({"now":9000000000,"snapshots":[[5,1000000000],[6,5000000000]],)"
                R"("sends":[[1500000000,3145728,0],[1600000000,1048576,0],[3000000000,1048576,1],)"
                R"([4900000000,2097152,2],[6000000000,1048576,3]],)"
                R"("ranks":[{"rank":0,"idle":[[1400000000,1700000000]]},{"rank":3,"idle":[]}]})",
                "unix:/a<b");
  ASSERT_TRUE(page) << page.error().message;
  EXPECT_EQ(Count(*page, "unix:/a&lt;b"), 1U);
  // One bar for each slice and kind; bytes sent at about one time are one bar or two.
  EXPECT_EQ(Count(*page, "class=\"bar b0\""), 2U);
  for (const char* style : {"bar b1", "bar b2", "bar b3", "bar b-row"}) {
    EXPECT_EQ(Count(*page, std::string("class=\"") + style + "\""), 1U) << style;
  }
  EXPECT_EQ(Count(*page, ">rank 3</text>"), 1U);
  EXPECT_EQ(Count(*page, ">snapshot 6</text>"), 1U);
  EXPECT_EQ(Count(*page, "<b>8.00 MiB</b>"), 1U);
  EXPECT_EQ(Count(*page, "<b>50.0 %</b>"), 1U) << "four of eight MiB";
}

TEST(SendsPage, RefusesWhatIsNone) {
  EXPECT_EQ(SendsPage(R"({"snapshots":[],"sends":[],"ranks":[]})", "a").error().code,
            Errc::kNotFound);
  for (const char* text :
       {"", "[]", "{}", R"({"snapshots":[],"sends":[[1,2]],"ranks":[]})",
        R"({"snapshots":[],"sends":[[1,2,4]],"ranks":[]})",
        R"({"snapshots":[],"sends":[[-1,2,0]],"ranks":[]})",
        R"({"snapshots":[[1]],"sends":[[1,2,0]],"ranks":[]})",
        R"({"snapshots":[],"sends":[[1,2,0]],"ranks":[{"idle":[]}]})",
        R"({"snapshots":[],"sends":[[1,2,0]],"ranks":[{"rank":0,"idle":[[1]]}]})"}) {
    const auto page = SendsPage(text, "a");
    ASSERT_FALSE(page) << text;
    EXPECT_EQ(page.error().code, Errc::kBadInput) << text;
  }
}

}  // namespace
}  // namespace shardwright::partial
