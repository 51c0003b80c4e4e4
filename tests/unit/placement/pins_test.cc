// SPDX-License-Identifier: Apache-2.0
// Plans of best with experts that are pinned to nodes.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "placement/core/metrics.h"
#include "placement/core/random.h"
#include "placement/migration/migration.h"
#include "support.h"

namespace shardwright::placement {
namespace {

bool Obeys(std::uint32_t expert, std::uint32_t node, const std::vector<Pin>& pins) {
  return std::ranges::all_of(pins, [&](const Pin& pin) {
    return !std::ranges::binary_search(pin.experts, expert) ||
           std::ranges::binary_search(pin.nodes, node);
  });
}

/// Tries every way to fill the slots of nodes of one device. Returns the least peak, nothing if no
/// way obeys.
std::optional<double> LeastPinnedPeak(const TokenCounts& loads, std::uint32_t nodes,
                                      std::uint32_t slots, const std::vector<Pin>& pins) {
  std::vector<std::vector<std::uint32_t>> contents;  // sets of at most `slots` experts
  for (std::uint32_t set = 0; set < (1U << loads.experts); ++set) {
    std::vector<std::uint32_t> content;
    for (std::uint32_t e = 0; e < loads.experts; ++e) {
      if ((set >> e & 1U) != 0) content.push_back(e);
    }
    if (content.size() <= slots) contents.push_back(content);
  }
  std::vector<const std::vector<std::uint32_t>*> chosen(nodes);
  std::optional<double> least;
  const std::function<void(std::uint32_t)> fill = [&](std::uint32_t node) {
    if (node < nodes) {
      for (const auto& content : contents) {
        if (!std::ranges::all_of(content, [&](std::uint32_t e) { return Obeys(e, node, pins); })) {
          continue;
        }
        // best leaves a slot empty only if no expert may fill it.
        std::uint32_t allowed = 0;
        for (std::uint32_t e = 0; e < loads.experts; ++e) allowed += Obeys(e, node, pins) ? 1 : 0;
        if (content.size() < std::min(slots, allowed)) continue;
        chosen[node] = &content;
        fill(node + 1);
      }
      return;
    }
    std::vector<double> count(loads.experts, 0);
    for (const auto* content : chosen) {
      for (const std::uint32_t e : *content) ++count[e];
    }
    if (std::ranges::count(count, 0.0) > 0) return;
    double peak = 0;
    for (const auto* content : chosen) {
      double load = 0;
      for (const std::uint32_t e : *content) {
        load += static_cast<double>(loads.tokens[e]) / count[e];
      }
      peak = std::max(peak, load);
    }
    least = std::min(least.value_or(peak), peak);
  };
  fill(0);
  return least;
}

Result<StrategyResult> PlanWithPins(const TokenCounts& loads, const Cluster& cluster,
                                    const Options& options, const Placement* current = nullptr) {
  return (*FindStrategy("best"))->plan(loads, cluster, current, options);
}

void ExpectObeyed(const Placement& plan, const Cluster& cluster, const std::vector<Pin>& pins) {
  for (std::uint32_t l = 0; l < plan.layers; ++l) {
    for (std::uint32_t d = 0; d < plan.device_count(); ++d) {
      for (const std::int32_t e : plan.slots(l, d)) {
        if (e == kNoExpert) continue;
        EXPECT_TRUE(Obeys(static_cast<std::uint32_t>(e), cluster.devices[d].node, pins))
            << "expert " << e << " on node " << cluster.devices[d].node;
      }
    }
  }
}

std::vector<std::uint64_t> DrawnTokens(Random* random, std::size_t count) {
  std::vector<std::uint64_t> tokens(count);
  for (auto& t : tokens) t = 1 + random->Below(10) * random->Below(100);
  return tokens;
}

// Pins of random experts to random nodes.
std::vector<Pin> DrawnPins(Random* random, std::uint32_t experts, std::uint32_t nodes) {
  std::vector<Pin> pins;
  for (std::uint32_t e = 0; e < experts; ++e) {
    if (random->Below(3) == 0) continue;
    Pin pin{{e}, {}};
    for (std::uint32_t n = 0; n < nodes; ++n) {
      if (random->Below(2) == 0) pin.nodes.push_back(n);
    }
    if (!pin.nodes.empty()) pins.push_back(pin);
  }
  return pins;
}

TEST(PinsTest, ArePossibleWheneverAnyPlacementIsAndNearTheOptimum) {
  Random random(71);
  int possible = 0;
  int impossible = 0;
  double excess = 0;
  for (int problem = 0; problem < 300; ++problem) {
    const auto nodes = static_cast<std::uint32_t>(2 + random.Below(2));
    const std::uint32_t slots = 2;
    const auto experts = static_cast<std::uint32_t>(3 + random.Below(2 * nodes - 2));
    const TokenCounts loads = LoadsOf(experts, DrawnTokens(&random, experts));
    const Cluster cluster = UniformCluster(nodes, 1, slots);
    Options options;
    options.pins = DrawnPins(&random, experts, nodes);
    const auto plan = PlanWithPins(loads, cluster, options);
    const std::optional<double> least = LeastPinnedPeak(loads, nodes, slots, options.pins);
    ASSERT_EQ(plan.has_value(), least.has_value()) << (plan ? "" : plan.error().message);
    if (!plan) {
      EXPECT_EQ(plan.error().code, Errc::kInfeasible);
      ++impossible;
      continue;
    }
    ++possible;
    ASSERT_TRUE(Validate(plan->placement, loads, cluster, Rules{true, true, 1, true}));
    ExpectObeyed(plan->placement, cluster, options.pins);
    const auto load = DeviceLoads(plan->placement, loads, cluster, 0);
    const double peak = *std::ranges::max_element(load);
    ASSERT_GE(peak, *least * (1 - 1e-9));
    excess += peak / *least - 1;
  }
  EXPECT_GT(possible, 100);
  EXPECT_GE(impossible, 10);
  EXPECT_LE(excess / possible, 0.01);
}

TEST(PinsTest, HoldWithCopiesOldPlansAndSeveralLayers) {
  Random random(72);
  const Cluster cluster = UniformCluster(4, 2, 5);
  const TokenCounts loads = LoadsOf(16, DrawnTokens(&random, std::size_t{3} * 16));
  Options options;
  options.copies_min = 2;
  options.pins = {{{0, 1, 2}, {0, 1}}, {{9}, {1, 3}}};
  const auto first = PlanWithPins(loads, cluster, options);
  ASSERT_TRUE(first) << first.error().message;
  ExpectObeyed(first->placement, cluster, options.pins);
  EXPECT_TRUE(Validate(first->placement, loads, cluster, Rules{true, true, 2, true}));
  // From a plan without pins, with other tokens.
  const auto free =
      PlanWithPins(LoadsOf(16, DrawnTokens(&random, std::size_t{3} * 16)), cluster, {});
  ASSERT_TRUE(free);
  for (const std::uint32_t copies : {1U, 2U}) {
    options.copies_min = copies;
    const auto moved = PlanWithPins(loads, cluster, options, &free->placement);
    ASSERT_TRUE(moved) << moved.error().message;
    ExpectObeyed(moved->placement, cluster, options.pins);
    EXPECT_TRUE(Validate(moved->placement, loads, cluster, Rules{true, true, copies, true}));
  }
}

// Without spare slots a pinned expert has to change places with another one.
TEST(PinsTest, MoveLittleFromAnOldPlanWithoutSpareSlots) {
  Random random(73);
  const Cluster cluster = UniformCluster(4, 2, 2);
  const TokenCounts loads = LoadsOf(16, DrawnTokens(&random, std::size_t{2} * 16));
  const auto old = PlanWithPins(loads, cluster, {});
  ASSERT_TRUE(old);
  Options options;
  for (std::uint32_t d = 0; d < 2; ++d) {  // experts of node 0 go to node 1 and node 3
    const auto e = static_cast<std::uint32_t>(old->placement.slots(0, d)[0]);
    options.pins.push_back({{e}, {d == 0 ? 1U : 3U}});
  }
  options.moves_max = 2 * 2 * 4;  // by layer two swaps, and as many by chance in the other layer
  const auto moved = PlanWithPins(loads, cluster, options, &old->placement);
  ASSERT_TRUE(moved) << moved.error().message;
  ExpectObeyed(moved->placement, cluster, options.pins);
  EXPECT_LE(PlanMigration(old->placement, moved->placement, cluster)->transfers.size(),
            *options.moves_max);
}

TEST(PinsTest, KeepCopiesOnDistinctNodesOfSeveralGpus) {
  Random random(74);
  int possible = 0;
  for (int problem = 0; problem < 200; ++problem) {
    const auto slots = static_cast<std::uint32_t>(1 + random.Below(2));
    const Cluster cluster = UniformCluster(3, 2, slots);
    const std::uint32_t experts = 3 * slots;  // two copies fill every slot
    const TokenCounts loads = LoadsOf(experts, DrawnTokens(&random, experts));
    Options options;
    options.copies_min = 2;
    for (const Pin& pin : DrawnPins(&random, experts, 3)) {
      if (pin.nodes.size() > 1) options.pins.push_back(pin);
    }
    const auto plan = PlanWithPins(loads, cluster, options);
    if (!plan) {
      EXPECT_EQ(plan.error().code, Errc::kInfeasible) << plan.error().message;
      continue;
    }
    ++possible;
    ExpectObeyed(plan->placement, cluster, options.pins);
    EXPECT_TRUE(Validate(plan->placement, loads, cluster, Rules{true, true, 2, true}));
  }
  EXPECT_GT(possible, 100);
}

TEST(PinsTest, ThatCannotBeObeyedAreNamed) {
  const TokenCounts loads = LoadsOf(4, {4, 3, 2, 1});
  Cluster cluster = UniformCluster(2, 1, 3);
  const auto refused = [&](std::vector<Pin> pins, std::uint32_t copies = 1) {
    Options options;
    options.copies_min = copies;
    options.pins = std::move(pins);
    const auto plan = PlanWithPins(loads, cluster, options);
    EXPECT_FALSE(plan);
    return plan ? "" : plan.error().message;
  };
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  has(refused({{{4}, {0}}}), "expert 4 does not exist, the layers have 4 experts");
  has(refused({{{0}, {2}}}), "node 2 does not exist, the cluster has 2 nodes");
  has(refused({{{0, 1, 2, 3}, {1}}}), "pinned to node 1, found no free slot");
  cluster = UniformCluster(2, 1, 4);
  has(refused({{{0}, {1}}}, 2), "expert 0 needs replicas on 2 failure units, but node 1 has 1");
  cluster.nodes[1].alive = false;
  has(refused({{{0}, {1}}}), "node 1 has 0 live ones");
}

}  // namespace
}  // namespace shardwright::placement
