// SPDX-License-Identifier: Apache-2.0
#include "placement/recovery/recovery.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include <gtest/gtest.h>

#include "placement/core/random.h"

namespace shardwright::placement {
namespace {

using Sets = std::vector<std::vector<std::uint32_t>>;

std::vector<UnitSet> Of(const Sets& sets, std::uint32_t units) {
  std::vector<UnitSet> result;
  for (const auto& set : sets) {
    UnitSet& made = result.emplace_back(units);
    for (const std::uint32_t unit : set) made.Add(unit);
  }
  return result;
}

// Counts survived failure sets by size, by enumerating all of them.
std::vector<std::uint64_t> BruteForce(const Sets& sets, std::uint32_t units) {
  std::vector<std::uint64_t> survived(units + 1U, 0);
  for (std::uint32_t failed = 0; failed < (1U << units); ++failed) {
    bool lives = true;
    for (const auto& set : sets) {
      lives = lives && std::any_of(set.begin(), set.end(),
                                   [&](std::uint32_t unit) { return (failed >> unit & 1U) == 0; });
    }
    if (lives) ++survived[static_cast<std::size_t>(__builtin_popcount(failed))];
  }
  return survived;
}

Sets RandomSets(Random* random, std::uint32_t units, std::uint32_t count, std::uint32_t largest) {
  Sets sets(count);
  for (auto& set : sets) {
    const std::uint64_t size = 1 + random->Below(largest);
    for (std::uint64_t i = 0; i < size; ++i) {
      set.push_back(static_cast<std::uint32_t>(random->Below(units)));
    }
  }
  return sets;
}

// The document's checks: disjoint pairs, a ring of pairs, nested sets.
TEST(RecoveryTest, DisjointPairs) {
  const RecoveryProbability found = SolveRecovery(Of({{0, 1}, {2, 3}, {4, 5}}, 10), 10);
  EXPECT_EQ(found.method, RecoveryMethod::kProduct);
  EXPECT_EQ(found.survived_sets[4], 129U);
  EXPECT_DOUBLE_EQ(found.survived[4], 129.0 / 210);
  EXPECT_DOUBLE_EQ(found.lost[4], 81.0 / 210);
  EXPECT_EQ(found.certain, 1);
  EXPECT_TRUE(found.exact());
}

TEST(RecoveryTest, RingOfPairs) {
  Sets ring;
  for (std::uint32_t i = 0; i < 10; ++i) ring.push_back({i, (i + 1) % 10});
  const RecoveryProbability found = SolveRecovery(Of(ring, 10), 10);
  EXPECT_EQ(found.survived_sets[4], 25U);
  EXPECT_TRUE(found.exact());
}

TEST(RecoveryTest, NestedSetsAreTheRarestOne) {
  const RecoveryProbability plan_b =
      SolveRecovery(Of({{0, 1}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}}, 5), 5);
  EXPECT_EQ(plan_b.survived_sets[3], 7U);
  const RecoveryProbability plan_a = SolveRecovery(Of({{0, 1}, {2, 3}}, 5), 5);
  EXPECT_EQ(plan_a.survived_sets[3], 4U);
}

TEST(RecoveryTest, NothingToLoseAndNothingLeft) {
  const RecoveryProbability all = SolveRecovery({}, 3);
  EXPECT_EQ(all.certain, 3);
  EXPECT_EQ(all.survived, (std::vector<double>{1, 1, 1, 1}));
  const RecoveryProbability none = SolveRecovery(Of({{}, {1}}, 3), 3);
  EXPECT_EQ(none.certain, -1);
  EXPECT_EQ(none.survived, (std::vector<double>{0, 0, 0, 0}));
}

TEST(RecoveryTest, EveryMethodCountsWhatBruteForceCounts) {
  Random random(7);
  std::vector<int> used(8, 0);
  for (int round = 0; round < 3000; ++round) {
    const auto units = static_cast<std::uint32_t>(1 + random.Below(11));
    const auto count = static_cast<std::uint32_t>(random.Below(9));
    const Sets sets =
        RandomSets(&random, units, count, 1 + static_cast<std::uint32_t>(random.Below(4)));
    const auto expected = BruteForce(sets, units);
    for (const std::optional<RecoveryMethod> force :
         {std::optional<RecoveryMethod>{}, std::optional{RecoveryMethod::kInclusionExclusion},
          std::optional{RecoveryMethod::kFrontier}, std::optional{RecoveryMethod::kEnumeration}}) {
      RecoveryOptions options;
      options.force = force;
      const RecoveryProbability found = SolveRecovery(Of(sets, units), units, options);
      ASSERT_EQ(found.survived_sets, expected) << "round " << round;
      ASSERT_TRUE(found.exact());
      ++used[static_cast<std::size_t>(found.method)];
      std::int64_t certain = -1;
      for (std::size_t k = 0; k <= units && found.lost[k] == 0; ++k) certain = std::int64_t(k);
      ASSERT_EQ(found.certain, certain);
    }
  }
  EXPECT_GT(used[static_cast<std::size_t>(RecoveryMethod::kProduct)], 0);
  EXPECT_GT(used[static_cast<std::size_t>(RecoveryMethod::kIntervals)], 0);
  EXPECT_GT(used[static_cast<std::size_t>(RecoveryMethod::kFrontier)], 0);
  EXPECT_GT(used[static_cast<std::size_t>(RecoveryMethod::kComponents)], 0);
}

// Finds runs of consecutive units even if the units were renamed.
TEST(RecoveryTest, RunsAreFoundInAnyOrder) {
  Random random(11);
  for (int round = 0; round < 2000; ++round) {
    const auto units = static_cast<std::uint32_t>(2 + random.Below(11));
    std::vector<std::uint32_t> name(units);
    for (std::uint32_t i = 0; i < units; ++i) name[i] = i;
    for (std::uint32_t i = units; i > 1; --i) std::swap(name[i - 1], name[random.Below(i)]);
    Sets sets(1 + random.Below(6));
    for (auto& set : sets) {
      const auto first = static_cast<std::uint32_t>(random.Below(units));
      const auto last = first + 1 + static_cast<std::uint32_t>(random.Below(units - first));
      for (std::uint32_t u = first; u < last; ++u) set.push_back(name[u]);
    }
    const RecoveryProbability found = SolveRecovery(Of(sets, units), units);
    ASSERT_EQ(found.survived_sets, BruteForce(sets, units)) << "round " << round;
    ASSERT_TRUE(found.method == RecoveryMethod::kProduct ||
                found.method == RecoveryMethod::kIntervals ||
                found.method == RecoveryMethod::kComponents)
        << Name(found.method);
  }
}

TEST(RecoveryTest, ManyUnitsAgreeWithFewerMethods) {
  for (const std::uint32_t units : {62U, 63U, 200U, 1001U}) {
    Sets sets;
    for (std::uint32_t i = 0; i + 3 <= units; i += 3) sets.push_back({i, i + 1, i + 2});
    const RecoveryProbability found = SolveRecovery(Of(sets, units), units);
    // All of three given units fail with 3 failures: one failure set for each triple.
    const double choose3 = double(units) * (units - 1) * (units - 2) / 6;
    EXPECT_NEAR(found.lost[3] / (double(sets.size()) / choose3), 1, 1e-12) << units;
    EXPECT_EQ(found.lost[2], 0);
    EXPECT_EQ(found.certain, 2);
    RecoveryOptions options;
    options.force = RecoveryMethod::kFrontier;
    options.failures_max = 40;
    const RecoveryProbability frontier = SolveRecovery(Of(sets, units), units, options);
    for (std::size_t k = 0; k <= 40; ++k) {
      EXPECT_NEAR(frontier.survived[k], found.survived[k], 1e-12) << units << " " << k;
    }
  }
}

TEST(RecoveryTest, MonteCarloSaysHowFarItIsOff) {
  Random random(3);
  int outside = 0;
  int looked = 0;
  for (int round = 0; round < 20; ++round) {
    const Sets sets = RandomSets(&random, 16, 12, 4);
    const RecoveryProbability exact = SolveRecovery(Of(sets, 16), 16);
    RecoveryOptions options;
    options.force = RecoveryMethod::kMonteCarlo;
    options.enumeration_max = 0;
    options.samples = 4000;
    options.seed = static_cast<std::uint64_t>(round);
    const RecoveryProbability drawn = SolveRecovery(Of(sets, 16), 16, options);
    ASSERT_FALSE(drawn.exact());
    ASSERT_EQ(drawn.certain, exact.certain);
    for (std::size_t k = 0; k <= 16; ++k) {
      const double off = std::abs(drawn.lost[k] - exact.lost[k]);
      if (drawn.standard_error[k] == 0) {
        ASSERT_NEAR(off, 0, 1e-9);
        continue;
      }
      ++looked;
      outside += off > 3 * drawn.standard_error[k] ? 1 : 0;
    }
  }
  EXPECT_GT(looked, 100);
  EXPECT_LE(outside, looked / 50);
}

TEST(RecoveryTest, FailuresPerUnitWeighTheSizes) {
  const RecoveryProbability found = SolveRecovery(Of({{0, 1}}, 4), 4);
  for (const double q : {0.0, 0.01, 0.3, 1.0}) EXPECT_NEAR(SurvivalAt(found, q), 1 - q * q, 1e-12);
}

TEST(RecoveryTest, RacksFailAtOnceAndDeadNodesAreGone) {
  Cluster cluster = UniformCluster(4, 1, 1);
  cluster.racks = {"a", "b"};
  cluster.nodes[2].rack = cluster.nodes[3].rack = 1;
  TokenCounts loads;
  loads.layers = 2;
  loads.experts = 2;
  loads.tokens = {1, 1, 1, 1};
  loads.layer_id = {0, 1};
  Placement placement = EmptyPlacement(loads, cluster);
  placement.slot_expert = {0, 0, 1, 1, 0, 1, 0, 1};
  EXPECT_EQ(LayerRecovery(placement, cluster, 0).certain, 1);
  EXPECT_EQ(LayerRecovery(placement, cluster, 0, FailureUnit::kRack).certain, 0);
  EXPECT_EQ(LayerRecovery(placement, cluster, 1, FailureUnit::kRack).certain, 1);
  EXPECT_EQ(LayerRecovery(placement, cluster, 0, FailureUnit::kRack).units, 2U);
  EXPECT_EQ(ModelRecovery(placement, cluster).survived_sets,
            BruteForce({{0, 1}, {2, 3}, {0, 2}, {1, 3}}, 4));
  cluster.nodes[0].alive = false;
  EXPECT_EQ(LayerRecovery(placement, cluster, 0).units, 3U);
  EXPECT_EQ(LayerRecovery(placement, cluster, 0).certain, 0);
}

}  // namespace
}  // namespace shardwright::placement
