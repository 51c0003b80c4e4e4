// SPDX-License-Identifier: Apache-2.0
#include "placement/strategy/hecate.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "placement/core/metrics.h"
#include "support.h"

namespace shardwright::placement {
namespace {

using Owners = std::vector<std::uint32_t>;
using Holders = std::vector<std::vector<std::uint32_t>>;
using Tokens = std::vector<std::uint64_t>;

std::vector<std::uint32_t> Each(const LiveDevices& devices, std::uint32_t spare) {
  return std::vector(devices.size(), spare);
}

TEST(HecateTest, OverlapDegree) {
  EXPECT_EQ(OverlapDegree(2e-3, 12.5e9, 9'440'000), 2U);
  EXPECT_EQ(OverlapDegree(2e-3, 12.5e9, 0), 0U);
  EXPECT_EQ(OverlapDegree(0, 12.5e9, 1), 0U);
  EXPECT_EQ(OverlapDegree(1e9, 1e12, 1), 4'294'967'295U);
}

// Four experts on 4, 1, 2 and 1 devices.
TEST(HecateTest, VolumesOfTheSparseCollectives) {
  const SparseVolumes volumes = VolumesOf(Owners{0, 1, 2, 3}, {{0, 1, 2, 3}, {1}, {0, 2}, {3}}, 4);
  EXPECT_DOUBLE_EQ(volumes.copied_share, 0.5);
  EXPECT_EQ(volumes.bound, 2U);
  EXPECT_DOUBLE_EQ(volumes.all_reduce, 2.5);
  EXPECT_LE(volumes.all_reduce, 2.0 * static_cast<double>(volumes.bound));
  EXPECT_EQ(volumes.in, (Tokens{1, 1, 1, 1}));
  EXPECT_EQ(volumes.out, (Tokens{3, 0, 1, 0}));
}

TEST(HecateTest, HotExpertsThatFitAreEverywhere) {
  const LiveDevices devices(UniformCluster(2, 2, 3));
  EXPECT_EQ(Materialize(Owners{0, 1, 2, 3}, Tokens{5, 9, 9, 1}, devices, 2, Each(devices, 7)),
            (Holders{{0}, {0, 1, 2, 3}, {0, 1, 2, 3}, {3}}));
  EXPECT_EQ(Materialize(Owners{0, 1, 2, 3}, Tokens{0, 0, 0, 0}, devices, 1, Each(devices, 1)),
            (Holders{{0, 1, 2, 3}, {1}, {2}, {3}}));
  EXPECT_EQ(Materialize(Owners{0, 1, 2, 3}, Tokens{5, 9, 9, 1}, devices, 4, Each(devices, 0)),
            (Holders{{0}, {1}, {2}, {3}}));
}

// One foreign expert per device: four slots, of which the hottest gets 4 * 40 / 70 = 2. It goes to
// the other node first, then to its own, which has more free slots by then.
TEST(HecateTest, SlotsAreSharedByLoad) {
  const LiveDevices devices(UniformCluster(2, 2, 2));
  EXPECT_EQ(Materialize(Owners{0, 1, 2, 3}, Tokens{40, 30, 20, 10}, devices, 2, Each(devices, 1)),
            (Holders{{0, 1, 2}, {0, 1, 3}, {2}, {3}}));
}

TEST(HecateTest, ColdExpertsGoToTheLeastLoadedNode) {
  const LiveDevices devices(UniformCluster(2, 1, 2));
  EXPECT_EQ(ShardOwners(LoadsOf(4, {10, 8, 6, 4}), devices, 1), (Holders{{0, 0, 1, 1}}));
}

// The layer with the hotter cold expert comes first; loads start from zero in every layer, and ties
// go to the node with fewer free slots.
TEST(HecateTest, LayersAreShardedByTheirHottestColdExpert) {
  const LiveDevices devices(UniformCluster(2, 1, 3));
  EXPECT_EQ(ShardOwners(LoadsOf(3, {8, 0, 0, 9, 1, 1}), devices, 0),
            (Holders{{1, 0, 0}, {0, 1, 1}}));
}

TEST(HecateTest, HotOwnersAreSpread) {
  const LiveDevices devices(UniformCluster(2, 2, 1));
  const auto owner = ShardOwners(LoadsOf(4, {9, 8, 7, 6}), devices, 4);
  EXPECT_EQ(owner, (Holders{{0, 1, 2, 3}}));
}

// The hot expert of the first layer fills device 0 with the others' owners: only device 1 has a
// slot for the last one, and no place over both layers until one of the second layer has moved.
TEST(HecateTest, OwnersKeepToTheSlotsOfEveryLayer) {
  const LiveDevices devices(UniformCluster(2, 1, 4));
  const TokenCounts loads = LoadsOf(8, {0, 0, 1, 1, 0, 1000000, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0});
  for (std::uint32_t overlap = 0; overlap <= 8; ++overlap) {
    for (const Owners& layer : ShardOwners(loads, devices, overlap)) {
      EXPECT_EQ(std::count(layer.begin(), layer.end(), 0U), 4) << overlap;
    }
  }
}

TEST(HecateTest, CalibrationPaysOrIsLeft) {
  const LiveDevices devices(UniformCluster(2, 1, 2));
  const Holders planned{{0}, {1}};
  CalibrationCost cost{1, 0, 1, 49};  // a copy of the hot expert halves 100 seconds
  const Calibrated copied =
      Calibrate(Owners{0, 1}, planned, Tokens{100, 0}, devices, 1, Each(devices, 1), cost);
  EXPECT_TRUE(copied.changed);
  EXPECT_EQ(copied.holders, (Holders{{0, 1}, {1}}));
  cost.expert_bytes = 50;
  const Calibrated left =
      Calibrate(Owners{0, 1}, planned, Tokens{100, 0}, devices, 1, Each(devices, 1), cost);
  EXPECT_FALSE(left.changed);
  EXPECT_EQ(left.holders, planned);
}

TEST(HecateTest, CalibrationHasOnlyTheSlotsThatAreLeft) {
  const LiveDevices devices(UniformCluster(2, 1, 3));
  const Holders planned{{0}, {1}, {0, 1}};  // expert 2 takes the only foreign slot of device 1
  const CalibrationCost cost{1, 0, 1, 1};
  const Owners owner{0, 1, 0};
  EXPECT_FALSE(
      Calibrate(owner, planned, Tokens{100, 0, 0}, devices, 1, Each(devices, 1), cost).changed);
  const Calibrated more =
      Calibrate(owner, planned, Tokens{100, 0, 0}, devices, 1, Each(devices, 2), cost);
  EXPECT_TRUE(more.changed);
  EXPECT_EQ(more.holders, (Holders{{0, 1}, {1}, {0, 1}}));
}

// A GPU owns five experts of one layer, more than its even share: none of its slots is left.
TEST(HecateStrategyTest, CopiesFillWhatOwnersLeave) {
  const TokenCounts loads = LoadsOf(8, {0, 0, 1, 1, 0, 1'000'000, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0});
  const Cluster cluster = UniformCluster(2, 1, 5);
  Options options;
  options.hecate.overlap = 2;
  const auto plan = (*FindStrategy("hecate"))->plan(loads, cluster, nullptr, options);
  ASSERT_TRUE(plan) << plan.error().message;
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
      const auto slots = plan->placement.slots(l, d);
      EXPECT_LE(
          std::count_if(slots.begin(), slots.end(), [](std::int32_t e) { return e != kNoExpert; }),
          5)
          << l << " " << d;
    }
  }
}

TEST(HecateStrategyTest, OwnersAreAPartOfThePlacement) {
  const TokenCounts loads = LoadsOf(8, {50, 9, 9, 9, 9, 9, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8});
  const Cluster cluster = UniformCluster(2, 2, 4);
  Options options;
  options.hecate.overlap = 2;
  options.hecate.spare = 1;
  const auto plan = (*FindStrategy("hecate"))->plan(loads, cluster, nullptr, options);
  ASSERT_TRUE(plan.has_value());
  ASSERT_TRUE(plan->owners.has_value());
  Rules once{true, true, 1, true};
  EXPECT_TRUE(Validate(*plan->owners, loads, cluster, once).has_value());
  for (std::uint32_t l = 0; l < 2; ++l) {
    std::uint32_t owned = 0;
    for (std::uint32_t d = 0; d < 4; ++d) {
      std::uint32_t foreign = 0;
      const auto own = plan->owners->slots(l, d);
      for (const std::int32_t e : plan->placement.slots(l, d)) {
        if (e == kNoExpert) continue;
        const bool mine = std::find(own.begin(), own.end(), e) != own.end();
        owned += mine ? 1 : 0;
        foreign += mine ? 0 : 1;
      }
      EXPECT_LE(foreign, 1U);
    }
    EXPECT_EQ(owned, 8U);
  }
  options.hecate.overlap = 0;
  const auto bare = (*FindStrategy("hecate"))->plan(loads, cluster, nullptr, options);
  EXPECT_EQ(bare->placement.slot_expert, bare->owners->slot_expert);
}

TEST(HecateStrategyTest, TooFewSlotsForTheOwnersAreRefused) {
  const auto plan = (*FindStrategy("hecate"))
                        ->plan(LoadsOf(8, Tokens(8, 1)), UniformCluster(1, 3, 2), nullptr, {});
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, Errc::kInfeasible);
}

}  // namespace
}  // namespace shardwright::placement
