// SPDX-License-Identifier: Apache-2.0
#include "support/cli/meter.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace shardwright::cli {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

TEST(ProgressMeter, SaysOnlyWhatIsKnown) {
  ProgressMeter meter;
  meter.Start("plan", 0);
  EXPECT_EQ(meter.Text(), "plan");
  meter.Update(0, 0, 1);
  EXPECT_EQ(meter.Text(), "plan");
  EXPECT_LT(meter.seconds_left(), 0);
  meter.Update(10 * kMiB, 0, 2);
  EXPECT_EQ(meter.Text().substr(0, 14), "plan: 10.0 MiB");
  EXPECT_LT(meter.seconds_left(), 0);
}

TEST(ProgressMeter, TellsRateAndTimeLeft) {
  ProgressMeter meter;
  meter.Start("write", 100);
  meter.Update(25 * kMiB, 100 * kMiB, 101);
  EXPECT_EQ(meter.Text(), "write: 25% (25.0 MiB of 100 MiB), 25.0 MiB/s, 3.0 s left");
  meter.Update(50 * kMiB, 100 * kMiB, 102);
  EXPECT_NEAR(meter.rate(), 25.0 * kMiB, 1);
  EXPECT_NEAR(meter.seconds_left(), 2, 1e-6);
}

TEST(ProgressMeter, CountsFilesWhereThereAreNoBytes) {
  ProgressMeter meter;
  meter.Start("scan", 10);
  meter.UpdateFiles(0, 32768, 10);
  EXPECT_EQ(meter.Text(), "scan: 0% (0 of 32768 files)");
  meter.UpdateFiles(8192, 32768, 12);
  EXPECT_EQ(meter.Text(), "scan: 25% (8192 of 32768 files), 4096 files/s, 6.0 s left");
  EXPECT_NEAR(meter.seconds_left(), 6, 1e-6);
  const nlohmann::json line = nlohmann::json::parse(meter.Json(12));
  EXPECT_EQ(line["files_done"], 8192);
  EXPECT_EQ(line["files_total"], 32768);
  EXPECT_EQ(line["files_per_second"], 4096.0);
  EXPECT_EQ(line["seconds_left"], 6.0);
  EXPECT_EQ(line["bytes_done"], 0);
  meter.Update(50 * kMiB, 100 * kMiB, 13);
  EXPECT_EQ(meter.Text().substr(0, 32), "scan: 50% (50.0 MiB of 100 MiB),");
}

TEST(ProgressMeter, FollowsAChangeOfRate) {
  ProgressMeter meter;
  meter.Start("write", 0);
  meter.Update(100 * kMiB, 1000 * kMiB, 1);
  std::uint64_t done = 100 * kMiB;
  for (int second = 2; second <= 20; ++second) {
    done += 10 * kMiB;
    meter.Update(done, 1000 * kMiB, second);
  }
  EXPECT_GT(meter.rate(), 10.0 * kMiB);
  EXPECT_LT(meter.rate(), 14.0 * kMiB) << "old seconds still weigh too much";
}

TEST(ProgressMeter, CountsBytesOfSamplesThatAreTooShort) {
  ProgressMeter meter;
  meter.Start("write", 0);
  for (int i = 1; i <= 100; ++i) {
    meter.Update(static_cast<std::uint64_t>(i) * kMiB, 200 * kMiB, i * 0.01);
  }
  EXPECT_NEAR(meter.rate(), 100.0 * kMiB, 2.0 * kMiB);
}

TEST(ProgressMeter, SaysHundredPercentOnlyWhenDone) {
  ProgressMeter meter;
  meter.Start("write", 0);
  meter.Update(1000 * kMiB - 1, 1000 * kMiB, 10);
  EXPECT_EQ(meter.Text().substr(0, 10), "write: 99%");
  meter.Update(1000 * kMiB, 1000 * kMiB, 11);
  EXPECT_EQ(meter.Text().substr(0, 11), "write: 100%");
}

TEST(ProgressMeter, JsonHasNullForTheUnknown) {
  ProgressMeter meter;
  meter.Start("plan\xff", 5);
  nlohmann::json line = nlohmann::json::parse(meter.Json(7));
  EXPECT_EQ(line["event"], "progress");
  EXPECT_EQ(line["seconds"], 2.0);
  EXPECT_TRUE(line["bytes_total"].is_null());
  EXPECT_TRUE(line["bytes_per_second"].is_null());
  EXPECT_TRUE(line["files_total"].is_null());
  EXPECT_TRUE(line["files_per_second"].is_null());
  EXPECT_TRUE(line["seconds_left"].is_null());
  meter.Update(4, 8, 7);
  line = nlohmann::json::parse(meter.Json(7));
  EXPECT_EQ(line["bytes_done"], 4);
  EXPECT_EQ(line["bytes_total"], 8);
  EXPECT_EQ(line["bytes_per_second"], 2.0);
  EXPECT_EQ(line["seconds_left"], 2.0);
}

}  // namespace
}  // namespace shardwright::cli
