// SPDX-License-Identifier: Apache-2.0
#include "placement/migration/migration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "engine/plan/plan.h"
#include "placement/core/random.h"
#include "placement/migration/rounds_internal.h"
#include "support.h"

namespace shardwright::placement {
namespace {

// Slots of one layer, device after device, as a placement.
Placement PlacedAs(std::vector<std::int32_t> slots, std::uint32_t experts, const Cluster& cluster) {
  TokenCounts loads;
  loads.experts = experts;
  loads.layers = 1;
  Placement placement = EmptyPlacement(loads, cluster);
  EXPECT_EQ(placement.slot_expert.size(), slots.size());
  placement.slot_expert = std::move(slots);
  return placement;
}

Migration Moves(const Placement& current, const Placement& next, const Cluster& cluster,
                bool forward = false) {
  auto migration = PlanMigration(current, next, cluster, {forward});
  EXPECT_TRUE(migration.has_value());
  return migration ? *std::move(migration) : Migration();
}

// In a round a node sends and receives at most one expert of other nodes, a device one of its node.
// A device sends an expert only after it has arrived.
void ExpectRoundsKept(const Migration& migration, const Placement& current,
                      const Cluster& cluster) {
  std::set<std::tuple<bool, bool, std::uint32_t, std::uint32_t>> used;
  std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, std::uint32_t> arrival;
  std::uint32_t rounds = 0;
  for (const Transfer& t : migration.transfers) {
    rounds = std::max(rounds, t.round + 1);
    const bool near = t.reach == Reach::kNode;
    const auto place = [&](std::uint32_t d) { return near ? d : cluster.devices[d].node; };
    EXPECT_TRUE(used.insert({near, true, place(t.from), t.round}).second);
    EXPECT_TRUE(used.insert({near, false, place(t.to), t.round}).second);
    arrival[{t.layer, t.expert, t.to}] = t.round;
    const auto held = current.slots(t.layer, t.from);
    if (std::find(held.begin(), held.end(), static_cast<std::int32_t>(t.expert)) != held.end()) {
      EXPECT_TRUE(cluster.alive(t.from));
      continue;
    }
    const auto came = arrival.find({t.layer, t.expert, t.from});  // transfers ascend by round
    ASSERT_NE(came, arrival.end());
    EXPECT_LT(came->second, t.round);
  }
  EXPECT_EQ(migration.rounds, rounds);
}

std::int64_t CostOf(const std::vector<std::int64_t>& cost, const std::vector<std::uint32_t>& to) {
  std::int64_t sum = 0;
  for (std::size_t r = 0; r < to.size(); ++r) sum += cost[r * to.size() + to[r]];
  return sum;
}

TEST(AssignTest, GreedyFailsWhereTheOptimumIsFree) {
  EXPECT_EQ(Assign({0, 0, 0, 5}, 2), (std::vector<std::uint32_t>{1, 0}));
}

TEST(AssignTest, FindsWhatLookingAtAllFinds) {
  Random random(5);
  for (int round = 0; round < 4000; ++round) {
    const auto n = static_cast<std::uint32_t>(1 + random.Below(6));
    std::vector<std::int64_t> cost(std::size_t{n} * n);
    for (auto& c : cost) c = static_cast<std::int64_t>(random.Below(9)) - 4;
    std::vector<std::uint32_t> order(n);
    std::iota(order.begin(), order.end(), 0U);
    std::int64_t best = CostOf(cost, order);
    while (std::next_permutation(order.begin(), order.end())) {
      best = std::min(best, CostOf(cost, order));
    }
    const auto found = Assign(cost, n);
    ASSERT_TRUE(std::is_permutation(found.begin(), found.end(), order.begin()));
    ASSERT_EQ(CostOf(cost, found), best);
  }
}

TEST(ColorEdgesTest, AsManyColorsAsTheLargestDegree) {
  Random random(6);
  for (int round = 0; round < 2000; ++round) {
    const auto nodes = static_cast<std::uint32_t>(1 + random.Below(7));
    std::vector<std::pair<std::uint32_t, std::uint32_t>> edges(random.Below(30));
    std::vector<std::uint32_t> out(nodes, 0), in(nodes, 0);
    std::uint32_t degree = 0;
    for (auto& [from, to] : edges) {
      from = static_cast<std::uint32_t>(random.Below(nodes));
      to = static_cast<std::uint32_t>(random.Below(nodes));
      degree = std::max({degree, ++out[from], ++in[to]});
    }
    std::set<std::tuple<bool, std::uint32_t, std::uint32_t>> used;
    const auto colors = internal::ColorEdges(edges, nodes);
    ASSERT_EQ(colors.size(), edges.size());
    for (std::size_t i = 0; i < edges.size(); ++i) {
      ASSERT_LT(colors[i], degree);
      ASSERT_TRUE(used.insert({true, edges[i].first, colors[i]}).second);
      ASSERT_TRUE(used.insert({false, edges[i].second, colors[i]}).second);
    }
  }
}

// Finds the same plan under other node names again, unless the search is off.
TEST(RelabelTest, FindsTheSamePlan) {
  const Cluster cluster = UniformCluster(2, 1, 5);
  const Placement now = PlacedAs({0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 10, cluster);
  Placement plan = now;
  std::rotate(plan.slot_expert.begin(), plan.slot_expert.begin() + 5, plan.slot_expert.end());
  for (const NodeMap map : {NodeMap::kJoint, NodeMap::kGreedy, NodeMap::kPerLayer}) {
    EXPECT_EQ(Relabel(now, plan, cluster, map).slot_expert, now.slot_expert);
  }
  EXPECT_EQ(Relabel(now, plan, cluster, NodeMap::kNone).slot_expert, plan.slot_expert);
}

TEST(RelabelTest, GreedyTakesTheFirstCheapestNode) {
  const Cluster cluster = UniformCluster(2, 1, 3);
  const Placement now = PlacedAs({0, 1, 2, 0, 1, 3}, 4, cluster);
  const Placement plan = PlacedAs({0, 1, -1, 0, 1, 2}, 4, cluster);
  // Cost of plan nodes 0 and 1 for node 0: 0 and 0; for node 1: 0 and 1.
  EXPECT_EQ(MapNodes(now, plan, cluster, NodeMap::kGreedy), (std::vector<std::uint32_t>{0, 1}));
  EXPECT_EQ(MapNodes(now, plan, cluster, NodeMap::kJoint), (std::vector<std::uint32_t>{1, 0}));
  const auto transfers = [&](NodeMap map) {
    return Moves(now, Relabel(now, plan, cluster, map), cluster).transfers.size();
  };
  EXPECT_EQ(transfers(NodeMap::kGreedy), 1U);
  EXPECT_EQ(transfers(NodeMap::kJoint), 0U);
}

TEST(RelabelTest, OnlyEqualNodesChangePlacesAndDeadOnesStayEmpty) {
  Cluster cluster = UniformCluster(3, 1, 2);
  cluster.devices[2].slots = 1;
  const Placement now = PlacedAs({0, 1, 2, 3, 4}, 5, cluster);
  Placement plan = now;
  plan.slot_expert = {2, 3, 0, 1, 4};
  EXPECT_EQ(Relabel(now, plan, cluster, NodeMap::kJoint).slot_expert, now.slot_expert);
  cluster.nodes[1].alive = false;
  plan.slot_expert = {2, 3, -1, -1, 4};
  EXPECT_EQ(Relabel(now, plan, cluster, NodeMap::kJoint).slot_expert, plan.slot_expert);
}

TEST(MigrationTest, WhatStaysIsNotMoved) {
  const Cluster cluster = UniformCluster(2, 2, 2);
  const Placement now = PlacedAs({0, 1, 2, 3, 0, 1, 2, 3}, 4, cluster);
  Placement next = now;
  next.slot_expert = {1, 0, 3, 0, 0, 2, 2, 3};
  const Migration migration = Moves(now, next, cluster);
  // Device 1 gets 0 from device 0 of its node, device 2 gets 2 from device 3 of its node.
  ASSERT_EQ(migration.transfers.size(), 2U);
  EXPECT_EQ(migration.inter_node_transfers, 0U);
  EXPECT_EQ(migration.rounds, 1U);
  ExpectRoundsKept(migration, now, cluster);
}

TEST(MigrationTest, SendersAreBalancedAndBytesAddUp) {
  Cluster cluster = UniformCluster(4, 1, 2);
  cluster.expert_bytes = 100;
  cluster.node_bytes_per_s = 50;
  cluster.device_bytes_per_s = 500;
  // 0 and 1 are on nodes 0 and 1; nodes 2 and 3 want both.
  const Placement now = PlacedAs({0, 1, 0, 1, -1, -1, -1, -1}, 2, cluster);
  const Placement next = PlacedAs({0, 1, 0, 1, 0, 1, 0, 1}, 2, cluster);
  const Migration migration = Moves(now, next, cluster);
  EXPECT_EQ(migration.transfers.size(), 4U);
  EXPECT_EQ(migration.node_out_bytes, (std::vector<std::uint64_t>{200, 200, 0, 0}));
  EXPECT_EQ(migration.node_in_bytes, (std::vector<std::uint64_t>{0, 0, 200, 200}));
  EXPECT_EQ(migration.bytes, 400U);
  EXPECT_EQ(migration.inter_node_bytes, 400U);
  EXPECT_EQ(migration.inter_rack_bytes, 0U);
  EXPECT_EQ(migration.rounds, 2U);
  EXPECT_DOUBLE_EQ(migration.seconds, 4);
  ExpectRoundsKept(migration, now, cluster);
}

TEST(MigrationTest, LostExpertsAreNotMoved) {
  Cluster cluster = UniformCluster(3, 1, 1);
  const Placement now = PlacedAs({0, 1, 2}, 3, cluster);
  cluster.nodes[1].alive = false;
  cluster.devices[0].slots = 2;
  Placement next = EmptyPlacement(LoadsOf(3, {1, 1, 1}), cluster);
  next.slot_expert = {0, 1, -1, 2};
  const Migration migration = Moves(now, next, cluster);
  ASSERT_EQ(migration.lost.size(), 1U);
  EXPECT_EQ(migration.lost[0].expert, 1U);
  EXPECT_TRUE(migration.transfers.empty());
}

TEST(MigrationTest, ForwardingNeedsLogarithmicallyManyRounds) {
  Cluster cluster = UniformCluster(8, 1, 1);
  cluster.expert_bytes = 1;
  const Placement now = PlacedAs({0, -1, -1, -1, -1, -1, -1, -1}, 1, cluster);
  const Placement next = PlacedAs(std::vector<std::int32_t>(8, 0), 1, cluster);
  const Migration direct = Moves(now, next, cluster);
  EXPECT_EQ(direct.rounds, 7U);
  EXPECT_EQ(direct.node_out_bytes[0], 7U);
  ExpectRoundsKept(direct, now, cluster);
  const Migration tree = Moves(now, next, cluster, true);
  EXPECT_EQ(tree.rounds, 3U);
  EXPECT_EQ(tree.node_out_bytes[0], 3U);
  EXPECT_EQ(tree.transfers.size(), 7U);
  ExpectRoundsKept(tree, now, cluster);
}

TEST(MigrationTest, RacksAreTheLastResort) {
  Cluster cluster = UniformCluster(4, 1, 1);
  cluster.racks = {"a", "b"};
  cluster.nodes[2].rack = cluster.nodes[3].rack = 1;
  cluster.expert_bytes = 10;
  const Placement now = PlacedAs({0, -1, 0, -1}, 1, cluster);
  const Placement next = PlacedAs({0, 0, 0, 0}, 1, cluster);
  const Migration migration = Moves(now, next, cluster);
  EXPECT_EQ(migration.inter_node_bytes, 20U);
  EXPECT_EQ(migration.inter_rack_bytes, 0U);
  // Of two owners that have not sent yet, the one in the rack sends, though the other comes first.
  const Migration one = Moves(now, PlacedAs({0, -1, 0, 0}, 1, cluster), cluster);
  ASSERT_EQ(one.transfers.size(), 1U);
  EXPECT_EQ(one.transfers[0].from, 2U);
  EXPECT_EQ(one.inter_rack_bytes, 0U);
}

TEST(MigrationTest, ARoundTakesAsLongAsItsSlowestTransfer) {
  Cluster cluster = UniformCluster(4, 1, 2);
  cluster.racks = {"a", "b"};
  cluster.nodes[2].rack = cluster.nodes[3].rack = 1;
  cluster.expert_bytes = 100;
  cluster.node_bytes_per_s = 50;
  cluster.rack_bytes_per_s = 10;
  cluster.device_bytes_per_s = 500;
  // In one round expert 0 goes from node 0 to the other rack and expert 1 from node 1 to node 0.
  const Placement now = PlacedAs({0, -1, 1, -1, -1, -1, -1, -1}, 2, cluster);
  const Placement next = PlacedAs({0, 1, 1, -1, 0, -1, -1, -1}, 2, cluster);
  const Migration migration = Moves(now, next, cluster);
  EXPECT_EQ(migration.rounds, 1U);
  EXPECT_EQ(migration.inter_rack_bytes, 100U);
  EXPECT_DOUBLE_EQ(migration.seconds, 10);
}

TEST(MigrationTest, OtherShapesAreRefused) {
  const Cluster cluster = UniformCluster(2, 1, 1);
  const auto refused =
      PlanMigration(PlacedAs({0, 1}, 2, cluster), PlacedAs({0, 1}, 3, cluster), cluster);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kMismatch);
}

// The planned transfers lead there; without any one transfer, or with another sender, they do not.
TEST(MigrationTest, WhatLeadsThereIsProvedAndNothingElse) {
  Random random(5);
  const std::vector<std::uint32_t> layer_id{7};
  std::uint32_t moved = 0;
  for (int i = 0; i < 600; ++i) {
    const auto nodes = static_cast<std::uint32_t>(2 + random.Below(4));
    Cluster cluster = UniformCluster(nodes, static_cast<std::uint32_t>(1 + random.Below(3)), 2);
    cluster.nodes[0].alive = i % 3 != 0;
    const auto slots = [&](bool dead_too) {
      std::vector<std::int32_t> out;
      for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
        for (int s = 0; s < 2; ++s) {
          const bool empty = !dead_too && !cluster.alive(d);
          out.push_back(empty ? kNoExpert : static_cast<std::int32_t>(random.Below(5)) - 1);
        }
      }
      return out;
    };
    const Placement current = PlacedAs(slots(true), 4, cluster);
    const Placement next = PlacedAs(slots(false), 4, cluster);
    const Migration all = Moves(current, next, cluster, i % 2 == 0);
    const Status whole = Prove(all, current, next, cluster, layer_id);
    if (!all.lost.empty()) {
      ASSERT_FALSE(whole);
      EXPECT_EQ(whole.error().code, Errc::kInfeasible);
      continue;
    }
    ASSERT_TRUE(whole) << whole.error().message;
    for (std::size_t t = 0; t < all.transfers.size(); ++t, ++moved) {
      Migration less = all;
      less.transfers.erase(less.transfers.begin() + static_cast<std::ptrdiff_t>(t));
      const Status lacking = Prove(less, current, next, cluster, layer_id);
      ASSERT_FALSE(lacking);
      EXPECT_EQ(lacking.error().code, Errc::kMismatch);
      EXPECT_NE(lacking.error().message.find("layer 7 expert "), std::string::npos);
      Migration twice = all;
      twice.transfers.push_back(all.transfers[t]);
      EXPECT_FALSE(Prove(twice, current, next, cluster, layer_id));
      Migration other = all;
      other.transfers[t].from = other.transfers[t].to;  // has it not, it is to receive it
      EXPECT_FALSE(Prove(other, current, next, cluster, layer_id));
    }
  }
  EXPECT_GT(moved, 1000U);
}

// Turns the transfer list into the record that the copy engine executes. It moves exactly the
// transfers of the migration.
TEST(MigrationMapsTest, TheCopyProgramMovesWhatTheMigrationSays) {
  Cluster cluster = UniformCluster(3, 2, 2);
  cluster.expert_bytes = 64;
  const Placement now = PlacedAs({0, 1, 2, 3, 0, 1, 2, 3, -1, -1, -1, -1}, 4, cluster);
  const Placement next = PlacedAs({0, 1, 2, 3, 0, 2, 2, 3, 0, 1, 1, 3}, 4, cluster);
  const TokenCounts loads = LoadsOf(4, {1, 1, 1, 1});
  for (const bool forward : {false, true}) {
    const Migration migration = Moves(now, next, cluster, forward);
    ASSERT_EQ(migration.transfers.size(), 5U);
    const auto maps = MapsOf(migration, now, next, loads, cluster);
    ASSERT_TRUE(maps.has_value()) << maps.error().message;
    const auto plan = plan::Plan::Make(maps->source, maps->target);
    ASSERT_TRUE(plan.has_value()) << plan.error().message;
    EXPECT_EQ(plan->totals().output_bytes, migration.bytes);
    std::vector<std::uint64_t> in(cluster.device_count(), 0);
    for (const Transfer& t : migration.transfers) in[t.to] += cluster.expert_bytes;
    for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
      EXPECT_EQ(maps->target.files[d].bytes, in[d]) << d;
    }
  }
  cluster.expert_bytes = 0;
  EXPECT_FALSE(MapsOf(Moves(now, next, cluster), now, next, loads, cluster).has_value());
}

}  // namespace
}  // namespace shardwright::placement
