// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "placement/core/node_events.h"
#include "placement/io/cluster_text.h"
#include "placement/io/plan_text.h"

namespace shardwright::placement {
namespace {

Cluster Parsed(const std::string& text, std::uint32_t layers = 4) {
  auto cluster = ParseCluster(text, layers, "c");
  EXPECT_TRUE(cluster) << cluster.error().message;
  return cluster ? *cluster : Cluster();
}

TEST(IoClusterTest, EqualNodesAreCounted) {
  const Cluster cluster = Parsed("{\"nodes\":4,\"gpus\":2,\"slots\":3,\"nodes_per_rack\":2}");
  EXPECT_EQ(cluster.node_count(), 4U);
  EXPECT_EQ(cluster.device_count(), 8U);
  EXPECT_EQ(cluster.live_slots(), 24U);
  EXPECT_EQ(cluster.racks, (std::vector<std::string>{"rack0", "rack1"}));
  EXPECT_EQ(cluster.nodes[2].rack, 1U);
  EXPECT_EQ(cluster.nodes[3].name, "node3");
}

TEST(IoClusterTest, NodesDiffer) {
  const Cluster cluster = Parsed(R"({"slots": 2, "gpus": 2, "expert_bytes": "63MiB",
    "bandwidth": {"gpu": "300GB/s", "node": "12.5GB/s", "rack": "6.25GB"},
    "nodes": [{"name": "a", "rack": "r1"}, {"name": "b", "rack": "r2", "alive": false, "slots": 1},
              {"name": "c", "rack": "r1", "gpus": [4, {"id": 0, "slots": 5}, {"id": 1}]}]})");
  EXPECT_EQ(cluster.expert_bytes, 63ULL << 20);
  EXPECT_EQ(cluster.param_bytes, (63ULL << 20) / 7);
  EXPECT_DOUBLE_EQ(cluster.device_bytes_per_s, 300e9);
  EXPECT_DOUBLE_EQ(cluster.node_bytes_per_s, 12.5e9);
  EXPECT_DOUBLE_EQ(cluster.rack_bytes_per_s, 6.25e9);
  EXPECT_EQ(cluster.node_slots(0), 4U);
  EXPECT_EQ(cluster.node_slots(1), 2U);
  EXPECT_EQ(cluster.node_slots(2), 11U);
  EXPECT_FALSE(cluster.nodes[1].alive);
  EXPECT_EQ(cluster.nodes[2].rack, cluster.nodes[0].rack);
  EXPECT_EQ(cluster.live_slots(), 15U);
}

TEST(IoClusterTest, MemoryIsSharedByTheLayers) {
  const Cluster cluster =
      Parsed("{\"nodes\":1,\"gpus\":1,\"memory\":\"1GiB\",\"expert_bytes\":\"64MiB\"}", 4);
  EXPECT_EQ(cluster.devices[0].slots, 4U);
}

TEST(IoClusterTest, ADescriptionReadsBackTheSame) {
  Cluster cluster = Parsed(R"({"nodes":[{"name":"\"q\"","rack":"x","gpus":[1,2]},
    {"rack":"y","gpus":3,"slots":2,"alive":false}],"expert_bytes":7,"bandwidth":{"node":1.25e10}})");
  const std::string text = ClusterText(cluster);
  const Cluster again = Parsed(text);
  EXPECT_EQ(ClusterText(again), text);
  EXPECT_EQ(again.nodes[0].name, "\"q\"");
  EXPECT_FALSE(again.nodes[1].alive);
  EXPECT_EQ(again.device_count(), 5U);
}

class BadCluster : public testing::TestWithParam<std::tuple<const char*, Errc, const char*>> {};

TEST_P(BadCluster, IsRefusedWithItsPlace) {
  const auto& [text, code, part] = GetParam();
  const auto cluster = ParseCluster(text, 4, "c");
  ASSERT_FALSE(cluster) << text;
  EXPECT_EQ(cluster.error().code, code) << cluster.error().message;
  EXPECT_NE(cluster.error().message.find(part), std::string::npos) << cluster.error().message;
}

INSTANTIATE_TEST_SUITE_P(
    IoClusterTest, BadCluster,
    testing::Values(
        std::tuple("{", Errc::kBadInput, "line 1"),
        std::tuple("[]", Errc::kBadInput, "an object expected"),
        std::tuple("{}", Errc::kBadInput, "nodes is missing"),
        std::tuple("{\"nodes\":2}", Errc::kBadInput, "node \"node0\": gpus is missing"),
        std::tuple("{\"nodes\":2,\"gpus\":1}", Errc::kBadInput, "slots or memory is missing"),
        std::tuple("{\"nodes\":2,\"gpus\":1,\"slot\":1}", Errc::kBadInput,
                   "unknown member \"slot\", known members are nodes"),
        std::tuple("{\"nodes\":2,\"nodes\":3,\"gpus\":1,\"slots\":1}", Errc::kBadInput,
                   "key \"nodes\" appears twice"),
        std::tuple("{\"nodes\":0,\"gpus\":1,\"slots\":1}", Errc::kBadInput, "from 1 to"),
        std::tuple("{\"nodes\":1e9,\"gpus\":1,\"slots\":1}", Errc::kBadInput, "from 1 to 16384"),
        std::tuple("{\"nodes\":16384,\"gpus\":65536,\"slots\":1}", Errc::kLimit, "at most"),
        std::tuple("{\"nodes\":2,\"gpus\":2,\"slots\":4000000}", Errc::kLimit, "slots"),
        std::tuple("{\"nodes\":2,\"gpus\":2,\"slots\":-1}", Errc::kBadInput, "slots: a whole"),
        std::tuple("{\"nodes\":2,\"gpus\":2,\"slots\":0}", Errc::kInfeasible, "no live gpu"),
        std::tuple("{\"nodes\":[{\"name\":\"a\"},{\"name\":\"a\"}],\"gpus\":1,\"slots\":1}",
                   Errc::kBadInput, "the name \"a\" is taken"),
        std::tuple("{\"nodes\":[{\"gpus\":[{\"id\":0,\"slots\":1},{\"id\":0,\"slots\":1}]}]}",
                   Errc::kBadInput, "gpu 1: id 0 is taken"),
        std::tuple("{\"slots\":1,\"nodes\":[{\"gpus\":[{\"id\":\"GPU-1\"}]},"
                   "{\"gpus\":[{\"id\":\"GPU-1\"}]}]}",
                   Errc::kBadInput, "node \"node1\": gpu 0: id \"GPU-1\" is taken"),
        std::tuple("{\"nodes\":1,\"gpus\":1,\"slots\":1,\"memory\":1}", Errc::kBadInput,
                   "slots cannot be combined with memory"),
        std::tuple("{\"nodes\":1,\"gpus\":1,\"memory\":\"1GiB\"}", Errc::kBadInput,
                   "memory requires expert_bytes"),
        std::tuple("{\"nodes\":1,\"gpus\":1,\"memory\":\"1 parsec\",\"expert_bytes\":1}",
                   Errc::kBadInput, "memory"),
        std::tuple("{\"nodes\":1,\"gpus\":1,\"slots\":1,\"bandwidth\":{\"node\":0}}",
                   Errc::kBadInput, "bandwidth: node"),
        std::tuple("{\"nodes\":1,\"gpus\":1,\"slots\":1,\"bandwidth\":{\"nic\":1}}",
                   Errc::kBadInput, "unknown member \"nic\""),
        std::tuple("{\"nodes\":[{\"alive\":1}],\"gpus\":1,\"slots\":1}", Errc::kBadInput,
                   "true or false")));

TEST(IoEventsTest, LinesAreRead) {
  const auto events = ParseNodeEvents("# spot\n0,add,a\n0,add,b\r\n\n1500,remove,a\n", "e");
  ASSERT_TRUE(events) << events.error().message;
  ASSERT_EQ(events->size(), 3U);
  EXPECT_EQ((*events)[2].time_ms, 1500U);
  EXPECT_FALSE((*events)[2].add);
  EXPECT_EQ((*events)[1].node, "b");
}

TEST(IoEventsTest, BadLinesAreNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "contains no events"},
      {"0,add\n", "e:1: milliseconds,add|remove,node expected"},
      {"x,add,a\n", "e:1: \"x\" is not a number"},
      {"-1,add,a\n", "e:1: \"-1\" is not a number"},
      {"99999999999999999999,add,a\n", "is not a number"},
      {"0,plus,a\n", "e:1: \"plus\" is neither"},
      {"0,add,\n", "the name of one node"},
      {"0,add,a,b\n", "the name of one node"},
      {"5,add,a\n4,add,b\n", "e:2: time runs backward: 4 after 5"},
      {"0,add,a\n1,add,a\n", "e:2: node \"a\" exists already"},
      {"0,remove,a\n1,remove,a\n", "e:2: node \"a\" does not exist"}};
  for (const auto& [text, part] : cases) {
    const auto events = ParseNodeEvents(text, "e");
    ASSERT_FALSE(events) << text;
    EXPECT_EQ(events.error().code, Errc::kBadInput);
    EXPECT_NE(events.error().message.find(part), std::string::npos) << events.error().message;
  }
}

}  // namespace
}  // namespace shardwright::placement
