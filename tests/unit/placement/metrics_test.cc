// SPDX-License-Identifier: Apache-2.0
#include "placement/core/metrics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

#include "placement/core/random.h"
#include "support.h"

namespace shardwright::placement {
namespace {

// Finds the densest set of experts by enumerating all sets: tokens per device that has them.
double LeastMaxLoadByLooking(const std::vector<std::uint64_t>& tokens,
                             const std::vector<std::vector<std::uint32_t>>& holders,
                             const std::vector<std::uint32_t>& weights) {
  double least = 0;
  for (std::uint32_t set = 1; set < (1U << tokens.size()); ++set) {
    std::uint64_t sum = 0;
    std::set<std::uint32_t> devices;
    for (std::size_t e = 0; e < tokens.size(); ++e) {
      if ((set >> e & 1U) == 0 || tokens[e] == 0) continue;
      sum += tokens[e];
      devices.insert(holders[e].begin(), holders[e].end());
    }
    if (sum == 0) continue;
    std::uint32_t weight = 0;
    for (const std::uint32_t d : devices) weight += weights[d];
    least = std::max(least, static_cast<double>(sum) / weight);
  }
  return least;
}

// Two nodes of two GPUs of two slots; expert 0 everywhere, the others once.
TEST(MetricsTest, WorkedExample) {
  const TokenCounts loads = LoadsOf(5, {80, 10, 20, 30, 20});
  const Cluster cluster = UniformCluster(2, 2, 2);
  const Placement placement = Placed(loads, cluster, {0, 1, 0, 2, 0, 3, 0, 4});
  EXPECT_EQ(DeviceLoads(placement, loads, cluster, 0), (std::vector<double>{30, 40, 50, 40}));
  const LayerMetrics m = Measure(placement, loads, cluster, 0);
  EXPECT_EQ(m.tokens, 160U);
  EXPECT_DOUBLE_EQ(m.mean_load, 40);
  EXPECT_DOUBLE_EQ(m.max_load, 50);
  EXPECT_DOUBLE_EQ(m.imbalance, 1.25);
  EXPECT_DOUBLE_EQ(m.node_imbalance, 45.0 / 40);
  EXPECT_DOUBLE_EQ(m.lp_bound, 1);  // expert 0 evens everything out
  EXPECT_DOUBLE_EQ(m.bound, 1);
  EXPECT_EQ(m.replicas, 8U);
  EXPECT_EQ(m.device_duplicates, 0U);
  // Half of the tokens of experts 1 to 4 come from the other node. Of expert 0 half leave by an
  // even split, none if near replicas come first.
  EXPECT_DOUBLE_EQ(m.inter_node_tokens, 80 * 0.5 + 80 * 0.5);
  EXPECT_DOUBLE_EQ(m.inter_node_tokens_least, 80 * 0.5);
}

TEST(MetricsTest, BoundIsTheHottestReplicaOfTheBestCounts) {
  const TokenCounts loads = LoadsOf(2, {90, 10});
  const Cluster cluster = UniformCluster(1, 5, 1);
  const LayerMetrics m = Measure(Placed(loads, cluster, {0, 0, 1, 1, 1}), loads, cluster, 0);
  EXPECT_DOUBLE_EQ(m.imbalance, 45.0 / 20);
  EXPECT_DOUBLE_EQ(m.lp_bound, 45.0 / 20);
  EXPECT_DOUBLE_EQ(m.bound, 90.0 / 4 / 20);  // four replicas of the hot one, one of the other
}

TEST(MetricsTest, DeadDevicesAndLostExpertsAreLeftOut) {
  const TokenCounts loads = LoadsOf(3, {30, 30, 60});
  Cluster cluster = UniformCluster(3, 1, 1);
  const Placement placement = Placed(loads, cluster, {0, 1, 2});
  cluster.nodes[2].alive = false;
  const LayerMetrics m = Measure(placement, loads, cluster, 0);
  EXPECT_EQ(m.tokens_lost, 60U);
  EXPECT_DOUBLE_EQ(m.imbalance, 1);
  EXPECT_DOUBLE_EQ(m.lp_bound, 1);  // tokens of the lost expert do not count for any device
  EXPECT_EQ(m.replicas, 2U);
}

TEST(MetricsTest, NoTokensAreBalanced) {
  const TokenCounts loads = LoadsOf(2, {0, 0});
  const Cluster cluster = UniformCluster(2, 1, 1);
  const LayerMetrics m = Measure(Placed(loads, cluster, {0, 1}), loads, cluster, 0);
  EXPECT_EQ(m.imbalance, 1);
  EXPECT_EQ(m.bound, 1);
  EXPECT_EQ(m.lp_bound, 1);
}

TEST(MetricsTest, DuplicatesOfADeviceAreCounted) {
  const TokenCounts loads = LoadsOf(2, {4, 2});
  const Cluster cluster = UniformCluster(2, 1, 3);
  const LayerMetrics m = Measure(Placed(loads, cluster, {0, 0, 0, 1, -1, -1}), loads, cluster, 0);
  EXPECT_EQ(m.device_duplicates, 2U);
  EXPECT_EQ(m.replicas, 4U);
  EXPECT_DOUBLE_EQ(m.imbalance, 4.0 / 3);
}

TEST(MetricsTest, ModelsAreMeansOfLayers) {
  const TokenCounts loads = LoadsOf(2, {10, 10, 30, 10});
  const Cluster cluster = UniformCluster(2, 1, 1);
  const ModelMetrics m = Measure(Placed(loads, cluster, {0, 1, 0, 1}), loads, cluster);
  EXPECT_DOUBLE_EQ(m.imbalance_mean, 1.25);
  EXPECT_DOUBLE_EQ(m.imbalance_max, 1.5);
  EXPECT_DOUBLE_EQ(m.inter_node_share, 0.5);
  const TokenCounts falling = LoadsOf(2, {30, 10, 10, 10});
  EXPECT_DOUBLE_EQ(Measure(Placed(falling, cluster, {0, 1, 0, 1}), falling, cluster).imbalance_max,
                   1.5);
}

// A GPU of half the speed with half the tokens has the same load.
TEST(MetricsTest, LoadsAreTokensOverTheSpeed) {
  const TokenCounts loads = LoadsOf(3, {30, 60, 30});
  Cluster cluster = UniformCluster(2, 2, 1);
  for (const auto& [d, speed] : {std::pair(0, 0.5), std::pair(1, 1.0), std::pair(2, 0.5)}) {
    cluster.devices[static_cast<std::size_t>(d)].speed = speed;
  }
  cluster.devices[3].slots = 0;
  cluster.devices[3].speed = 7;  // holds nothing, so that it does not count
  EXPECT_EQ(RelativeSpeeds(cluster)[1], 1.5);
  const Placement even = Placed(loads, cluster, {0, 1, 2});
  LayerMetrics m = Measure(even, loads, cluster, 0);
  EXPECT_DOUBLE_EQ(m.imbalance, 1);
  EXPECT_DOUBLE_EQ(m.max_load, 40);
  EXPECT_DOUBLE_EQ(m.node_imbalance, 1);
  EXPECT_DOUBLE_EQ(m.bound, 1);
  EXPECT_DOUBLE_EQ(m.lp_bound, 1);
  m = Measure(Placed(loads, cluster, {1, 0, 2}), loads, cluster, 0);
  EXPECT_DOUBLE_EQ(m.imbalance, 2);  // 60 tokens at 0.75 of the mean speed, 40 at the mean
  EXPECT_DOUBLE_EQ(m.lp_bound, 2);
}

TEST(LeastMaxLoadTest, IsTheDensestSetOfExperts) {
  Random random(21);
  for (int round = 0; round < 5000; ++round) {
    const auto devices = static_cast<std::uint32_t>(1 + random.Below(6));
    const auto experts = static_cast<std::uint32_t>(1 + random.Below(7));
    std::vector<std::uint64_t> tokens(experts);
    std::vector<std::vector<std::uint32_t>> holders(experts);
    for (std::uint32_t e = 0; e < experts; ++e) {
      tokens[e] = random.Below(30);
      for (std::uint32_t d = 0; d < devices; ++d) {
        if (random.Below(3) == 0) holders[e].push_back(d);
      }
      if (holders[e].empty()) holders[e].push_back(0);
    }
    std::vector<std::uint32_t> weights(devices, 1);
    if (round % 2 == 1) {
      for (auto& weight : weights) weight = static_cast<std::uint32_t>(1 + random.Below(1500));
    }
    ASSERT_DOUBLE_EQ(LeastMaxLoad(tokens, holders, weights),
                     LeastMaxLoadByLooking(tokens, holders, weights))
        << round;
  }
}

}  // namespace
}  // namespace shardwright::placement
