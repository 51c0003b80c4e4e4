// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "placement/core/metrics.h"
#include "support.h"

namespace shardwright::placement {
namespace {

using Slots = std::vector<std::int32_t>;

Result<StrategyResult> Try(std::string_view strategy, const TokenCounts& loads,
                           const Cluster& cluster, const Options& options = {},
                           const Placement* current = nullptr) {
  return (*FindStrategy(strategy))->plan(loads, cluster, current, options);
}

Slots SlotsOf(std::string_view strategy, const TokenCounts& loads, const Cluster& cluster,
              const Options& options = {}, const Placement* current = nullptr) {
  const auto plan = Try(strategy, loads, cluster, options, current);
  EXPECT_TRUE(plan.has_value()) << plan.error().message;
  return plan ? plan->placement.slot_expert : Slots();
}

TEST(StrategiesTest, UnknownNamesListTheKnownOnes) {
  const auto found = FindStrategy("worst");
  ASSERT_FALSE(found.has_value());
  EXPECT_EQ(found.error().code, Errc::kUsage);
  for (const Strategy& strategy : Strategies()) {
    EXPECT_NE(found.error().message.find(strategy.name), std::string::npos) << strategy.name;
  }
}

// Layers can be drafted in any parts, on any number of ranks.
TEST(StrategiesTest, PartsJoinToTheWhole) {
  std::vector<std::uint64_t> tokens;
  std::vector<std::uint64_t> before;
  for (std::uint64_t i = 0; i < 60; ++i) {
    tokens.push_back(i * i * 7919 % 101 + (i % 12 == 3 ? 150 : 0));
    before.push_back(i * 104729 % 97);
  }
  const TokenCounts loads = LoadsOf(12, tokens);
  const Cluster cluster = UniformCluster(3, 2, 4);
  const Placement current = Try("eplb+", LoadsOf(12, before), cluster)->placement;
  for (const Strategy& strategy : Strategies()) {
    for (const bool fresh : {true, false}) {
      const auto whole = strategy.plan(loads, cluster, fresh ? nullptr : &current, {});
      ASSERT_TRUE(whole.has_value()) << strategy.name << " " << whole.error().message;
      std::vector<StrategyResult> parts;
      for (const auto& [first, last] : {std::pair(0U, 1U), std::pair(1U, 4U), std::pair(4U, 5U)}) {
        const Placement held = LayersOf(current, first, last);
        auto part =
            strategy.draft(LayersOf(loads, first, last), cluster, fresh ? nullptr : &held, {});
        ASSERT_TRUE(part.has_value());
        parts.push_back(*std::move(part));
      }
      const auto joined =
          strategy.finish(Join(std::move(parts)), loads, cluster, fresh ? nullptr : &current, {});
      ASSERT_TRUE(joined.has_value());
      EXPECT_EQ(joined->placement.slot_expert, whole->placement.slot_expert) << strategy.name;
      EXPECT_EQ(joined->notes.size(), 5U);
    }
  }
}

TEST(VanillaTest, RunsOfExpertsAndWholeCopies) {
  const TokenCounts loads = LoadsOf(4, {1, 2, 3, 4});
  EXPECT_EQ(SlotsOf("vanilla", loads, UniformCluster(2, 1, 2)), (Slots{0, 1, 2, 3}));
  // Six GPUs: groups of four and two GPUs that stay idle.
  EXPECT_EQ(SlotsOf("vanilla", loads, UniformCluster(3, 2, 1)), (Slots{0, 1, 2, 3, -1, -1}));
  Options options;
  options.copies_min = 2;
  EXPECT_EQ(SlotsOf("vanilla", loads, UniformCluster(4, 1, 2), options),
            (Slots{0, 1, 2, 3, 0, 1, 2, 3}));
  options.copies_min = 3;
  const auto refused = Try("vanilla", loads, UniformCluster(4, 1, 2), options);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kInfeasible);
}

TEST(VanillaTest, UnevenRunsAreTold) {
  const auto plan = Try("vanilla", LoadsOf(5, {1, 1, 1, 1, 1}), UniformCluster(3, 1, 2));
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->placement.slot_expert, (Slots{0, 1, 2, 3, 4, -1}));
  EXPECT_EQ(plan->warnings.size(), 1U);
}

// Replica counts are (2, 4, 6) on six nodes of two slots.
TEST(SpreadTest, ReplicasAreDealtRoundRobin) {
  EXPECT_EQ(SlotsOf("spread", LoadsOf(3, {10, 20, 30}), UniformCluster(6, 1, 2)),
            (Slots{0, 2, 0, 2, 1, 2, 1, 2, 1, 2, 1, 2}));
}

TEST(CompactTest, NodesAreFilledOneByOne) {
  EXPECT_EQ(SlotsOf("compact", LoadsOf(3, {10, 20, 30}), UniformCluster(6, 1, 2)),
            (Slots{0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2}));
}

TEST(SmartMoeTest, AnExchangeThatHelpsIsMade) {
  const Cluster cluster = UniformCluster(2, 1, 2);
  // 0 1 | 2 3 has 17 and 3; heaviest first gives 9 1 | 8 2.
  EXPECT_EQ(SlotsOf("smartmoe", LoadsOf(4, {9, 8, 2, 1}), cluster), (Slots{0, 3, 1, 2}));
}

TEST(SmartMoeTest, WhatDoesNotLowerThePeakStays) {
  const Cluster cluster = UniformCluster(2, 1, 2);
  const TokenCounts loads = LoadsOf(4, {9, 8, 2, 1});
  Placement current = EmptyPlacement(loads, cluster);
  current.slot_expert = {1, 2, 3, 0};  // as good as it gets, other GPUs
  EXPECT_EQ(SlotsOf("smartmoe", loads, cluster, {}, &current), current.slot_expert);
}

TEST(SmartMoeTest, TooFewSlotsAreRefused) {
  EXPECT_FALSE(Try("smartmoe", LoadsOf(4, {1, 1, 1, 1}), UniformCluster(1, 3, 1)).has_value());
}

// Without network time every expert pays; without compute time none does.
TEST(FasterMoeTest, ShadowsWhileTheModelledTimeFalls) {
  const TokenCounts loads = LoadsOf(4, {100, 10, 10, 10});
  const Cluster cluster = UniformCluster(2, 2, 1);
  Options options;
  options.model.flops = 1e30;
  options.model.network_bytes_per_s = 1;
  const auto none = Try("fastermoe", loads, cluster, options);
  ASSERT_TRUE(none.has_value());
  EXPECT_EQ(none->placement.slot_expert, (Slots{0, 1, 2, 3}));
  EXPECT_EQ(none->owners->slot_expert, (Slots{0, 1, 2, 3}));
  options.model.flops = 1;
  options.model.network_bytes_per_s = 1e30;
  const auto all = Try("fastermoe", loads, cluster, options);
  ASSERT_TRUE(all.has_value());
  // The busiest GPU has 100 tokens; 35, 37.5, 40 with one to three shadows; 32.5 with four.
  EXPECT_EQ(Measure(all->placement, loads, cluster, 0).imbalance, 1);
  EXPECT_EQ(all->owners->slot_expert, (Slots{0, 1, 2, 3}));
}

// H = 4, a = 1, P = 192: a second per token, 32 bytes a token, 64 bytes an expert and way. On two
// GPUs of one expert each with 10 and 2 tokens the first shadow saves 10 - 7 seconds of compute and
// 5 - 1 received tokens, and costs kappa times 64 bytes: it pays from (64 kappa - 128) / 3 bytes/s.
TEST(FasterMoeTest, TheModelIsThePublishedOne) {
  Options options;
  options.model.hidden = 4;
  options.model.inner_ratio = 1;
  options.model.flops = 192;
  options.model.value_bytes = 2;
  const TokenCounts loads = LoadsOf(2, {10, 2});
  const Cluster cluster = UniformCluster(2, 1, 1);
  const auto shadows = [&](double bandwidth, double kappa) {
    options.model.network_bytes_per_s = bandwidth;
    options.model.shadow_kappa = kappa;
    return Measure(Try("fastermoe", loads, cluster, options)->placement, loads, cluster, 0)
               .replicas -
           2;
  };
  EXPECT_EQ(shadows(63, 5), 0U);
  EXPECT_EQ(shadows(65, 5), 1U);
}

TEST(FlexMoeTest, TheHottestExpertGainsReplicas) {
  const TokenCounts loads = LoadsOf(4, {100, 10, 10, 10});
  const Cluster cluster = UniformCluster(1, 4, 2);
  const Slots slots = SlotsOf("flexmoe", loads, cluster);
  EXPECT_EQ(std::count(slots.begin(), slots.end(), 0), 4);
  Options options;
  options.model.flex_threshold = 5;  // nothing is that uneven: 100 * 4 / 130
  EXPECT_EQ(SlotsOf("flexmoe", loads, cluster, options), (Slots{0, -1, 1, -1, 2, -1, 3, -1}));
}

TEST(FlexMoeTest, ColdReplicasMakeRoom) {
  const TokenCounts loads = LoadsOf(2, {10, 100});
  const Cluster cluster = UniformCluster(1, 3, 1);
  Placement current = EmptyPlacement(loads, cluster);
  current.slot_expert = {0, 0, 1};
  const Slots slots = SlotsOf("flexmoe", loads, cluster, {}, &current);
  EXPECT_EQ(std::count(slots.begin(), slots.end(), 1), 2);
}

// Gathers replicas of one expert from two nodes on one when the all-reduce dominates the cost.
TEST(FlexMoeTest, ReplicasAreGatheredOnANode) {
  const TokenCounts loads = LoadsOf(2, {10, 10});
  const Cluster cluster = UniformCluster(2, 2, 1);
  Placement current = EmptyPlacement(loads, cluster);
  current.slot_expert = {0, 1, 0, 1};
  const Slots slots = SlotsOf("flexmoe", loads, cluster, {}, &current);
  EXPECT_EQ(slots[0], slots[1]);
  EXPECT_EQ(slots[2], slots[3]);
}

TEST(LazarusStrategyTest, WhatDoesNotFitIsToldWithTheLargestThatDoes) {
  const TokenCounts loads = LoadsOf(16, std::vector<std::uint64_t>(16, 5));
  const Cluster cluster = UniformCluster(5, 1, 6);  // 30 slots
  Options options;
  options.copies_min = 2;
  const auto refused = Try("lazarus", loads, cluster, options);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kInfeasible);
  EXPECT_NE(refused.error().message.find("allow at most 0 failures"), std::string::npos)
      << refused.error().message;
  options.copies_may_fall = true;
  const auto fallen = Try("lazarus", loads, cluster, options);
  ASSERT_TRUE(fallen.has_value());
  EXPECT_EQ(fallen->notes[0].copies_min, 1U);
}

TEST(LazarusStrategyTest, RacksAreUnitsToo) {
  Cluster cluster = UniformCluster(4, 2, 1);
  cluster.racks = {"a", "b"};
  cluster.nodes[2].rack = cluster.nodes[3].rack = 1;
  const TokenCounts loads = LoadsOf(4, {9, 5, 3, 1});
  Options options;
  options.copies_min = 2;
  options.failure_unit = FailureUnit::kRack;
  const auto plan = Try("lazarus", loads, cluster, options);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(LayerRecovery(plan->placement, cluster, 0, FailureUnit::kRack).certain, 1);
}

TEST(LazarusStrategyTest, DistinctLeavesNoDuplicatesOnANode) {
  const TokenCounts loads = LoadsOf(3, {1, 1, 100});
  const Cluster cluster = UniformCluster(4, 1, 3);
  Options options;
  options.distinct = true;
  const auto plan = Try("lazarus", loads, cluster, options);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(Measure(plan->placement, loads, cluster, 0).device_duplicates, 0U);
  options.distinct = false;
  const auto published = Try("lazarus", loads, cluster, options);
  EXPECT_GT(Measure(published->placement, loads, cluster, 0).device_duplicates, 0U);
}

}  // namespace
}  // namespace shardwright::placement
