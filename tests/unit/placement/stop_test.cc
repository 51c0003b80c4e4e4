// SPDX-License-Identifier: Apache-2.0
// Stopped planning ends with kStopped at every point, and never returns an incomplete plan.

#include <gtest/gtest.h>

#include <atomic>
#include <utility>

#include "placement/verify/verify.h"
#include "support.h"

namespace shardwright::placement {
namespace {

/// Requests a stop from the n-th query on, and counts the queries.
class Limit {
 public:
  explicit Limit(std::uint64_t questions) : left_(static_cast<std::int64_t>(questions)) {}
  StopCheck check() {
    return [this] { return left_.fetch_sub(1) <= 0; };
  }
  bool reached() const { return left_.load() < 0; }

 private:
  std::atomic<std::int64_t> left_;
};

TokenCounts Skewed(std::uint32_t experts, std::uint32_t layers, std::uint64_t seed) {
  std::vector<std::uint64_t> tokens;
  for (std::uint64_t i = 0; i < std::uint64_t{experts} * layers; ++i) {
    tokens.push_back((i * i * 7919 + seed * 104729) % 101 + (i % experts == seed % 5 ? 250 : 0));
  }
  return LoadsOf(experts, tokens);
}

TEST(StopTest, EveryStrategyEndsWhereverItIsStopped) {
  const TokenCounts loads = Skewed(12, 3, 1);
  const Cluster cluster = UniformCluster(3, 2, 5);
  const Placement current =
      (*FindStrategy("eplb+"))->plan(Skewed(12, 3, 4), cluster, nullptr, {})->placement;
  for (const Strategy& strategy : Strategies()) {
    for (const Objective objective : {Objective::kBalance, Objective::kMixed}) {
      Options options;
      options.objective = objective;
      const auto whole = strategy.plan(loads, cluster, &current, options);
      ASSERT_TRUE(whole) << strategy.name << ": " << whole.error().message;
      // Without a stop in between the plan is the same: the check itself changes nothing.
      std::uint64_t questions = 0;
      bool done = false;
      while (!done) {
        Limit limit(questions);
        options.stop = limit.check();
        const auto plan = strategy.plan(loads, cluster, &current, options);
        done = !limit.reached();
        if (done) {
          ASSERT_TRUE(plan) << strategy.name << ": " << plan.error().message;
          EXPECT_EQ(plan->placement.slot_expert, whole->placement.slot_expert) << strategy.name;
        } else {
          ASSERT_FALSE(plan) << strategy.name << " after " << questions << " questions";
          EXPECT_EQ(plan.error().code, Errc::kStopped) << plan.error().message;
        }
        questions += 1 + questions / 16;
      }
      EXPECT_GT(questions, loads.layers) << strategy.name << " asks too seldom";
    }
  }
}

TEST(StopTest, JudgingEndsWhereverItIsStopped) {
  const TokenCounts loads = Skewed(12, 3, 1);
  const Cluster cluster = UniformCluster(5, 2, 4);
  const Placement current =
      (*FindStrategy("spread"))->plan(Skewed(12, 3, 4), cluster, nullptr, {})->placement;
  for (const bool forward : {false, true}) {
    std::uint64_t questions = 0;
    bool done = false;
    while (!done) {
      auto plan = (*FindStrategy("best"))->plan(loads, cluster, &current, {});
      ASSERT_TRUE(plan);
      Limit limit(questions);
      VerifyOptions options;
      options.forward = forward;
      options.stop = limit.check();
      const auto verified = VerifyPlan("best", *std::move(plan), loads, cluster, &current, options);
      done = !limit.reached();
      EXPECT_EQ(verified.has_value(), done) << questions;
      if (!verified) {
        EXPECT_EQ(verified.error().code, Errc::kStopped) << verified.error().message;
      }
      questions += 1 + questions / 16;
    }
    EXPECT_GT(questions, loads.layers);
  }
}

TEST(StopTest, EveryMethodOfRecoveryEnds) {
  std::vector<UnitSet> sets;
  for (std::uint32_t i = 0; i < 40; ++i) {
    UnitSet& set = sets.emplace_back(24);
    for (std::uint32_t j = 0; j < 3; ++j) set.Add((i * 7 + j * 11 + i * j) % 24);
  }
  for (const auto method :
       {RecoveryMethod::kFrontier, RecoveryMethod::kEnumeration, RecoveryMethod::kMonteCarlo}) {
    RecoveryOptions options;
    options.force = method;
    options.failures_max = 24;
    options.samples = 2'000'000'000;  // minutes, unless the stop is seen
    Limit limit(10);
    options.stop = limit.check();
    (void)SolveRecovery(sets, 24, options);
    EXPECT_TRUE(limit.reached()) << Name(method);
  }
}

}  // namespace
}  // namespace shardwright::placement
