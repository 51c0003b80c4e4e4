// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "placement/migration/migration.h"
#include "property/cases.h"
#include "random_moe.h"

namespace shardwright::placement {
namespace {

using Where = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;  // layer, expert, device

std::set<Where> HeldIn(const Placement& placement, const Cluster& cluster) {
  std::set<Where> held;
  for (std::uint32_t l = 0; l < placement.layers; ++l) {
    for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
      if (!cluster.alive(d)) continue;
      for (const std::int32_t e : placement.slots(l, d)) {
        if (e != kNoExpert) held.insert({l, static_cast<std::uint32_t>(e), d});
      }
    }
  }
  return held;
}

// Each missing expert arrives exactly once, from a live device that has it by then, or is listed as
// lost. In a round a node exchanges at most one expert with other nodes. Byte totals match.
void ExpectSound(const Migration& migration, const Placement& current, const Placement& next,
                 const Cluster& cluster, bool forward) {
  std::set<Where> held = HeldIn(current, cluster);
  std::set<std::pair<std::uint32_t, std::uint32_t>> alive;
  for (const auto& [l, e, d] : held) alive.insert({l, e});
  std::set<Where> wanted;
  std::set<std::pair<std::uint32_t, std::uint32_t>> lost;
  for (const auto& [l, e, d] : HeldIn(next, cluster)) {
    if (held.contains({l, e, d})) continue;
    if (alive.contains({l, e})) {
      wanted.insert({l, e, d});
    } else {
      lost.insert({l, e});
    }
  }
  ASSERT_EQ(migration.lost.size(), lost.size());
  for (const LostExpert& one : migration.lost) ASSERT_TRUE(lost.contains({one.layer, one.expert}));
  ASSERT_EQ(migration.transfers.size(), wanted.size());
  std::set<std::tuple<int, std::uint32_t, std::uint32_t>> busy;
  std::vector<std::uint32_t> out(cluster.node_count(), 0), in(cluster.node_count(), 0);
  std::set<Where> arrived;  // in earlier rounds
  std::set<Where> arriving;
  std::uint32_t round = 0;
  std::uint32_t far_rounds = 0;
  std::uint64_t far = 0;
  for (const Transfer& t : migration.transfers) {
    ASSERT_GE(t.round, round);
    if (t.round > round) arrived.insert(arriving.begin(), arriving.end());
    round = t.round;
    ASSERT_EQ(wanted.erase({t.layer, t.expert, t.to}), 1U);
    ASSERT_TRUE(cluster.alive(t.from));
    ASSERT_TRUE(held.contains({t.layer, t.expert, t.from}) ||
                arrived.contains({t.layer, t.expert, t.from}));
    arriving.insert({t.layer, t.expert, t.to});
    const std::uint32_t a = cluster.devices[t.from].node;
    const std::uint32_t b = cluster.devices[t.to].node;
    ASSERT_EQ(t.reach == Reach::kNode, a == b);
    ASSERT_TRUE(busy.insert({a == b ? 0 : 1, a == b ? t.from : a, t.round}).second);
    ASSERT_TRUE(busy.insert({a == b ? 2 : 3, a == b ? t.to : b, t.round}).second);
    if (a == b) continue;
    ++far;
    ++out[a];
    ++in[b];
    far_rounds = std::max(far_rounds, t.round + 1);
  }
  ASSERT_EQ(migration.rounds, migration.transfers.empty() ? 0 : round + 1);
  ASSERT_EQ(migration.inter_node_transfers, far);
  ASSERT_EQ(migration.bytes, migration.transfers.size() * cluster.expert_bytes);
  ASSERT_EQ(migration.inter_node_bytes, far * cluster.expert_bytes);
  std::uint32_t degree = 0;
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    degree = std::max({degree, out[n], in[n]});
    ASSERT_EQ(migration.node_out_bytes[n], out[n] * cluster.expert_bytes);
    ASSERT_EQ(migration.node_in_bytes[n], in[n] * cluster.expert_bytes);
  }
  ASSERT_GE(far_rounds, degree);
  if (!forward) {
    ASSERT_EQ(far_rounds, degree);
  }
}

TEST(MigrationProperty, WhatIsMissingArrivesOnce) {
  Random random(501);
  for (int i = 0; i < kCases; ++i) {
    Cluster cluster = RandomCluster(&random);
    const auto slots = static_cast<std::uint32_t>(cluster.live_slots());
    const TokenCounts loads =
        RandomLoads(&random, Between(&random, 1, 2), Between(&random, 1, slots));
    const Placement current = RandomPlacement(&random, loads, cluster);
    if (random.Below(3) == 0) {
      cluster.nodes[random.Below(cluster.node_count())].alive = false;
    }
    const Placement next = RandomPlacement(&random, loads, cluster);
    const bool forward = random.Below(2) == 0;
    const auto migration = PlanMigration(current, next, cluster, {forward});
    ASSERT_TRUE(migration.has_value());
    ASSERT_NO_FATAL_FAILURE(ExpectSound(*migration, current, next, cluster, forward)) << i;
  }
}

// Counts distinct experts that devices' nodes lack, which a node mapping must reduce.
std::size_t NodeMoves(const Placement& current, const Placement& next, const Cluster& cluster) {
  const auto nodes_of = [&](const Placement& placement) {
    std::set<Where> held;
    for (const auto& [l, e, d] : HeldIn(placement, cluster)) {
      held.insert({l, e, cluster.devices[d].node});
    }
    return held;
  };
  const std::set<Where> now = nodes_of(current);
  std::size_t moves = 0;
  for (const Where& where : nodes_of(next)) moves += now.contains(where) ? 0 : 1;
  return moves;
}

// Renaming changes no set of experts that a node has together; the best names need no more moves
// than greedy ones or none, and separate names for each layer no more than names for all layers.
TEST(RelabelProperty, BestNamesMoveLeast) {
  Random random(502);
  for (int i = 0; i < kCases; ++i) {
    const Cluster cluster = RandomCluster(&random);
    const auto slots = static_cast<std::uint32_t>(cluster.live_slots());
    const TokenCounts loads =
        RandomLoads(&random, Between(&random, 1, 2), Between(&random, 1, slots));
    const Placement current = RandomPlacement(&random, loads, cluster);
    const Placement plan = RandomPlacement(&random, loads, cluster);
    std::map<NodeMap, std::size_t> moves;
    for (const NodeMap map :
         {NodeMap::kJoint, NodeMap::kGreedy, NodeMap::kPerLayer, NodeMap::kNone}) {
      const Placement renamed = Relabel(current, plan, cluster, map);
      moves[map] = NodeMoves(current, renamed, cluster);
      const Rules rules{true, true, 1, false};
      ASSERT_TRUE(Validate(renamed, loads, cluster, rules).has_value());
      std::multiset<std::vector<std::int32_t>> before, after;  // contents of devices
      for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
        for (std::uint32_t l = 0; l < loads.layers; ++l) {
          const auto sorted = [&](const Placement& p) {
            std::vector<std::int32_t> content{static_cast<std::int32_t>(l)};
            content.insert(content.end(), p.slots(l, d).begin(), p.slots(l, d).end());
            std::sort(content.begin() + 1, content.end());
            return content;
          };
          before.insert(sorted(plan));
          after.insert(sorted(renamed));
        }
      }
      ASSERT_EQ(before, after);
    }
    ASSERT_LE(moves[NodeMap::kJoint], moves[NodeMap::kGreedy]);
    ASSERT_LE(moves[NodeMap::kJoint], moves[NodeMap::kNone]);
    ASSERT_LE(moves[NodeMap::kPerLayer], moves[NodeMap::kJoint]);
    const Placement devices = RelabelDevices(current, plan, cluster);
    ASSERT_LE(PlanMigration(current, devices, cluster)->transfers.size(),
              PlanMigration(current, plan, cluster)->transfers.size());
  }
}

}  // namespace
}  // namespace shardwright::placement
