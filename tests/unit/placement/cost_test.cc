// SPDX-License-Identifier: Apache-2.0
// Time and memory of plans.

#include "placement/cost/cost.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "placement/core/dispatch.h"
#include "placement/core/metrics.h"
#include "placement/core/random.h"
#include "support.h"

namespace shardwright::placement {
namespace {

/// A placement of one layer.
Placement PlacedAs(const Cluster& cluster, std::uint32_t experts,
                   std::vector<std::int32_t> slot_expert) {
  const TokenCounts loads = LoadsOf(experts, std::vector<std::uint64_t>(experts, 1));
  Placement placement = EmptyPlacement(loads, cluster);
  EXPECT_EQ(placement.slot_expert.size(), slot_expert.size());
  placement.slot_expert = std::move(slot_expert);
  return placement;
}

/// Two nodes of two GPUs. A weight takes 1 microsecond of a token.
Cluster SmallCluster(std::uint32_t slots) {
  Cluster cluster = UniformCluster(2, 2, slots);
  cluster.expert_bytes = 14'000'000;
  cluster.param_bytes = 2'000'000;
  cluster.device_bytes_per_s = 1e11;
  cluster.node_bytes_per_s = 1e9;
  return cluster;
}

CostInputs Inputs() {
  CostInputs inputs;
  inputs.gpu_flops = 2e12;
  inputs.token_bytes = 1000;
  return inputs;
}

constexpr double kMicro = 1e-6;

TEST(CostTest, ExpertsWaitForTheBusiestGpu) {
  const Cluster cluster = SmallCluster(1);
  const Placement plain = PlacedAs(cluster, 4, {0, 1, 2, 3});
  const TokenCounts loads = LoadsOf(4, {40, 20, 10, 10});
  const ModelTimes times = TimesOf(plain, nullptr, loads, cluster, Inputs());
  ASSERT_EQ(times.layers.size(), 1U);
  // 40 tokens on GPU 0, once forward and for twice the time backward.
  EXPECT_NEAR(times.layers[0].experts, 3 * 40 * kMicro, 1e-12);
  // Node 0 receives half of 60 tokens, of 1000 bytes at 1 GB/s, in each of four AllToAll.
  EXPECT_NEAR(times.layers[0].all_to_all, 4 * 30 * kMicro, 1e-12);
  EXPECT_EQ(times.layers[0].exposed, 0);
  EXPECT_NEAR(times.seconds(), 240 * kMicro, 1e-12);
}

TEST(CostTest, SlowGpusAndSeveralIterations) {
  Cluster cluster = SmallCluster(1);
  cluster.devices[1].speed = 0.25;
  const Placement plain = PlacedAs(cluster, 4, {0, 1, 2, 3});
  TokenCounts loads = LoadsOf(4, {80, 40, 20, 20});
  loads.iterations = 2;
  const LayerTimes times = TimesOf(plain, nullptr, loads, cluster, Inputs()).layers[0];
  EXPECT_NEAR(times.experts, 3 * 20 / 0.25 * kMicro, 1e-12);
  EXPECT_NEAR(times.all_to_all, 4 * 30 * kMicro, 1e-12);
}

TEST(CostTest, GpuLinksLimitTheExchangeInANode) {
  Cluster cluster = SmallCluster(1);
  cluster.device_bytes_per_s = 1e8;
  const Placement plain = PlacedAs(cluster, 4, {0, 1, 2, 3});
  const TokenCounts loads = LoadsOf(4, {40, 20, 10, 10});
  // GPU 0 receives a quarter of 40 tokens from GPU 1, at 0.1 GB/s.
  EXPECT_NEAR(TimesOf(plain, nullptr, loads, cluster, Inputs()).layers[0].all_to_all,
              4 * 100 * kMicro, 1e-12);
}

TEST(CostTest, ReplicasOnAllGpusKeepTokensWhereTheyAre) {
  const Cluster cluster = SmallCluster(2);
  const Placement copies = PlacedAs(cluster, 5, {0, 1, 0, 2, 0, 3, 0, 4});
  const TokenCounts loads = LoadsOf(5, {400, 0, 0, 0, 0});
  for (const auto method : {DispatchMethod::kProportional, DispatchMethod::kTopology}) {
    CostInputs inputs = Inputs();
    inputs.dispatch = method;
    const LayerTimes times = TimesOf(copies, nullptr, loads, cluster, inputs).layers[0];
    EXPECT_NEAR(times.experts, 3 * 100 * kMicro, 1e-12);
    EXPECT_EQ(times.all_to_all, 0);
  }
}

TEST(CostTest, GathersPassEachLinkOnce) {
  const Cluster cluster = SmallCluster(3);
  // GPU 0 owns 0 and 4. All GPUs have expert 0, GPU 1 and GPU 3 have expert 4.
  const Placement owners = PlacedAs(cluster, 5, {0, 4, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1});
  const Placement copies = PlacedAs(cluster, 5, {0, 4, -1, 1, 0, 4, 2, 0, -1, 3, 0, 4});
  const LinkTraffic traffic = GatherTraffic(copies, owners, cluster, 0);
  EXPECT_EQ(traffic.node_out, (std::vector<double>{2, 0}));
  EXPECT_EQ(traffic.node_in, (std::vector<double>{0, 2}));
  EXPECT_EQ(traffic.gpu_out, (std::vector<double>{2, 0, 1, 0}));
  EXPECT_EQ(traffic.gpu_in, (std::vector<double>{0, 2, 0, 1}));
  // Two experts of 2 MB at 1 GB/s.
  const TokenCounts loads = LoadsOf(5, {4, 1, 1, 1, 1});
  const LayerTimes times = TimesOf(copies, &owners, loads, cluster, Inputs()).layers[0];
  EXPECT_NEAR(times.gather, 4e-3, 1e-12);
  EXPECT_EQ(times.reduce, times.gather);
}

TEST(CostTest, OtherLayersHideCopies) {
  const Cluster cluster = SmallCluster(2);
  const Placement owners = PlacedAs(cluster, 4, {0, -1, 1, -1, 2, -1, 3, -1});
  const Placement copies = PlacedAs(cluster, 4, {0, -1, 1, 0, 2, 0, 3, 0});
  const TokenCounts loads = LoadsOf(4, {40, 20, 10, 10});
  CostInputs inputs = Inputs();
  // A gather and a reduction take 2 ms each.
  struct Case {
    double nonmoe, exposed, rematerialized;
  };
  for (const Case& one : {Case{0, 4e-3, 6e-3}, Case{0.5e-3, 2.5e-3, 4.5e-3},
                          Case{1.5e-3, 0.5e-3, 1.5e-3}, Case{2e-3, 0, 0}}) {
    inputs.nonmoe_seconds = one.nonmoe;
    const ModelTimes times = TimesOf(copies, &owners, loads, cluster, inputs);
    EXPECT_NEAR(times.layers[0].exposed, one.exposed, 1e-12) << one.nonmoe;
    EXPECT_NEAR(times.layers[0].exposed_rematerialized, one.rematerialized, 1e-12) << one.nonmoe;
    EXPECT_NEAR(times.other, 3 * one.nonmoe, 1e-12);
    EXPECT_NEAR(times.rematerialized() - times.seconds(), one.rematerialized - one.exposed, 1e-12);
  }
}

TEST(CostTest, ReplicasWithStateAddUpTheirGradients) {
  Cluster cluster = SmallCluster(2);
  const Placement replicas = PlacedAs(cluster, 5, {0, 1, 0, 2, 0, 3, 4, -1});
  const LinkTraffic traffic = AllReduceTraffic(replicas, cluster, 0);
  EXPECT_EQ(traffic.gpu_in, (std::vector<double>{1, 1, 0, 0}));
  EXPECT_EQ(traffic.gpu_out, traffic.gpu_in);
  EXPECT_EQ(traffic.node_in, (std::vector<double>{1, 1}));
  EXPECT_EQ(traffic.node_out, traffic.node_in);
  const LayerTimes times =
      TimesOf(replicas, nullptr, LoadsOf(5, {3, 1, 1, 1, 1}), cluster, Inputs()).layers[0];
  EXPECT_EQ(times.gather, 0);
  EXPECT_NEAR(times.reduce, 2e-3, 1e-12);
  EXPECT_NEAR(times.exposed, 2e-3, 1e-12);
}

TEST(CostTest, RacksHaveLinksOfTheirOwn) {
  Cluster cluster = UniformCluster(4, 1, 1);
  cluster.racks = {"a", "b"};
  cluster.nodes[1].rack = cluster.nodes[3].rack = 1;
  const Placement plain = PlacedAs(cluster, 4, {0, 1, 2, 3});
  const std::vector<std::uint64_t> tokens = {40, 20, 10, 10};
  const TokenFlow flow = FlowOf(plain, tokens, cluster, 0, DispatchMethod::kProportional);
  // Rack a has experts 0 and 2; half of the tokens of each expert are in each rack.
  EXPECT_NEAR(flow.traffic.rack_in[0], 25, 1e-9);
  EXPECT_NEAR(flow.traffic.rack_out[0], 15, 1e-9);
  EXPECT_NEAR(flow.traffic.rack_in[1], 15, 1e-9);
  EXPECT_NEAR(flow.traffic.rack_out[1], 25, 1e-9);
}

TEST(CostTest, Speedups) {
  ModelTimes times;
  times.layers.resize(3);
  times.layers[0].experts = 1;
  times.layers[1].all_to_all = 2;
  times.other = 1;
  ModelTimes base = times;
  base.layers[0].experts = 2;
  base.layers[1].all_to_all = 16;
  const Speedup speedup = SpeedupOf(times, base);
  EXPECT_EQ(speedup.layers, (std::vector<double>{2, 8, 0}));
  EXPECT_EQ(speedup.least, 2);
  EXPECT_EQ(speedup.most, 8);
  EXPECT_NEAR(speedup.mean, 4, 1e-12);
  EXPECT_NEAR(speedup.model, 19.0 / 4, 1e-12);
}

TEST(CostTest, MemoryOfStateAndOfCopies) {
  const Cluster cluster = SmallCluster(3);
  TokenCounts loads = LoadsOf(4, {1, 1, 1, 1, 1, 1, 1, 1});
  Placement owners = EmptyPlacement(loads, cluster);
  Placement copies = owners;
  owners.slot_expert = {0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1,
                        0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1};
  // GPU 1 has two copies in layer 0 and one in layer 1.
  copies.slot_expert = {0, -1, -1, 1, 0, 2,  2, 0,  -1, 3, -1, -1,
                        0, 1,  -1, 1, 0, -1, 2, -1, -1, 3, -1, -1};
  const auto memory = MemoryOf(copies, &owners, cluster);
  ASSERT_TRUE(memory);
  EXPECT_EQ(memory->gpu.optimizer, 2 * 12'000'000U);
  EXPECT_EQ(memory->gpu.weights, (2 + 3) * 2'000'000U);
  EXPECT_EQ(memory->gpu.gradients, (2 + 2) * 2'000'000U);
  ASSERT_TRUE(memory->rematerialized);
  EXPECT_EQ(memory->rematerialized->weights, (2 + 2) * 2'000'000U);
  EXPECT_EQ(memory->rematerialized->bytes(), memory->gpu.bytes() - 2'000'000U);
  const auto replicated = MemoryOf(copies, nullptr, cluster);
  ASSERT_TRUE(replicated);
  EXPECT_FALSE(replicated->rematerialized);
  EXPECT_EQ(replicated->gpu.bytes(), 5 * 16'000'000U);
}

TEST(CostTest, MemoryOf64BitsIsTheLimit) {
  Cluster cluster = SmallCluster(1);
  cluster.expert_bytes = std::uint64_t{1} << 62;
  const auto memory = MemoryOf(PlacedAs(cluster, 4, {0, 1, 2, 3}), nullptr, cluster);
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().code, Errc::kLimit);
}

TEST(CostTest, MissingRates) {
  const auto message = [](const Cluster& cluster) {
    const Status status = CheckCost(Inputs(), cluster);
    if (status) return std::string();
    EXPECT_EQ(status.error().code, Errc::kUsage);
    return status.error().message;
  };
  EXPECT_TRUE(CheckCost(Inputs(), SmallCluster(1)));
  EXPECT_TRUE(CheckCost({}, UniformCluster(2, 2, 1)));
  Cluster cluster = SmallCluster(1);
  cluster.param_bytes = 0;
  EXPECT_NE(message(cluster).find("--expert-bytes"), std::string::npos);
  cluster = SmallCluster(1);
  cluster.device_bytes_per_s = 0;
  EXPECT_NE(message(cluster).find("--gpu-bandwidth"), std::string::npos);
  cluster.nodes[1].alive = false;
  cluster.devices[0].alive = false;
  EXPECT_TRUE(CheckCost(Inputs(), cluster));  // one GPU sends nothing
  cluster = SmallCluster(1);
  cluster.node_bytes_per_s = 0;
  EXPECT_NE(message(cluster).find("--node-bandwidth"), std::string::npos);
}

/// Adds up the transfers of a dispatch table.
TokenFlow FlowOfTable(const DispatchTable& table, const std::vector<std::uint32_t>& device,
                      const Cluster& cluster) {
  TokenFlow flow{std::vector<double>(cluster.device_count(), 0), LinkTraffic(cluster)};
  LinkTraffic& traffic = flow.traffic;
  for (const Send& send : table.sends) {
    const auto tokens = static_cast<double>(send.tokens);
    const std::uint32_t from = device[send.from];
    const std::uint32_t to = device[send.to];
    const std::uint32_t from_node = cluster.devices[from].node;
    const std::uint32_t to_node = cluster.devices[to].node;
    const std::uint32_t from_rack = cluster.nodes[from_node].rack;
    const std::uint32_t to_rack = cluster.nodes[to_node].rack;
    flow.tokens[to] += tokens;
    if (from == to) continue;
    if (from_node == to_node) {
      traffic.gpu_out[from] += tokens;
      traffic.gpu_in[to] += tokens;
      continue;
    }
    traffic.node_out[from_node] += tokens;
    traffic.node_in[to_node] += tokens;
    if (from_rack == to_rack) continue;
    traffic.rack_out[from_rack] += tokens;
    traffic.rack_in[to_rack] += tokens;
  }
  return flow;
}

void ExpectNear(const std::vector<double>& found, const std::vector<double>& expected,
                const std::string& what) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    // A table rounds the tokens of each expert and pair of GPUs to whole ones.
    EXPECT_NEAR(found[i], expected[i], 1e3) << what << " " << i;
  }
}

/// Draws clusters and placements, and compares the flow with the table of the trainer's dispatch.
TEST(CostTest, FlowsAreThoseOfDispatchTables) {
  Random random(7);
  for (int round = 0; round < 60; ++round) {
    Cluster cluster = UniformCluster(5, 3, 4);
    cluster.racks = {"a", "b"};
    for (Node& node : cluster.nodes) node.rack = static_cast<std::uint32_t>(random.Below(2));
    if (round % 3 == 0) cluster.nodes[random.Below(5)].alive = false;
    std::vector<std::uint32_t> device;  // by rank
    std::vector<std::uint32_t> node;    // by rank
    for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
      if (!cluster.alive(d)) continue;
      device.push_back(d);
      node.push_back(cluster.devices[d].node);
    }
    const auto ranks = static_cast<std::uint32_t>(device.size());
    constexpr std::uint32_t kExperts = 9;
    const TokenCounts shape = LoadsOf(kExperts, std::vector<std::uint64_t>(kExperts, 1));
    Placement placement = EmptyPlacement(shape, cluster);
    std::vector<std::uint64_t> tokens(kExperts);
    std::vector<std::uint64_t> by_rank(std::size_t{kExperts} * ranks);
    std::vector<std::uint32_t> replicas(std::size_t{kExperts} * ranks, 0);
    std::vector<std::vector<std::uint32_t>> holders(kExperts);
    std::int32_t next = 0;
    for (std::uint32_t r = 0; r < ranks; ++r) {
      for (std::int32_t& slot : placement.slots(0, device[r])) {
        if (next >= 9 && random.Below(4) == 0) continue;
        slot = next < 9 ? next : static_cast<std::int32_t>(random.Below(3));
        ++next;
        const auto e = static_cast<std::size_t>(slot);
        ++replicas[e * ranks + r];
        if (holders[e].empty() || holders[e].back() != r) holders[e].push_back(r);
      }
    }
    for (std::uint32_t e = 0; e < kExperts; ++e) {
      const std::uint64_t each = 1'000'000'000 + random.Below(2'000'000'000);
      tokens[e] = each * ranks;
      std::fill_n(by_rank.begin() + std::ptrdiff_t{e} * ranks, ranks, each);
    }
    const auto capacity =
        DispatchByCapacity(replicas, by_rank, kExperts, ranks, Split::kProportional);
    const auto topology = DispatchByTopology(holders, by_rank, node);
    ASSERT_TRUE(capacity && topology);
    for (const auto method : {DispatchMethod::kProportional, DispatchMethod::kTopology}) {
      const bool equal = method == DispatchMethod::kProportional;
      const TokenFlow expected = FlowOfTable(equal ? *capacity : *topology, device, cluster);
      const TokenFlow found = FlowOf(placement, tokens, cluster, 0, method);
      ExpectNear(found.tokens, expected.tokens, "tokens");
      ExpectNear(found.traffic.gpu_in, expected.traffic.gpu_in, "gpu in");
      ExpectNear(found.traffic.gpu_out, expected.traffic.gpu_out, "gpu out");
      ExpectNear(found.traffic.node_in, expected.traffic.node_in, "node in");
      ExpectNear(found.traffic.node_out, expected.traffic.node_out, "node out");
      ExpectNear(found.traffic.rack_in, expected.traffic.rack_in, "rack in");
      ExpectNear(found.traffic.rack_out, expected.traffic.rack_out, "rack out");
    }
  }
}

TEST(CostTest, EqualSharesAreThoseOfTheBalance) {
  const Cluster cluster = SmallCluster(2);
  const Placement placement = PlacedAs(cluster, 5, {0, 1, 0, 2, 0, 3, 4, 0});
  const TokenCounts loads = LoadsOf(5, {37, 5, 11, 2, 9});
  const TokenFlow flow =
      FlowOf(placement, loads.layer(0), cluster, 0, DispatchMethod::kProportional);
  const std::vector<double> balance = DeviceLoads(placement, loads, cluster, 0);
  for (std::size_t d = 0; d < balance.size(); ++d) EXPECT_NEAR(flow.tokens[d], balance[d], 1e-9);
}

}  // namespace
}  // namespace shardwright::placement
