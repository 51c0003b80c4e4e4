// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "placement/core/metrics.h"
#include "placement/core/random.h"
#include "placement/migration/migration.h"
#include "support.h"

namespace shardwright::placement {
namespace {

StrategyResult Planned(std::string_view strategy, const TokenCounts& loads, const Cluster& cluster,
                       const Placement* current = nullptr, const Options& options = {}) {
  auto plan = (*FindStrategy(strategy))->plan(loads, cluster, current, options);
  EXPECT_TRUE(plan.has_value()) << plan.error().message;
  return plan ? *std::move(plan) : StrategyResult();
}

double Peak(const Placement& plan, const TokenCounts& loads, const Cluster& cluster,
            std::uint32_t l) {
  const auto load = DeviceLoads(plan, loads, cluster, l);
  return *std::max_element(load.begin(), load.end());
}

std::size_t MoveCount(const Placement& current, const Placement& next, const Cluster& cluster) {
  return PlanMigration(current, next, cluster)->transfers.size();
}

// Token counts that fall off like those of real routers, hottest experts anywhere.
TokenCounts Skewed(Random* random, std::uint32_t layers, std::uint32_t experts) {
  std::vector<std::uint64_t> tokens(std::size_t{layers} * experts);
  for (auto& t : tokens) {
    const double u = random->Unit();
    t = static_cast<std::uint64_t>(1000 * u * u * u / (1.0001 - u * 0.9));
  }
  return LoadsOf(experts, tokens);
}

// Every way to fill the slots of equal devices, duplicates and empty slots included: the least
// peak.
double LeastPeak(const TokenCounts& loads, std::uint32_t devices, std::uint32_t slots) {
  std::vector<std::vector<std::uint32_t>> contents;  // `experts` stands for an empty slot
  std::vector<std::uint32_t> content;
  const std::function<void(std::uint32_t)> grow = [&](std::uint32_t from) {
    if (content.size() == slots) {
      contents.push_back(content);
      return;
    }
    for (std::uint32_t e = from; e <= loads.experts; ++e) {
      content.push_back(e);
      grow(e);
      content.pop_back();
    }
  };
  grow(0);
  std::vector<std::size_t> chosen(devices);
  double least = 1e300;
  const auto verify = [&] {
    std::vector<double> count(loads.experts + std::size_t{1}, 0);
    for (const std::size_t i : chosen) {
      for (const std::uint32_t e : contents[i]) ++count[e];
    }
    if (std::find(count.begin(), count.end() - 1, 0) != count.end() - 1) return;
    double peak = 0;
    for (const std::size_t i : chosen) {
      double load = 0;
      for (const std::uint32_t e : contents[i]) {
        if (e < loads.experts) load += static_cast<double>(loads.tokens[e]) / count[e];
      }
      peak = std::max(peak, load);
    }
    least = std::min(least, peak);
  };
  const std::function<void(std::uint32_t, std::size_t)> fill = [&](std::uint32_t d,
                                                                   std::size_t from) {
    if (d == devices) return verify();
    for (std::size_t i = from; i < contents.size(); ++i) {
      chosen[d] = i;
      fill(d + 1, i);
    }
  };
  fill(0, 0);
  return least;
}

TEST(BestTest, FindsTheOptimumOfMostSmallProblems) {
  Random random(31);
  int problems = 0;
  int optimal = 0;
  double excess = 0;
  int proved = 0;  // bounds above the mean and the hottest replica
  for (; problems < 200; ++problems) {
    const auto slots = static_cast<std::uint32_t>(2 + random.Below(2));
    const auto devices = static_cast<std::uint32_t>(2 + random.Below(4 - slots + 1));
    const auto experts = static_cast<std::uint32_t>(slots + random.Below(slots == 2 ? 3 : 2));
    const TokenCounts loads = Skewed(&random, 1, experts);
    const Cluster cluster = UniformCluster(devices, 1, slots);
    const StrategyResult result = Planned("best", loads, cluster);
    const Placement& plan = result.placement;
    ASSERT_TRUE(Validate(plan, loads, cluster, Rules{}).has_value());
    const double peak = Peak(plan, loads, cluster, 0);
    const double least = LeastPeak(loads, devices, slots);
    ASSERT_GE(peak, least * (1 - 1e-9));
    const LayerMetrics metrics = Measure(plan, loads, cluster, 0);
    ASSERT_LE(result.notes[0].bound * metrics.mean_load, least * (1 + 1e-9) + 1e-9);
    proved += result.notes[0].bound > metrics.bound * (1 + 1e-6) ? 1 : 0;
    optimal += peak <= least * (1 + 1e-9) ? 1 : 0;
    excess += least > 0 ? peak / least - 1 : 0;
  }
  RecordProperty("optimal", optimal);
  EXPECT_GE(proved, problems / 10);
  EXPECT_GE(optimal, problems * 7 / 10);
  EXPECT_LE(excess / problems, 0.02);
}

TEST(BestTest, AsEvenAsEplbOnEveryLayer) {
  Random random(32);
  const TokenCounts loads = Skewed(&random, 12, 64);
  const Cluster cluster = UniformCluster(2, 8, 5);
  const Placement best = Planned("best", loads, cluster).placement;
  const Placement eplb = Planned("eplb", loads, cluster).placement;
  EXPECT_TRUE(Validate(best, loads, cluster, Rules{true, true, 1, true}).has_value());
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    EXPECT_LE(Peak(best, loads, cluster, l), Peak(eplb, loads, cluster, l) * (1 + 1e-9)) << l;
  }
}

TEST(BestTest, MovesLittleFromAnOldPlan) {
  Random random(33);
  const Cluster cluster = UniformCluster(4, 4, 5);
  const TokenCounts before = Skewed(&random, 12, 64);
  TokenCounts after = before;
  for (auto& t : after.tokens) t = t * (80 + random.Below(41)) / 100;
  const Placement old = Planned("eplb+", before, cluster).placement;
  const Placement best = Planned("best", after, cluster, &old).placement;
  const Placement plus = Planned("eplb+", after, cluster, &old).placement;
  const Placement eplb = Planned("eplb", after, cluster).placement;
  EXPECT_LE(3 * MoveCount(old, best, cluster), 2 * MoveCount(old, plus, cluster));
  for (std::uint32_t l = 0; l < after.layers; ++l) {
    EXPECT_LE(Peak(best, after, cluster, l), Peak(eplb, after, cluster, l) * (1 + 1e-9)) << l;
  }
  // From its own plan with the same loads nothing moves.
  const Placement again = Planned("best", after, cluster, &best).placement;
  EXPECT_EQ(again.slot_expert, best.slot_expert);
}

TEST(BestTest, KeepsTheAskedCopiesApart) {
  Random random(34);
  const TokenCounts loads = Skewed(&random, 6, 24);
  Cluster cluster = UniformCluster(6, 2, 6);
  Options options;
  for (std::uint32_t copies = 1; copies <= 3; ++copies) {
    options.copies_min = copies;
    const StrategyResult plan = Planned("best", loads, cluster, nullptr, options);
    EXPECT_TRUE(Validate(plan.placement, loads, cluster, Rules{true, true, copies, true}));
    EXPECT_GE(ModelRecovery(plan.placement, cluster).certain, copies - 1);
    EXPECT_EQ(plan.notes[0].copies_min, copies);
  }
  options.copies_min = 4;
  const auto refused = (*FindStrategy("best"))->plan(loads, cluster, nullptr, options);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kInfeasible);
  cluster.racks = {"a", "b", "c"};
  for (std::uint32_t n = 0; n < 6; ++n) cluster.nodes[n].rack = n / 2;
  options.copies_min = 3;
  options.failure_unit = FailureUnit::kRack;
  const StrategyResult racks = Planned("best", loads, cluster, nullptr, options);
  EXPECT_EQ(ModelRecovery(racks.placement, cluster, FailureUnit::kRack).certain, 2);
}

TEST(BestTest, ADeadNodeIsLeftAndTheRestStays) {
  Random random(35);
  const TokenCounts loads = Skewed(&random, 6, 24);
  Cluster cluster = UniformCluster(6, 2, 6);
  Options options;
  options.copies_min = 2;
  const Placement old = Planned("best", loads, cluster, nullptr, options).placement;
  cluster.nodes[3].alive = false;
  const Placement next = Planned("best", loads, cluster, &old, options).placement;
  EXPECT_TRUE(Validate(next, loads, cluster, Rules{true, true, 2, true}));
  const auto migration = PlanMigration(old, next, cluster);
  ASSERT_TRUE(migration.has_value());
  EXPECT_TRUE(migration->lost.empty());
  const Placement fresh = Planned("best", loads, cluster, nullptr, options).placement;
  EXPECT_LT(3 * migration->transfers.size(), 2 * MoveCount(old, fresh, cluster));
}

TEST(BestTest, UnequalDevicesAreFilled) {
  Random random(36);
  const TokenCounts loads = Skewed(&random, 4, 30);
  Cluster cluster = UniformCluster(3, 4, 3);
  cluster.devices[0].slots = 7;
  cluster.devices[5].slots = 1;
  cluster.devices[11].slots = 0;
  const Placement plan = Planned("best", loads, cluster).placement;
  EXPECT_TRUE(Validate(plan, loads, cluster, Rules{true, true, 1, true}));
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    const LayerMetrics m = Measure(plan, loads, cluster, l);
    EXPECT_GE(m.imbalance, m.lp_bound - 1e-9);
    EXPECT_GE(m.lp_bound, 1 - 1e-9);
  }
}

// The least largest load of two GPUs of two slots and two speeds, from every way to fill them.
TEST(BestTest, SlowDevicesGetFewerTokens) {
  Random random(39);
  Cluster cluster = UniformCluster(2, 1, 2);
  cluster.devices[1].speed = 0.4;
  for (int round = 0; round < 30; ++round) {
    const TokenCounts loads = Skewed(&random, 1, 3);
    const Placement plan = Planned("best", loads, cluster).placement;
    ASSERT_TRUE(Validate(plan, loads, cluster, Rules{true, true, 1, true}));
    double least = 1e300;
    Placement other = EmptyPlacement(loads, cluster);
    for (int code = 0; code < 81; ++code) {
      for (int s = 0, rest = code; s < 4; ++s, rest /= 3) {
        other.slot_expert[static_cast<std::size_t>(s)] = rest % 3;
      }
      if (!Validate(other, loads, cluster, Rules{true, true, 1, true})) continue;
      least = std::min(least, Peak(other, loads, cluster, 0));
    }
    ASSERT_LE(Peak(plan, loads, cluster, 0), least * (1 + 1e-9)) << round;
  }
  // Many experts: devices are evenly loaded, and so the token counts are not.
  const TokenCounts loads = Skewed(&random, 4, 48);
  cluster = UniformCluster(2, 4, 10);
  for (const std::uint32_t d : {1U, 6U}) cluster.devices[d].speed = 0.5;
  const StrategyResult result = Planned("best", loads, cluster);
  const ModelMetrics metrics = Measure(result.placement, loads, cluster);
  EXPECT_LE(metrics.imbalance_max, 1.02);
  cluster.devices[1].speed = cluster.devices[6].speed = 1;
  EXPECT_GT(Measure(result.placement, loads, cluster).imbalance_mean, 1.1);
}

TEST(BestTest, GroupsStayOnTheirNode) {
  Random random(40);
  const TokenCounts loads = Skewed(&random, 6, 64);
  Cluster cluster = UniformCluster(4, 4, 5);
  Options options;
  options.eplb_groups = 8;
  const Placement best = Planned("best", loads, cluster, nullptr, options).placement;
  const Placement plus = Planned("eplb+", loads, cluster, nullptr, options).placement;
  ASSERT_TRUE(Validate(best, loads, cluster, Rules{true, true, 1, true}));
  const auto groups_of = [&](const Placement& plan, std::uint32_t layer, std::uint32_t node) {
    std::set<std::int32_t> groups;
    for (std::uint32_t d = cluster.device_first(node); d < cluster.device_first(node + 1); ++d) {
      for (const std::int32_t e : plan.slots(layer, d)) groups.insert(e / 8);
    }
    return groups;
  };
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    for (std::uint32_t n = 0; n < 4; ++n) EXPECT_EQ(groups_of(best, l, n).size(), 2U);
    EXPECT_LE(Peak(best, loads, cluster, l), Peak(plus, loads, cluster, l) * (1 + 1e-9)) << l;
  }
  // An old plan names the nodes.
  Placement old = best;
  const auto shift = static_cast<std::ptrdiff_t>(best.slot_count() / 4);
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    const auto slots = old.layer(l);
    std::rotate(slots.begin(), slots.begin() + shift, slots.end());
  }
  EXPECT_EQ(Planned("best", loads, cluster, &old, options).placement.slot_expert, old.slot_expert);
  // A slow node gets groups with fewer tokens.
  for (std::uint32_t d = 0; d < 4; ++d) cluster.devices[d].speed = 0.5;
  const Placement slow = Planned("best", loads, cluster, nullptr, options).placement;
  EXPECT_LT(Measure(slow, loads, cluster).imbalance_mean,
            Measure(best, loads, cluster).imbalance_mean);
  // A node without the slots.
  cluster = UniformCluster(4, 4, 5);
  for (std::uint32_t d = 0; d < 4; ++d) cluster.devices[d].slots = 3;
  const auto refused = (*FindStrategy("best"))->plan(loads, cluster, nullptr, options);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("\"node0\" has 12 slots for the 16 experts"),
            std::string::npos)
      << refused.error().message;
}

TEST(BestTest, GroupsOfDifferentSizesStayOnTheirNode) {
  Random random(41);
  const TokenCounts loads = Skewed(&random, 6, 12);
  Options options;
  options.eplb_groups = 4;
  options.eplb_policy = EplbPolicy::kHierarchical;
  options.expert_group = {0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3};
  Cluster cluster = UniformCluster(2, 2, 3);
  // Six slots of a node fit the first and second group, or the third and fourth.
  const Placement plan = Planned("best", loads, cluster, nullptr, options).placement;
  ASSERT_TRUE(Validate(plan, loads, cluster, Rules{true, true, 1, true}));
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    const auto slots = plan.layer(l);
    for (std::size_t s = 0; s < slots.size(); ++s) {
      const bool low = options.expert_group[static_cast<std::size_t>(slots[s])] < 2;
      const bool first = options.expert_group[static_cast<std::size_t>(slots[0])] < 2;
      EXPECT_EQ(low == first, s < 6) << "layer " << l << " slot " << s;
    }
  }
  // A node with empty groups stays empty.
  options.eplb_groups = 2;
  options.expert_group.assign(12, 1);
  cluster = UniformCluster(2, 2, 6);
  const Placement half = Planned("best", loads, cluster, nullptr, options).placement;
  EXPECT_EQ(std::ranges::count(half.layer(0), kNoExpert), 12);
  // Strategies that cannot, and nodes without the slots.
  const auto refused = [&](std::string_view strategy, const std::string& part) {
    const auto found = (*FindStrategy(strategy))->plan(loads, cluster, nullptr, options);
    ASSERT_FALSE(found) << strategy;
    EXPECT_EQ(found.error().code, Errc::kInfeasible);
    EXPECT_NE(found.error().message.find(part), std::string::npos) << found.error().message;
  };
  refused("eplb", "--everywhere leaves the groups of --groups with different numbers");
  refused("eplb+", "--everywhere leaves the groups of --groups with different numbers");
  cluster = UniformCluster(2, 2, 4);
  refused("best", "found no nodes with enough slots for the 2 groups of --groups");
}

// The plan reports the cost of surviving: recovery and balance pull in different directions.
TEST(BestTest, ObjectivesTradeRecoveryForBalance) {
  Random random(37);
  const TokenCounts loads = Skewed(&random, 4, 16);
  const Cluster cluster = UniformCluster(10, 1, 6);
  Options options;
  options.copies_min = 2;
  const auto verified = [&](Objective objective) {
    options.objective = objective;
    const Placement plan = Planned("best", loads, cluster, nullptr, options).placement;
    return std::pair(Measure(plan, loads, cluster).imbalance_mean,
                     ModelRecovery(plan, cluster).survived[4]);
  };
  const auto balance = verified(Objective::kBalance);
  const auto mixed = verified(Objective::kMixed);
  const auto recovery = verified(Objective::kRecovery);
  EXPECT_LE(balance.first, mixed.first + 1e-9);
  EXPECT_LE(mixed.first, recovery.first + 1e-9);
  EXPECT_LE(balance.second, recovery.second);
}

TEST(BestTest, TheSameInputGivesTheSamePlan) {
  Random random(38);
  const TokenCounts loads = Skewed(&random, 16, 48);
  const Cluster cluster = UniformCluster(4, 4, 4);
  const Placement first = Planned("best", loads, cluster).placement;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Planned("best", loads, cluster).placement.slot_expert, first.slot_expert);
  }
}

}  // namespace
}  // namespace shardwright::placement
