// SPDX-License-Identifier: Apache-2.0
// Clusters, plans and node events take time in proportion to their text.

#include <gtest/gtest.h>

#include <string>

#include "placement/core/node_events.h"
#include "placement/io/cluster_text.h"
#include "placement/io/plan_file.h"
#include "unit/complexity.h"

namespace shardwright::placement {
namespace {

TEST(Complexity, Cluster) {
  const auto make = Listed(
      R"({"nodes": [)",
      [](std::size_t i) { return R"({"name": "n)" + Digits(i) + R"(", "gpus": 2, "slots": 2})"; },
      "]}");
  const auto parse = [](const std::string& text) {
    const auto cluster = ParseCluster(text, 2, "x");
    ASSERT_TRUE(cluster) << cluster.error().message;
  };
  ExpectLinear(2'000, make, parse);
}

TEST(Complexity, NodeEvents) {
  const auto make = Listed(
      "", [](std::size_t i) { return std::to_string(i) + ",add,n" + Digits(i); }, "\n", "\n");
  const auto parse = [](const std::string& text) {
    const auto events = ParseNodeEvents(text, "x");
    ASSERT_TRUE(events) << events.error().message;
  };
  ExpectLinear(10'000, make, parse);
}

TEST(Complexity, Plan) {
  // Devices with one slot each, of one layer with 64 experts.
  const auto make =
      Listed(R"({"experts": 64, "layers": [{"layer": 0, "placement": [)",
             [](std::size_t i) { return "[" + std::to_string(i % 64) + "]"; }, "]}]}");
  const auto parse = [](const std::string& text) {
    const auto plan = ParsePlan(text, "x");
    ASSERT_TRUE(plan) << plan.error().message;
  };
  ExpectLinear(5'000, make, parse);
}

}  // namespace
}  // namespace shardwright::placement
