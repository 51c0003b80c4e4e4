// SPDX-License-Identifier: Apache-2.0
#include "placement/strategy/eplb.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "placement/core/metrics.h"
#include "support.h"

namespace shardwright::placement {
namespace {

using Slots = std::vector<std::int32_t>;

const std::vector<std::uint64_t> kPublished{90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86};

StrategyResult Planned(std::string_view strategy, const TokenCounts& loads, const Cluster& cluster,
                       const Options& options, const Placement* current = nullptr) {
  auto plan = (*FindStrategy(strategy))->plan(loads, cluster, current, options);
  EXPECT_TRUE(plan.has_value()) << plan.error().message;
  return plan ? *std::move(plan) : StrategyResult();
}

TEST(EplbTest, PublishedExample) {
  const TokenCounts loads = LoadsOf(12, kPublished);
  const Cluster cluster = UniformCluster(2, 4, 2);
  Options options;
  options.eplb_groups = 4;
  const Placement plan = Planned("eplb", loads, cluster, options).placement;
  EXPECT_EQ(plan.slot_expert, (Slots{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1}));
  EXPECT_NEAR(Measure(plan, loads, cluster).imbalance_mean, 1.208, 0.0005);
  options.eplb_policy = EplbPolicy::kGlobal;
  const Placement global = Planned("eplb", loads, cluster, options).placement;
  EXPECT_NEAR(Measure(global, loads, cluster).imbalance_mean, 1.073, 0.0005);
}

TEST(EplbTest, TiesGoToTheLowestExpertAndBin) {
  // Equal loads: experts 0 and 1 get the spare slots; the heavier single replicas are packed first.
  EXPECT_EQ(EplbCounts(std::vector<float>{4, 4, 4, 4}, 6),
            (std::vector<std::uint32_t>{2, 2, 1, 1}));
  EXPECT_EQ(EplbLayer(std::vector<std::uint64_t>{4, 4, 4, 4}, {6, 1, 1, 2}, false),
            (Slots{2, 0, 0, 3, 1, 1}));
  EXPECT_EQ(EplbCounts(std::vector<float>{0, 0}, 5), (std::vector<std::uint32_t>{4, 1}));
}

TEST(EplbTest, ASlotPerGpuKeepsTheOrderOfTheReplicas) {
  EXPECT_EQ(EplbLayer(std::vector<std::uint64_t>{1, 9, 2}, {5, 1, 1, 5}, false),
            (Slots{0, 1, 2, 1, 1}));
}

TEST(EplbTest, WhatTheAlgorithmNeedsIsAsked) {
  const TokenCounts loads = LoadsOf(12, kPublished);
  Options options;
  const auto refused = [&](const Cluster& cluster, const std::string& part) {
    const auto plan = (*FindStrategy("eplb"))->plan(loads, cluster, nullptr, options);
    ASSERT_FALSE(plan.has_value()) << part;
    EXPECT_EQ(plan.error().code, Errc::kInfeasible);
    EXPECT_NE(plan.error().message.find(part), std::string::npos) << plan.error().message;
  };
  Cluster uneven = UniformCluster(2, 4, 2);
  uneven.devices[3].slots = 3;
  refused(uneven, "equal slots");
  refused(UniformCluster(1, 4, 2), "12 experts do not fit in 8 live slots");
  options.eplb_groups = 5;
  refused(UniformCluster(2, 4, 2), "not a multiple of 5 groups");
  options.eplb_groups = 3;
  options.eplb_policy = EplbPolicy::kHierarchical;
  refused(UniformCluster(2, 4, 2), "multiple of 2 nodes");
}

TEST(EplbTest, DeadNodesAreLeftOut) {
  Cluster cluster = UniformCluster(3, 4, 2);
  cluster.nodes[1].alive = false;
  Options options;
  options.eplb_groups = 4;
  const Placement plan = Planned("eplb", LoadsOf(12, kPublished), cluster, options).placement;
  Slots live = plan.slot_expert;
  EXPECT_TRUE(std::all_of(live.begin() + 8, live.begin() + 16, [](auto e) { return e == -1; }));
  live.erase(live.begin() + 8, live.begin() + 16);
  EXPECT_EQ(live, (Slots{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1}));
}

// One hot expert: the published plan puts two of its replicas on a GPU although others lack it.
TEST(EplbPlusTest, NoExpertTwiceOnAGpu) {
  const TokenCounts loads = LoadsOf(4, {100, 1, 1, 1});
  const Cluster cluster = UniformCluster(1, 4, 2);
  const Placement published = Planned("eplb", loads, cluster, {}).placement;
  EXPECT_GT(Measure(published, loads, cluster, 0).device_duplicates, 0U);
  const Placement plus = Planned("eplb+", loads, cluster, {}).placement;
  EXPECT_EQ(Measure(plus, loads, cluster, 0).device_duplicates, 0U);
  EXPECT_LE(Measure(plus, loads, cluster, 0).imbalance,
            Measure(published, loads, cluster, 0).imbalance + 1e-12);
}

TEST(EplbPlusTest, GpusAreRenamedAfterTheOldPlan) {
  const TokenCounts loads = LoadsOf(12, kPublished);
  const Cluster cluster = UniformCluster(2, 4, 2);
  const Placement plan = Planned("eplb+", loads, cluster, {}).placement;
  Placement shuffled = plan;  // the same plan, GPUs and slots in another order
  std::reverse(shuffled.slot_expert.begin(), shuffled.slot_expert.end());
  const Placement again = Planned("eplb+", loads, cluster, {}, &shuffled).placement;
  EXPECT_EQ(again.slot_expert, shuffled.slot_expert);
}

TEST(EplbPlusTest, AnySlotsWillDo) {
  const TokenCounts loads = LoadsOf(12, kPublished);
  Cluster cluster = UniformCluster(3, 2, 2);
  cluster.devices[1].slots = 5;
  cluster.devices[4].slots = 3;
  const Placement plan = Planned("eplb+", loads, cluster, {}).placement;
  EXPECT_TRUE(Validate(plan, loads, cluster, Rules{true, true, 1, true}).has_value());
  EXPECT_EQ(Measure(plan, loads, cluster, 0).replicas, 16U);
}

}  // namespace
}  // namespace shardwright::placement
