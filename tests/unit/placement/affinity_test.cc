// SPDX-License-Identifier: Apache-2.0
// Exchanges of GPUs that keep tokens on them between layers.

#include "placement/affinity/affinity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "placement/core/metrics.h"
#include "placement/core/random.h"
#include "support.h"

namespace shardwright::placement {
namespace {

struct Problem {
  Cluster cluster;
  TokenCounts loads;
  Placement placement;
  Affinity affinity;
};

/// Draws a placement with every expert in every layer, and transitions between its layers.
Problem DrawnProblem(Random* random, const Cluster& cluster, std::uint32_t layers,
                     std::uint32_t experts) {
  Problem problem;
  problem.cluster = cluster;
  problem.loads = LoadsOf(experts, std::vector<std::uint64_t>(std::size_t{layers} * experts, 1));
  problem.placement = EmptyPlacement(problem.loads, cluster);
  for (std::uint32_t l = 0; l < layers; ++l) {
    std::vector<std::int32_t> drawn;
    for (std::uint32_t s = 0; s < cluster.live_slots(); ++s) {
      drawn.push_back(static_cast<std::int32_t>(s < experts ? s : random->Below(experts)));
    }
    for (std::size_t i = drawn.size(); i > 1; --i) std::swap(drawn[i - 1], drawn[random->Below(i)]);
    for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
      for (std::int32_t& slot : problem.placement.slots(l, d)) {
        if (!cluster.holds(d)) continue;
        slot = drawn.back();
        drawn.pop_back();
      }
    }
  }
  problem.affinity.experts = experts;
  for (std::uint32_t l = 0; l + 1 < layers; ++l) {
    std::vector<std::uint64_t>& pair = problem.affinity.pairs.emplace_back();
    for (std::size_t i = 0; i < std::size_t{experts} * experts; ++i) {
      pair.push_back(random->Below(4) == 0 ? random->Below(1000) : random->Below(20));
    }
  }
  return problem;
}

/// Counts the replicas of an expert on the devices [first, last).
double Copies(const Placement& placement, std::uint32_t layer, std::uint32_t expert,
              std::uint32_t first, std::uint32_t last) {
  double copies = 0;
  for (std::uint32_t d = first; d < last; ++d) {
    for (const std::int32_t e : placement.slots(layer, d)) {
      copies += e == static_cast<std::int32_t>(expert) ? 1 : 0;
    }
  }
  return copies;
}

/// Counts the transitions of a pair of layers that stay on a device, or on a node, one pair of
/// experts at a time.
double KeptOn(bool node, const Problem& problem, const Placement& placement, std::uint32_t layer) {
  const Cluster& cluster = problem.cluster;
  const std::uint32_t experts = problem.affinity.experts;
  const std::uint32_t devices = cluster.device_count();
  double kept = 0;
  for (std::uint32_t i = 0; i < experts; ++i) {
    const double from = Copies(placement, layer, i, 0, devices);
    for (std::uint32_t j = 0; j < experts; ++j) {
      const double to = Copies(placement, layer + 1, j, 0, devices);
      double both = 0;
      for (std::uint32_t p = 0; p < (node ? cluster.node_count() : devices); ++p) {
        const std::uint32_t first = node ? cluster.device_first(p) : p;
        const std::uint32_t last = node ? cluster.device_first(p + 1) : p + 1;
        both += Copies(placement, layer, i, first, last) / from *
                Copies(placement, layer + 1, j, first, last) / to;
      }
      kept += both * static_cast<double>(problem.affinity.pairs[layer][i * experts + j]);
    }
  }
  return kept;
}

double ValueOf(const Problem& problem, const Placement& placement) {
  double value = 0;
  for (std::uint32_t l = 0; l + 1 < placement.layers; ++l) {
    value += KeptOn(false, problem, placement, l) + 8 * KeptOn(true, problem, placement, l);
  }
  return value;
}

/// Lists the permutations of devices that a scope allows.
std::vector<std::vector<std::uint32_t>> Allowed(const Cluster& cluster, ExchangeScope scope,
                                                FailureUnit unit) {
  std::vector<std::uint32_t> from(cluster.device_count());
  std::iota(from.begin(), from.end(), 0U);
  std::vector<std::vector<std::uint32_t>> allowed;
  do {
    bool fits = true;
    for (std::uint32_t d = 0; d < from.size(); ++d) {
      const Device& here = cluster.devices[d];
      const Device& there = cluster.devices[from[d]];
      fits = fits && here.slots == there.slots && here.speed == there.speed;
      if (scope == ExchangeScope::kInNodes) fits = fits && here.node == there.node;
      if (scope != ExchangeScope::kNodes) continue;
      const std::uint32_t first = cluster.device_first(here.node);
      fits = fits && there.node == cluster.devices[from[first]].node;
      if (unit == FailureUnit::kRack) {
        fits = fits && cluster.nodes[here.node].rack == cluster.nodes[there.node].rack;
      }
    }
    if (fits) allowed.push_back(from);
  } while (std::next_permutation(from.begin(), from.end()));
  return allowed;
}

Placement Exchanged(const Placement& placement, std::uint32_t layer,
                    const std::vector<std::uint32_t>& from) {
  Placement exchanged = placement;
  for (std::uint32_t d = 0; d < from.size(); ++d) {
    std::ranges::copy(placement.slots(layer, from[d]), exchanged.slots(layer, d).begin());
  }
  return exchanged;
}

/// Tries all exchanges in the layers after the first.
double BestValue(const Problem& problem, const std::vector<std::vector<std::uint32_t>>& allowed,
                 const Placement& placement, std::uint32_t layer = 1) {
  if (layer == placement.layers) return ValueOf(problem, placement);
  double best = 0;
  for (const auto& from : allowed) {
    best =
        std::max(best, BestValue(problem, allowed, Exchanged(placement, layer, from), layer + 1));
  }
  return best;
}

using Contents = std::multiset<std::vector<std::int32_t>>;

/// Returns the experts of the devices or nodes of a layer, without their places.
Contents ContentsOf(const Placement& placement, const Cluster& cluster, std::uint32_t layer,
                    bool of_nodes) {
  std::vector<std::vector<std::int32_t>> experts(of_nodes ? cluster.node_count()
                                                          : cluster.device_count());
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    const auto slots = placement.slots(layer, d);
    auto& mine = experts[of_nodes ? cluster.devices[d].node : d];
    mine.insert(mine.end(), slots.begin(), slots.end());
    std::ranges::sort(mine);
  }
  return {experts.begin(), experts.end()};
}

TEST(AffinityTest, TransitionsAreCountedLikeOneByOne) {
  Random random(11);
  for (int round = 0; round < 20; ++round) {
    const Problem problem = DrawnProblem(&random, UniformCluster(2, 3, 2), 3, 7);
    const Transitions found =
        MeasureTransitions(problem.affinity, problem.placement, problem.cluster);
    ASSERT_EQ(found.pairs.size(), 2U);
    double on_gpu = 0;
    double on_node = 0;
    double all = 0;
    for (std::uint32_t l = 0; l < 2; ++l) {
      on_gpu += KeptOn(false, problem, problem.placement, l);
      on_node += KeptOn(true, problem, problem.placement, l);
      const auto& pair = problem.affinity.pairs[l];
      const auto sum = std::accumulate(pair.begin(), pair.end(), std::uint64_t{0});
      EXPECT_EQ(found.pairs[l].all, sum);
      all += static_cast<double>(sum);
      EXPECT_NEAR(found.pairs[l].on_gpu, KeptOn(false, problem, problem.placement, l), all * 1e-9);
    }
    EXPECT_NEAR(found.gpu_share(), on_gpu / all, 1e-9);
    EXPECT_NEAR(found.node_share(), on_node / all, 1e-9);
    EXPECT_LE(found.gpu_share(), found.node_share());
  }
}

TEST(AffinityTest, EqualNodesReachTheOptimumOfAllLayers) {
  struct Case {
    Cluster cluster;
    ExchangeScope scope;
  };
  const Case cases[] = {{UniformCluster(1, 4, 2), ExchangeScope::kCluster},
                        {UniformCluster(2, 2, 2), ExchangeScope::kNodes},
                        {UniformCluster(3, 1, 2), ExchangeScope::kNodes},
                        {UniformCluster(2, 2, 2), ExchangeScope::kInNodes}};
  Random random(12);
  for (const Case& one : cases) {
    const auto allowed = Allowed(one.cluster, one.scope, FailureUnit::kNode);
    for (int round = 0; round < 8; ++round) {
      const Problem problem = DrawnProblem(&random, one.cluster, 3, 5);
      const Placement arranged =
          ArrangeForAffinity(problem.affinity, problem.placement, one.cluster, {one.scope});
      const double best = BestValue(problem, allowed, problem.placement);
      EXPECT_NEAR(ValueOf(problem, arranged), best, best * 1e-6);
      EXPECT_GE(best, ValueOf(problem, problem.placement));
    }
  }
}

TEST(AffinityTest, ASecondLayerReachesTheOptimumForTheFirst) {
  Random random(13);
  Cluster mixed = UniformCluster(3, 2, 2);
  mixed.devices[1].speed = 0.5;
  mixed.devices[5].speed = 0.5;
  mixed.nodes[2].rack = 1;
  mixed.racks.emplace_back("other");
  for (const Cluster& cluster : {UniformCluster(2, 2, 2), UniformCluster(2, 3, 1), mixed}) {
    for (const auto scope :
         {ExchangeScope::kCluster, ExchangeScope::kNodes, ExchangeScope::kInNodes}) {
      for (const auto unit : {FailureUnit::kNode, FailureUnit::kRack}) {
        const auto allowed = Allowed(cluster, scope, unit);
        for (int round = 0; round < 3; ++round) {
          const Problem problem = DrawnProblem(&random, cluster, 2, 5);
          const Placement arranged =
              ArrangeForAffinity(problem.affinity, problem.placement, cluster, {scope, unit});
          const double best = BestValue(problem, allowed, problem.placement);
          EXPECT_GE(ValueOf(problem, arranged), best * (1 - 1e-6));
        }
      }
    }
  }
}

TEST(AffinityTest, ContentsAndBalanceDoNotChange) {
  Random random(14);
  for (const auto scope :
       {ExchangeScope::kCluster, ExchangeScope::kNodes, ExchangeScope::kInNodes}) {
    Problem problem = DrawnProblem(&random, UniformCluster(3, 4, 3), 5, 16);
    for (auto& tokens : problem.loads.tokens) tokens = random.Below(1000);
    const Placement arranged =
        ArrangeForAffinity(problem.affinity, problem.placement, problem.cluster, {scope});
    EXPECT_GT(ValueOf(problem, arranged), ValueOf(problem, problem.placement));
    for (std::uint32_t l = 0; l < 5; ++l) {
      EXPECT_EQ(ContentsOf(arranged, problem.cluster, l, false),
                ContentsOf(problem.placement, problem.cluster, l, false));
      EXPECT_DOUBLE_EQ(Measure(arranged, problem.loads, problem.cluster, l).imbalance,
                       Measure(problem.placement, problem.loads, problem.cluster, l).imbalance);
      if (scope == ExchangeScope::kCluster) continue;
      EXPECT_EQ(ContentsOf(arranged, problem.cluster, l, true),
                ContentsOf(problem.placement, problem.cluster, l, true));
    }
  }
}

TEST(AffinityTest, GpusThatDifferKeepTheirExperts) {
  Random random(15);
  Cluster cluster = UniformCluster(2, 3, 2);
  cluster.devices[0].speed = 0.5;
  cluster.devices[1].slots = 3;
  cluster.devices[3].alive = false;
  cluster.devices[3].slots = 0;
  for (const auto scope :
       {ExchangeScope::kCluster, ExchangeScope::kNodes, ExchangeScope::kInNodes}) {
    const Problem problem = DrawnProblem(&random, cluster, 4, 6);
    const Placement arranged =
        ArrangeForAffinity(problem.affinity, problem.placement, cluster, {scope});
    EXPECT_GE(ValueOf(problem, arranged), ValueOf(problem, problem.placement));
    for (std::uint32_t l = 0; l < 4; ++l) {
      for (const std::uint32_t d : {0U, 1U, 3U}) {
        EXPECT_TRUE(std::ranges::equal(arranged.slots(l, d), problem.placement.slots(l, d)));
      }
    }
  }
}

TEST(AffinityTest, LayersThatDoNotFollowEachOtherDoNotMatter) {
  Random random(16);
  Problem problem = DrawnProblem(&random, UniformCluster(1, 4, 2), 3, 6);
  problem.affinity.pairs[1].clear();
  const Placement arranged =
      ArrangeForAffinity(problem.affinity, problem.placement, problem.cluster, {});
  EXPECT_TRUE(std::ranges::equal(arranged.layer(2), problem.placement.layer(2)));
  const Transitions found = MeasureTransitions(problem.affinity, arranged, problem.cluster);
  EXPECT_EQ(found.pairs[1].all, 0U);
  EXPECT_EQ(found.sum.all, found.pairs[0].all);
}

}  // namespace
}  // namespace shardwright::placement
