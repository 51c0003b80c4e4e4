// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/overhead.h"

#include <limits>

#include <gtest/gtest.h>

namespace shardwright::partial {
namespace {

TEST(Overhead, StallIsWhatSticksOut) {
  EXPECT_EQ(SaveStall(3, 5), 0);
  EXPECT_EQ(SaveStall(5, 3), 2);
}

TEST(Overhead, Expected) {
  // 1000 iterations, a fault every 500: two faults of 30 s and half an interval each.
  const auto expected = ExpectedOverhead({6, 100, 2, 1.0 / 500, 30}, 1000);
  ASSERT_TRUE(expected);
  EXPECT_DOUBLE_EQ(*expected, 60 + 2 * (30 + 100));
}

TEST(Overhead, BestIntervalOfTheWorkedExample) {
  CheckpointCosts costs{6, 1, 2, 1.0 / 2000, 0};
  const auto best = BestInterval(costs, 0);
  ASSERT_TRUE(best && *best);
  EXPECT_EQ(**best, 110U);
  costs.interval = 110;
  const auto rate = OverheadRate(costs);
  ASSERT_TRUE(rate);
  EXPECT_NEAR(*rate, 0.055 + 0.055, 0.0005);
  costs.save_s = 0.1;
  const auto shorter = BestInterval(costs, 0);
  ASSERT_TRUE(shorter && *shorter);
  EXPECT_EQ(**shorter, 14U);
  costs.interval = 14;
  EXPECT_NEAR(*OverheadRate(costs), 0.014, 0.0005);
}

TEST(Overhead, BestIntervalWaitsForThePersist) {
  CheckpointCosts costs{0, 1, 2, 1.0 / 2000, 0};
  auto best = BestInterval(costs, 7);  // no stall: the persist alone decides
  ASSERT_TRUE(best && *best);
  EXPECT_EQ(**best, 4U);
  best = BestInterval(costs, 0);
  ASSERT_TRUE(best && *best);
  EXPECT_EQ(**best, 1U);
  costs.save_s = 6;
  best = BestInterval(costs, 1000);
  ASSERT_TRUE(best && *best);
  EXPECT_EQ(**best, 500U);
  costs.fault_rate = 0;
  best = BestInterval(costs, 1000);
  ASSERT_TRUE(best);
  EXPECT_FALSE(*best);
}

TEST(Overhead, NoNeighbourOfTheBestIntervalIsBetter) {
  for (int i = 1; i < 400; ++i) {
    CheckpointCosts costs{0.05 * i, 1, 0.7, 1.0 / (37.0 * i), 0};
    const auto best = BestInterval(costs, 0);
    ASSERT_TRUE(best && *best);
    const auto at = [&](double interval) {
      costs.interval = interval;
      return *OverheadRate(costs);
    };
    const double interval = static_cast<double>(**best);
    EXPECT_LE(at(interval), at(interval + 1) + 1e-15);
    if (interval > 1) {
      EXPECT_LE(at(interval), at(interval - 1) + 1e-15);
    }
  }
}

// Eq 14 to 16: partial checkpoints win with the same interval and less stall, and with a smaller
// interval at equal stall per iteration; the restart does not matter.
TEST(Overhead, TwoWaysToWin) {
  const CheckpointCosts full{6, 100, 2, 1.0 / 2000, 0};
  EXPECT_LT(*OverheadRate({1, 100, 2, 1.0 / 2000, 500}), *OverheadRate(full));
  EXPECT_LT(*OverheadRate({3, 50, 2, 1.0 / 2000, 500}), *OverheadRate(full));
}

TEST(Overhead, EffectiveTimeRatio) {
  EXPECT_DOUBLE_EQ(*EffectiveTimeRatio({0, 10, 2, 0, 30}), 1);
  // A stall of 1 s in 20 s, and a fault of 30 + 10 s every 2000 s.
  EXPECT_DOUBLE_EQ(*EffectiveTimeRatio({1, 10, 2, 1.0 / 1000, 30}), 1 / 1.05 / 1.02);
}

TEST(Overhead, WastedWorkOfTheWorkedExample) {
  const auto wasted = WastedWork(2.7, 5, 1, 8);
  ASSERT_TRUE(wasted);
  EXPECT_DOUBLE_EQ(*wasted, 11.7);
}

TEST(Overhead, NonsenseIsRefused) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(OverheadRate({-1, 1, 1, 0, 0}));
  EXPECT_FALSE(OverheadRate({1, 0, 1, 0, 0}));
  EXPECT_FALSE(OverheadRate({1, 1, nan, 0, 0}));
  EXPECT_FALSE(BestInterval({1, 1, 0, 0.1, 0}, 0));
  EXPECT_FALSE(WastedWork(nan, 0, 0, 0));
  EXPECT_FALSE(ExpectedOverhead({1, 1, 1, 0, 0}, 0));
  const auto error = ExpectedOverhead({1, 1, 1, 0, -2}, 1);
  ASSERT_FALSE(error);
  EXPECT_EQ(error.error().code, Errc::kUsage);
  EXPECT_NE(error.error().message.find("time to restart"), std::string::npos);
}

}  // namespace
}  // namespace shardwright::partial
