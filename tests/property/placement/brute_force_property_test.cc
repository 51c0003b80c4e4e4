// SPDX-License-Identifier: Apache-2.0
// Verifies plans of all strategies again by exhaustive enumeration: each device, each subset of
// experts, each set of failures, and in small clusters each placement.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "placement/verify/verify.h"
#include "property/cases.h"
#include "random_moe.h"

namespace shardwright::placement {
namespace {

constexpr double kRounding = 1e-9;

struct Case {
  Cluster cluster;
  TokenCounts loads;
  Options options;
};

/// One to six nodes in up to three racks, of equal or unequal GPUs, some of them dead.
Cluster RandomRacks(Random* random) {
  const std::uint32_t nodes = Between(random, 1, 6);
  const bool even = random->Below(2) == 0;
  const std::uint32_t gpus = Between(random, 1, 3);
  const std::uint32_t slots = Between(random, 1, 5);
  Cluster cluster;
  for (std::uint32_t r = Between(random, 1, 3); r > 0; --r) {
    cluster.racks.push_back("rack" + std::to_string(r));
  }
  for (std::uint32_t n = 0; n < nodes; ++n) {
    const auto rack = static_cast<std::uint32_t>(random->Below(cluster.racks.size()));
    cluster.nodes.push_back({"node" + std::to_string(n), rack, n == 0 || random->Below(10) > 0});
    for (std::uint32_t g = even ? gpus : Between(random, 1, 3); g > 0; --g) {
      cluster.devices.push_back({n, even ? slots : Between(random, 1, 5)});
    }
  }
  cluster.expert_bytes = 3;
  return cluster;
}

Case RandomCase(Random* random) {
  Case made;
  made.cluster = RandomRacks(random);
  const auto slots = static_cast<std::uint32_t>(made.cluster.live_slots());
  made.loads = RandomLoads(random, Between(random, 1, 3), Between(random, 1, std::min(slots, 10U)));
  made.options.copies_min = Between(random, 1, 3);
  made.options.copies_may_fall = random->Below(2) == 0;
  made.options.failure_unit = random->Below(2) == 0 ? FailureUnit::kNode : FailureUnit::kRack;
  made.options.best_effort = random->Below(50) == 0 ? 1 : 0;
  made.options.hecate.reshard = random->Below(4) > 0;
  if (random->Below(4) > 0) made.options.hecate.overlap = Between(random, 0, 4);
  if (random->Below(4) > 0) made.options.hecate.spare = Between(random, 0, 2);
  return made;
}

/// Number of replicas of each expert of a layer on each live device: [device][expert].
using Held = std::vector<std::vector<std::uint32_t>>;

Held HeldIn(const Placement& placement, std::uint32_t layer) {
  Held held(placement.device_count(), std::vector<std::uint32_t>(placement.experts, 0));
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    for (const std::int32_t e : placement.slots(layer, d)) {
      if (e != kNoExpert) ++held[d].at(static_cast<std::size_t>(e));
    }
  }
  return held;
}

std::uint32_t CountOn(const Held& held, std::uint32_t device) {
  return std::accumulate(held[device].begin(), held[device].end(), 0U);
}

std::uint32_t CountOf(const Held& held, std::uint32_t expert) {
  return std::accumulate(held.begin(), held.end(), 0U,
                         [&](std::uint32_t sum, const auto& on) { return sum + on[expert]; });
}

/// Every expert is placed, dead nodes are empty, and permanent replicas fit the slots. If a
/// strategy copies experts for an iteration, each expert has one owner.
void ExpectRules(const VerifiedPlan& plan, const Case& given) {
  const StrategyResult& result = plan.result;
  for (std::uint32_t l = 0; l < given.loads.layers; ++l) {
    const Held held = HeldIn(result.placement, l);
    const Held state = result.owners ? HeldIn(*result.owners, l) : held;
    ASSERT_EQ(state.size(), given.cluster.device_count());
    for (std::uint32_t e = 0; e < given.loads.experts; ++e) {
      ASSERT_GE(CountOf(state, e), 1U);
      if (result.owners) {
        ASSERT_EQ(CountOf(state, e), 1U);
      }
    }
    for (std::uint32_t d = 0; d < given.cluster.device_count(); ++d) {
      ASSERT_LE(CountOn(state, d), given.cluster.alive(d) ? given.cluster.devices[d].slots : 0);
      if (!given.cluster.alive(d)) {
        ASSERT_EQ(CountOn(held, d), 0U);
      }
      for (std::uint32_t e = 0; e < given.loads.experts; ++e) ASSERT_GE(held[d][e], state[d][e]);
    }
  }
}

/// The busiest device's tokens when an expert's replicas share them evenly.
double BusiestEvenly(const Held& held, std::span<const std::uint64_t> tokens) {
  double most = 0;
  for (const auto& on : held) {
    double load = 0;
    for (std::uint32_t e = 0; e < tokens.size(); ++e) {
      if (on[e] == 0) continue;
      load += static_cast<double>(tokens[e]) * on[e] / CountOf(held, e);
    }
    most = std::max(most, load);
  }
  return most;
}

/// The same if tokens may be split in any way: some experts are too hot for all their replicas.
double BusiestAtBest(const Held& held, std::span<const std::uint64_t> tokens) {
  double most = 0;
  for (std::uint32_t chosen = 1; chosen < (1U << tokens.size()); ++chosen) {
    double sum = 0;
    std::set<std::size_t> holders;
    for (std::uint32_t e = 0; e < tokens.size(); ++e) {
      if ((chosen >> e & 1) == 0) continue;
      sum += static_cast<double>(tokens[e]);
      for (std::size_t d = 0; d < held.size(); ++d) {
        if (held[d][e] > 0) holders.insert(d);
      }
    }
    most = std::max(most, sum / static_cast<double>(holders.size()));
  }
  return most;
}

void ExpectBalance(const VerifiedPlan& plan, const Case& given) {
  for (std::uint32_t l = 0; l < given.loads.layers; ++l) {
    const auto tokens = given.loads.layer(l);
    const Held held = HeldIn(plan.result.placement, l);
    const double all = std::accumulate(tokens.begin(), tokens.end(), 0.0);
    const double mean = all / given.cluster.live_devices();
    const LayerMetrics& said = plan.metrics.layers[l];
    const double found = all > 0 ? BusiestEvenly(held, tokens) / mean : 1;
    const double best = all > 0 ? BusiestAtBest(held, tokens) / mean : 1;
    ASSERT_NEAR(said.imbalance, found, kRounding * found);
    ASSERT_NEAR(said.lp_bound, best, kRounding * best);
    ASSERT_LE(said.bound, found * (1 + kRounding));
    ASSERT_LE(said.lp_bound, found * (1 + kRounding));
  }
}

/// Tries every set of failures: computes which sizes always survive, and how often the others do.
void ExpectSurvival(const VerifiedPlan& plan, const Case& given) {
  const Cluster& cluster = given.cluster;
  const Placement& state = plan.result.owners ? *plan.result.owners : plan.result.placement;
  std::map<std::uint32_t, std::uint32_t> bit;  // by failure unit that has a live node
  const auto unit_of = [&](std::uint32_t node) {
    return given.options.failure_unit == FailureUnit::kRack ? cluster.nodes[node].rack : node;
  };
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    if (cluster.nodes[n].alive) bit.emplace(unit_of(n), static_cast<std::uint32_t>(bit.size()));
  }
  std::vector<std::uint32_t> holders;  // by expert of a layer: units, as bits
  for (std::uint32_t l = 0; l < given.loads.layers; ++l) {
    const Held held = HeldIn(state, l);
    for (std::uint32_t e = 0; e < given.loads.experts; ++e) {
      std::uint32_t units = 0;
      for (std::uint32_t d = 0; d < held.size(); ++d) {
        if (held[d][e] > 0) units |= 1U << bit.at(unit_of(cluster.devices[d].node));
      }
      holders.push_back(units);
    }
  }
  std::vector<double> sets(bit.size() + 1, 0), survived(bit.size() + 1, 0);
  for (std::uint32_t failed = 0; failed < (1U << bit.size()); ++failed) {
    const auto size = static_cast<std::size_t>(__builtin_popcount(failed));
    ++sets[size];
    survived[size] += std::all_of(holders.begin(), holders.end(),
                                  [&](std::uint32_t units) { return (units & ~failed) != 0; });
  }
  std::int64_t certain = -1;
  while (survived[static_cast<std::size_t>(certain + 1)] ==
         sets[static_cast<std::size_t>(certain + 1)]) {
    ++certain;
  }
  ASSERT_EQ(plan.model_recovery.certain, certain);
  ASSERT_EQ(plan.model_recovery.survived.size(), sets.size());
  for (std::size_t k = 0; k < sets.size(); ++k) {
    ASSERT_NEAR(plan.model_recovery.survived[k], survived[k] / sets[k], kRounding);
  }
  if (plan.strategy == "best" || plan.strategy == "lazarus") {
    std::uint32_t kept = given.options.copies_min;
    for (const LayerNotes& notes : plan.result.notes) kept = std::min(kept, notes.copies_min);
    ASSERT_GE(certain, std::int64_t{kept} - 1);
    if (!given.options.copies_may_fall) {
      ASSERT_EQ(kept, given.options.copies_min);
    }
  }
}

TEST(BruteForceProperty, EveryStrategyIsWhatItSays) {
  Random random(605);
  std::map<std::string, int> planned;
  for (int i = 0; i < kCases / 50; ++i) {
    const Case given = RandomCase(&random);
    ASSERT_TRUE(Validate(given.loads, given.cluster).has_value());
    const Placement before = RandomPlacement(&random, given.loads, given.cluster);
    const Placement* current = random.Below(2) == 0 ? nullptr : &before;
    VerifyOptions verify;
    verify.unit = given.options.failure_unit;
    for (const Strategy& strategy : Strategies()) {
      SCOPED_TRACE(std::string(strategy.name) + ", case " + std::to_string(i));
      auto made = strategy.plan(given.loads, given.cluster, current, given.options);
      if (!made) {
        ASSERT_EQ(made.error().code, Errc::kInfeasible) << made.error().message;
        continue;
      }
      const auto plan =
          VerifyPlan(strategy.name, *std::move(made), given.loads, given.cluster, current, verify);
      ASSERT_TRUE(plan.has_value()) << plan.error().message;
      ++planned[std::string(strategy.name)];
      ASSERT_NO_FATAL_FAILURE(ExpectRules(*plan, given));
      ASSERT_NO_FATAL_FAILURE(ExpectBalance(*plan, given));
      ASSERT_NO_FATAL_FAILURE(ExpectSurvival(*plan, given));
    }
  }
  for (const Strategy& strategy : Strategies()) {
    EXPECT_GT(planned[std::string(strategy.name)], kCases / 500) << strategy.name;
  }
}

/// Visits every way to fill the slots of a layer. Slots of a device are filled in ascending order.
template <class Visit>
void ForEachFilling(const Cluster& cluster, std::uint32_t experts, std::uint32_t device,
                    std::uint32_t slot, std::uint32_t least, Held* held, const Visit& visit) {
  if (device == cluster.device_count()) return visit();
  if (slot == (cluster.alive(device) ? cluster.devices[device].slots : 0)) {
    return ForEachFilling(cluster, experts, device + 1, 0, 0, held, visit);
  }
  for (std::uint32_t e = least; e < experts; ++e) {
    ++(*held)[device][e];
    ForEachFilling(cluster, experts, device, slot + 1, e, held, visit);
    --(*held)[device][e];
  }
  // The rest of this device stays empty.
  ForEachFilling(cluster, experts, device + 1, 0, 0, held, visit);
}

// The bound is below the best of all placements in as many slots, and that below every plan.
TEST(BruteForceProperty, NoPlacementIsBetterThanTheBound) {
  Random random(606);
  for (int i = 0; i < kCases / 20; ++i) {
    Cluster cluster = RandomRacks(&random);
    while (cluster.live_slots() > 6) cluster = RandomRacks(&random);
    const auto slots = static_cast<std::uint32_t>(cluster.live_slots());
    const TokenCounts loads = RandomLoads(&random, 1, Between(&random, 1, std::min(slots, 4U)));
    const auto tokens = loads.layer(0);
    const double mean = std::accumulate(tokens.begin(), tokens.end(), 0.0) / cluster.live_devices();
    if (mean == 0) continue;
    std::vector<double> best(slots + std::size_t{1}, std::numeric_limits<double>::infinity());
    Held held(cluster.device_count(), std::vector<std::uint32_t>(loads.experts, 0));
    ForEachFilling(cluster, loads.experts, 0, 0, 0, &held, [&] {
      std::uint32_t used = 0;
      for (std::uint32_t e = 0; e < loads.experts; ++e) {
        const std::uint32_t count = CountOf(held, e);
        if (count == 0) return;
        used += count;
      }
      best[used] = std::min(best[used], BusiestEvenly(held, tokens) / mean);
    });
    for (const Strategy& strategy : Strategies()) {
      const auto plan = strategy.plan(loads, cluster, nullptr, {});
      if (!plan || plan->owners) continue;
      const LayerMetrics said = Measure(plan->placement, loads, cluster, 0);
      ASSERT_LE(best[said.replicas], said.imbalance * (1 + kRounding)) << strategy.name << " " << i;
      ASSERT_LE(said.bound, best[said.replicas] * (1 + kRounding)) << strategy.name << " " << i;
    }
  }
}

}  // namespace
}  // namespace shardwright::placement
