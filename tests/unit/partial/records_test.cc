// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/records.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace shardwright::partial {
namespace {

using Json = nlohmann::json;

TEST(Records, Selection) {
  const ExpertMap map = *EvenExpertMap({4, 4}, 2);
  const std::vector<TwoLevelSelection> checkpoints = {{{{0, 2}, {1, 3}}, {{0}, {3}}}};
  const auto two = SelectionRecord(map, 2, 1, checkpoints);
  ASSERT_TRUE(two);
  EXPECT_EQ(*two, R"({"kind":"selection","experts":4,"k":2,"k_persist":1,"ep":2,"moe_layers":2,)"
                  R"("checkpoints":[{"t":0,"layers":{"0":[0,2],"1":[1,3]},)"
                  R"("persist":{"0":[0],"1":[3]}}]})"
                  "\n");
  const auto one = SelectionRecord(map, 2, std::nullopt, checkpoints);
  ASSERT_TRUE(one);
  EXPECT_FALSE(Json::parse(*one).contains("k_persist"));
  EXPECT_FALSE(Json::parse(*one)["checkpoints"][0].contains("persist"));
  const auto uneven = SelectionRecord(*EvenExpertMap({4, 2}, 2), 1, 1, {});
  ASSERT_FALSE(uneven);
  EXPECT_EQ(uneven.error().message, "selection record: MoE layer 1 has 2 experts, layer 0 has 4");
}

TEST(Records, Budget) {
  const Counts popularity = {{40, 25}, {70, 20}};
  const auto budget = SelectByLayerShares(popularity, MakeCounts({2, 2}), 2);
  ASSERT_TRUE(budget);
  EXPECT_EQ(BudgetRecord(popularity, *budget),
            R"({"kind":"budget","popularity":[[40,25],[70,20]],"s_total":2,"s":[1,1],)"
            R"("selected":[[0],[0]]})"
            "\n");
}

TEST(Records, Sharding) {
  const std::vector<std::uint64_t> start = {6, 0, 2};
  const std::vector<std::string> names = {"a", "b"};
  const auto plan = ShardModules(std::vector<std::uint64_t>{4, 3}, start, 0, {});
  ASSERT_TRUE(plan);
  const auto text = ShardingRecord(names, start, *plan);
  ASSERT_TRUE(text);
  EXPECT_EQ(*text, R"({"kind":"sharding","modules":{"a":4,"b":3},"start":[6,0,2],)"
                   R"("owner":{"a":1,"b":2},"bottleneck":6})"
                   "\n");
  const auto split = ShardModules(std::vector<std::uint64_t>{4, 3}, start, 3, {});
  const Json record = Json::parse(*ShardingRecord(names, start, *split));
  EXPECT_EQ(record["modules"], Json::parse(R"({"a[0:2]":2,"a[2:4]":2,"b":3})"));
  EXPECT_FALSE(ShardingRecord(std::vector<std::string>{"a"}, start, *plan));
}

}  // namespace
}  // namespace shardwright::partial
