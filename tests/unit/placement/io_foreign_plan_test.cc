// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "placement/io/plan_file.h"
#include "placement/io/plan_text.h"
#include "support.h"

namespace shardwright::placement {
namespace {

using Slots = std::vector<std::int32_t>;

/// Layers of every recording below: those of TwoLayers and one between them.
const std::vector<std::uint32_t> kRecorded{3, 4, 5};

TEST(IoForeignPlanTest, RowsWithoutLayerNumbersAreThoseOfTheRecording) {
  const TokenCounts picked = TwoLayers();  // without layer 4
  const Cluster cluster = UniformCluster(2, 1, 2);
  const auto slots = [&](const std::string& text) {
    const auto plan = ParsePlan(text, "p");
    if (!plan) return plan.error().message;
    EXPECT_TRUE(plan->positions);
    const auto placed = PlacedOn(*plan, picked, cluster, kRecorded);
    return placed ? testing::PrintToString(placed->slot_expert) : placed.error().message;
  };
  const std::string wanted = testing::PrintToString(Slots{0, 1, 2, 2, 2, 1, 0, 1});
  const std::string rows = "[[0,1,2,2],[1,1,0,2],[2,1,0,1]]";
  EXPECT_EQ(slots(rows), wanted);
  EXPECT_EQ(slots("{\"gpus\":2,\"nodes\":2,\"physical_to_logical\":" + rows + "}"), wanted);
  EXPECT_EQ(slots("{\"record_type\":\"eplb_initial_mapping\",\"initial_global_assignments\":"
                  "{\"0\":[0,1,2,2],\"1\":[1,1,0,2],\"2\":[2,1,0,1]}}"),
            wanted);
  // A plan of the picked layers alone.
  EXPECT_EQ(slots("[[0,1,2,2],[2,1,0,1]]"), wanted);
  for (const std::string more : {"[[0,1,2,2]]", "[[0,1,2,2],[1,1,0,2],[1,1,0,2],[2,1,0,1]]"}) {
    const std::string message = slots(more);
    EXPECT_NE(message.find(" without layer numbers, the token counts have 3 (of these, --layers "
                           "picks 2)"),
              std::string::npos)
        << message;
  }
  // More rows than all layers of the token counts.
  const auto cut = PlacedOn(*ParsePlan(rows, "p"), LayersOf(picked, 0, 1), cluster);
  ASSERT_FALSE(cut);
  EXPECT_EQ(cut.error().code, Errc::kBadInput);
  EXPECT_EQ(cut.error().message, "plan: 3 layers without layer numbers, the token counts have 1");
}

}  // namespace
}  // namespace shardwright::placement
