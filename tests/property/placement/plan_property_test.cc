// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>

#include "placement/core/metrics.h"
#include "placement/recovery/recovery.h"
#include "property/cases.h"
#include "random_moe.h"

namespace shardwright::placement {
namespace {

bool IsRefusal(const Error& error) {
  return error.code == Errc::kInfeasible && !error.message.empty();
}

// For any token counts, cluster and previous plan, a strategy returns a plan that keeps the rules
// and the requested threshold, the same plan every time, or an error with the reason.
TEST(StrategyProperty, PlansKeepTheRules) {
  Random random(601);
  int planned = 0;
  const auto strategies = Strategies();
  for (int i = 0; i < kCases; ++i) {
    const Cluster cluster = RandomCluster(&random);
    const auto slots = static_cast<std::uint32_t>(cluster.live_slots());
    const TokenCounts loads = RandomLoads(&random, 1, Between(&random, 1, slots));
    ASSERT_TRUE(Validate(loads, cluster).has_value());
    const Placement current = RandomPlacement(&random, loads, cluster);
    const Placement* now = random.Below(2) == 0 ? nullptr : &current;
    Options options;
    options.copies_min = Between(&random, 1, 2);
    options.copies_may_fall = random.Below(2) == 0;
    options.best_effort = i % 50 == 0 ? 1 : 0;
    const Strategy& strategy = strategies[static_cast<std::size_t>(i) % strategies.size()];
    const auto plan = strategy.plan(loads, cluster, now, options);
    if (!plan) {
      ASSERT_TRUE(IsRefusal(plan.error())) << strategy.name << " " << plan.error().message;
      continue;
    }
    ++planned;
    Rules rules{!plan->owners.has_value(), true, 1, false};
    const Status kept = Validate(plan->placement, loads, cluster, rules);
    ASSERT_TRUE(kept.has_value()) << strategy.name << " " << i << " " << kept.error().message;
    ASSERT_EQ(plan->notes.size(), 1U);
    const Placement& state = plan->owners ? *plan->owners : plan->placement;
    const auto survives = LayerRecovery(state, cluster, 0).certain;
    if (strategy.name == "best" || strategy.name == "lazarus") {
      ASSERT_GE(survives, plan->notes[0].copies_min - 1) << strategy.name << " " << i;
    }
    const auto again = strategy.plan(loads, cluster, now, options);
    ASSERT_EQ(again->placement.slot_expert, plan->placement.slot_expert) << strategy.name;
  }
  EXPECT_GT(planned, kCases / 2);
}

// Bounds hold: no plan is more even than the bound of its slots, nor than the best split of its
// tokens, which is no less even than the mean.
TEST(MetricsProperty, BoundsBound) {
  Random random(602);
  for (int i = 0; i < kCases; ++i) {
    const Cluster cluster = RandomCluster(&random);
    const auto slots = static_cast<std::uint32_t>(cluster.live_slots());
    const TokenCounts loads = RandomLoads(&random, 1, Between(&random, 1, slots));
    const Placement placement = RandomPlacement(&random, loads, cluster);
    const LayerMetrics m = Measure(placement, loads, cluster, 0);
    ASSERT_EQ(m.tokens_lost, 0U);
    ASSERT_GE(m.lp_bound, 1 - 1e-9);
    ASSERT_LE(m.lp_bound, m.imbalance * (1 + 1e-9));
    ASSERT_GE(m.bound, 1 - 1e-9);
    if (m.device_duplicates == 0) {
      ASSERT_LE(m.bound, m.imbalance * (1 + 1e-9)) << i;
    }
    ASSERT_LE(m.inter_node_tokens_least, m.inter_node_tokens * (1 + 1e-9) + 1e-9);
    double sum = 0;
    for (const double load : DeviceLoads(placement, loads, cluster, 0)) sum += load;
    ASSERT_NEAR(sum, static_cast<double>(m.tokens), static_cast<double>(m.tokens) * 1e-9);
  }
}

// Our search is never less even than EPLB with as many slots, unless EPLB puts an expert twice on a
// GPU, and never does so itself.
TEST(BestProperty, NoLessEvenThanEplb) {
  Random random(603);
  Options options;
  options.best_effort = 1;
  for (int i = 0; i < kCases / 20; ++i) {
    const Cluster cluster =
        UniformCluster(Between(&random, 1, 3), Between(&random, 1, 3), Between(&random, 1, 3));
    const auto slots = static_cast<std::uint32_t>(cluster.live_slots());
    const TokenCounts loads = RandomLoads(&random, 1, Between(&random, 1, slots));
    const Placement current = RandomPlacement(&random, loads, cluster);
    const Placement* now = random.Below(2) == 0 ? nullptr : &current;
    const auto best = (*FindStrategy("best"))->plan(loads, cluster, now, options);
    const auto eplb = (*FindStrategy("eplb"))->plan(loads, cluster, nullptr, options);
    ASSERT_TRUE(best.has_value() && eplb.has_value());
    const LayerMetrics ours = Measure(best->placement, loads, cluster, 0);
    const LayerMetrics theirs = Measure(eplb->placement, loads, cluster, 0);
    if (now == nullptr) {
      ASSERT_EQ(ours.device_duplicates, 0U) << i;
    }
    if (theirs.device_duplicates > 0) continue;
    // Fewer moves from an old plan are worth one percent.
    ASSERT_LE(ours.imbalance, theirs.imbalance * (now == nullptr ? 1 + 1e-6 : 1.01)) << i;
  }
}

// Exchanging experts never makes the busiest device busier.
TEST(SmartMoeProperty, ThePeakNeverRises) {
  Random random(604);
  for (int i = 0; i < kCases; ++i) {
    const std::uint32_t devices = Between(&random, 1, 5);
    const std::uint32_t each = Between(&random, 1, 4);
    const Cluster cluster = UniformCluster(devices, 1, each);
    const TokenCounts loads = RandomLoads(&random, 1, devices * each);
    const Placement current = RandomPlacement(&random, loads, cluster);
    const auto plan = (*FindStrategy("smartmoe"))->plan(loads, cluster, &current, {});
    ASSERT_TRUE(plan.has_value());
    ASSERT_TRUE(Validate(plan->placement, loads, cluster, Rules{true, true, 1, true}));
    ASSERT_LE(Measure(plan->placement, loads, cluster, 0).imbalance,
              Measure(current, loads, cluster, 0).imbalance * (1 + 1e-9))
        << i;
  }
}

}  // namespace
}  // namespace shardwright::placement
