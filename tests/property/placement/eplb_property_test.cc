// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "placement/core/metrics.h"
#include "placement/strategy/eplb.h"
#include "property/cases.h"
#include "random_moe.h"

namespace shardwright::placement {
namespace {

using Slots = std::vector<std::int32_t>;

// The algorithm as its description reads, step by step, without heaps.
struct Plain {
  static std::vector<std::uint32_t> Descending(const std::vector<float>& w) {
    std::vector<std::uint32_t> order(w.size());
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return w[a] > w[b]; });
    return order;
  }

  // Items of every bin, in the order in which they came.
  static std::vector<std::vector<std::uint32_t>> Pack(const std::vector<float>& w,
                                                      std::uint32_t bins) {
    std::vector<std::vector<std::uint32_t>> bin(bins);
    const std::size_t size = w.size() / bins;
    if (size == 1) {
      for (std::uint32_t i = 0; i < bins; ++i) bin[i] = {i};
      return bin;
    }
    std::vector<float> weight(bins, 0);
    for (const std::uint32_t item : Descending(w)) {
      std::uint32_t lightest = bins;
      for (std::uint32_t b = 0; b < bins; ++b) {
        if (bin[b].size() == size) continue;
        if (lightest == bins || weight[b] < weight[lightest]) lightest = b;
      }
      bin[lightest].push_back(item);
      weight[lightest] += w[item];
    }
    return bin;
  }

  static std::vector<std::uint32_t> Replicate(const std::vector<float>& w, std::uint32_t slots,
                                              std::vector<std::uint32_t>* count) {
    std::vector<std::uint32_t> replicas(w.size());
    std::iota(replicas.begin(), replicas.end(), 0U);
    count->assign(w.size(), 1);
    while (replicas.size() < slots) {
      std::uint32_t hot = 0;
      for (std::uint32_t e = 1; e < w.size(); ++e) {
        const auto share = [&](std::uint32_t x) { return w[x] / static_cast<float>((*count)[x]); };
        if (share(e) > share(hot)) hot = e;
      }
      replicas.push_back(hot);
      ++(*count)[hot];
    }
    return replicas;
  }

  static Slots Hierarchical(const std::vector<float>& w, const EplbShape& shape) {
    const auto group_size = static_cast<std::uint32_t>(w.size()) / shape.groups;
    std::vector<float> of_group(shape.groups, 0);
    for (std::size_t e = 0; e < w.size(); ++e) of_group[e / group_size] += w[e];
    Slots slots;
    for (const auto& groups : Pack(of_group, shape.nodes)) {
      std::vector<std::uint32_t> experts;
      std::vector<float> load;
      for (const std::uint32_t g : groups) {
        for (std::uint32_t i = 0; i < group_size; ++i) {
          experts.push_back(g * group_size + i);
          load.push_back(w[experts.back()]);
        }
      }
      std::vector<std::uint32_t> count;
      const auto replicas = Replicate(load, shape.slots / shape.nodes, &count);
      std::vector<float> share;
      share.reserve(replicas.size());
      for (const std::uint32_t e : replicas) {
        share.push_back(load[e] / static_cast<float>(count[e]));
      }
      for (const auto& bin : Pack(share, shape.gpus / shape.nodes)) {
        for (const std::uint32_t item : bin) {
          slots.push_back(static_cast<std::int32_t>(experts[replicas[item]]));
        }
      }
    }
    return slots;
  }
};

TEST(EplbProperty, IsTheAlgorithmOfItsDescription) {
  Random random(201);
  for (int i = 0; i < kCases; ++i) {
    EplbShape shape;
    shape.nodes = Between(&random, 1, 3);
    shape.groups = shape.nodes * Between(&random, 1, 2);
    shape.gpus = shape.nodes * Between(&random, 1, 3);
    const std::uint32_t experts = shape.groups * Between(&random, 1, 4);
    const std::uint32_t per_gpu = (experts + shape.gpus - 1) / shape.gpus;
    shape.slots = shape.gpus * (per_gpu + Between(&random, 0, 3));
    const auto tokens = RandomTokens(&random, experts);
    const std::vector<float> weights(tokens.begin(), tokens.end());
    ASSERT_EQ(EplbLayer(tokens, shape, true), Plain::Hierarchical(weights, shape)) << i;
    EplbShape global{shape.slots, 1, 1, shape.gpus};
    ASSERT_EQ(EplbLayer(tokens, shape, false), Plain::Hierarchical(weights, global)) << i;
  }
}

// No other counts have a lower hottest replica: with one slot less for the hottest replica's share
// the experts would need more slots than there are.
TEST(EplbProperty, CountsMinimizeTheHottestReplica) {
  Random random(202);
  for (int i = 0; i < kCases; ++i) {
    const std::uint32_t experts = Between(&random, 1, 8);
    const std::uint32_t slots = experts + Between(&random, 0, 20);
    std::vector<float> weights(experts);
    for (auto& w : weights) w = static_cast<float>(random.Below(1000));
    const auto counts = EplbCounts(weights, slots);
    ASSERT_EQ(std::accumulate(counts.begin(), counts.end(), 0U), slots);
    double hottest = 0;
    for (std::uint32_t e = 0; e < experts; ++e) {
      ASSERT_GE(counts[e], 1U);
      hottest = std::max(hottest, static_cast<double>(weights[e]) / counts[e]);
    }
    if (hottest == 0) continue;
    std::uint64_t needed = 0;  // slots for a strictly lower hottest replica
    for (const float w : weights) {
      const double share = static_cast<double>(w) / hottest;
      const auto whole = static_cast<std::uint64_t>(share * (1 + 1e-9));
      needed += std::max<std::uint64_t>(1, whole + (share * (1 + 1e-6) >= double(whole) ? 1 : 0));
    }
    ASSERT_GT(needed, slots) << i;
  }
}

TEST(EplbProperty, PlusIsAsEvenAndHasNoAvoidableDuplicates) {
  Random random(203);
  int more_even = 0;
  for (int i = 0; i < kCases; ++i) {
    const Cluster cluster = UniformCluster(1, Between(&random, 1, 5), Between(&random, 1, 4));
    const auto slots = static_cast<std::uint32_t>(cluster.live_slots());
    const TokenCounts loads = RandomLoads(&random, 1, Between(&random, 1, slots));
    const auto plus = (*FindStrategy("eplb+"))->plan(loads, cluster, nullptr, {});
    ASSERT_TRUE(plus.has_value());
    ASSERT_TRUE(Validate(plus->placement, loads, cluster, Rules{true, true, 1, true}).has_value())
        << i;
    const auto eplb = (*FindStrategy("eplb"))->plan(loads, cluster, nullptr, {});
    const auto duplicates = Measure(eplb->placement, loads, cluster, 0).device_duplicates;
    const double ours = Measure(plus->placement, loads, cluster, 0).imbalance;
    const double theirs = Measure(eplb->placement, loads, cluster, 0).imbalance;
    if (duplicates == 0) {
      ASSERT_LE(ours, theirs * (1 + 1e-9)) << i;
    }
    more_even += ours < theirs * (1 - 1e-9) ? 1 : 0;
  }
  EXPECT_GT(more_even, 0);
}

}  // namespace
}  // namespace shardwright::placement
