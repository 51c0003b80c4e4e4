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
  // A plan of all layers of the model, with dense layers before those of the recording.
  EXPECT_EQ(slots("[[2,1,2,0],[2,1,2,0],[2,1,2,0],[0,1,2,2],[1,1,0,2],[2,1,0,1]]"), wanted);
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

TEST(IoForeignPlanTest, EmptySlotsRepeatExpertsOfTheirGpu) {
  const TokenCounts loads = TwoLayers();
  Cluster cluster = UniformCluster(2, 1, 4);
  // Expert 2 of layer 3 is on both GPUs, so a third copy would attract its tokens.
  const Placement placement =
      Placed(loads, cluster, {0, 2, -1, -1, 1, 2, -1, -1, 0, 1, -1, -1, 2, -1, -1, -1});
  PlanNotes notes;
  for (const PlanFormat format :
       {PlanFormat::kEplb, PlanFormat::kVllm, PlanFormat::kSglang, PlanFormat::kTensorrt}) {
    notes.clear();
    const auto text = ForeignPlanText(format, placement, loads, cluster, 1, loads.layer_id, &notes);
    ASSERT_TRUE(text) << text.error().message;
    ASSERT_FALSE(notes.empty());
    EXPECT_EQ(notes[0],
              "filled 9 slots with an expert that the gpu already holds: the format requires 4 "
              "experts on every gpu");
    const auto plan = ParsePlan(*text, "p");
    ASSERT_TRUE(plan) << plan.error().message;
    const auto again = PlacedOn(*plan, loads, cluster);
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_EQ(again->slot_expert, (Slots{0, 2, 0, 2, 1, 2, 1, 2, 0, 1, 0, 1, 2, 2, 2, 2}));
  }
  EXPECT_FALSE(
      ForeignPlanText(PlanFormat::kAscend, placement, loads, cluster, 1, loads.layer_id, &notes));
  // The same number of experts on every GPU, but fewer than slots.
  const Placement even =
      Placed(loads, cluster, {0, 2, -1, -1, 1, 2, -1, -1, 0, 1, -1, -1, 2, 0, -1, -1});
  notes.clear();
  EXPECT_TRUE(
      ForeignPlanText(PlanFormat::kAscend, even, loads, cluster, 1, loads.layer_id, &notes));
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_EQ(notes[0],
            "the plan has 2 slots on every gpu, not 4: vllm-ascend requires different experts on "
            "each device");
  // GPUs with different slots: none gets more experts than it has slots.
  cluster.devices[1].slots = 3;
  notes.clear();
  const Placement uneven = Placed(loads, cluster, {0, 2, -1, -1, 1, 2, 0, 0, 1, 2, -1, 2, 0, -1});
  const auto three =
      ForeignPlanText(PlanFormat::kTensorrt, uneven, loads, cluster, 1, loads.layer_id, &notes);
  ASSERT_TRUE(three) << three.error().message;
  EXPECT_NE(three->find("  3: [0, 2, 0, 1, 2, 0]\n  5: [0, 1, 2, 2, 0, 0]\n"), std::string::npos)
      << *three;
  const Placement full = Placed(loads, cluster, {0, 2, 1, 0, 1, 2, 0, 0, 1, 2, -1, 2, 0, 1});
  const auto refused =
      ForeignPlanText(PlanFormat::kTensorrt, full, loads, cluster, 1, loads.layer_id, &notes);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_EQ(refused.error().message,
            "layer 3: node \"node1\" gpu 0 holds 3 experts, others 4: the format requires the same "
            "number on every gpu; use --format plan");
}

TEST(IoForeignPlanTest, PartsOfARecordingAreReported) {
  const TokenCounts picked = TwoLayers();
  const std::vector<std::uint32_t> recorded{3, 4, 5, 7};
  const Cluster cluster = UniformCluster(2, 1, 2);
  const Placement placement = Placed(picked, cluster, {0, 2, 1, 2, 0, 1, 2, 1});
  const auto note = [&](PlanFormat format, std::string* text) {
    PlanNotes notes;
    auto found = ForeignPlanText(format, placement, picked, cluster, 1, recorded, &notes);
    EXPECT_TRUE(found) << found.error().message;
    if (found) *text = *found;
    EXPECT_EQ(notes.size(), 1U);
    return notes.empty() ? std::string() : notes.front();
  };
  std::string text;
  for (const PlanFormat format : {PlanFormat::kEplb, PlanFormat::kVllm, PlanFormat::kAscend}) {
    EXPECT_EQ(note(format, &text),
              "layers are numbered from 0: the reader needs all MoE layers, these are 2 of 4");
  }
  EXPECT_EQ(note(PlanFormat::kTensorrt, &text),
            "the reader needs all MoE layers, these are 2 of 4");
  // SGLang needs a row for each layer of the model, up to the last one of the recording.
  EXPECT_EQ(note(PlanFormat::kSglang, &text),
            "6 layers without a plan: their experts are in default order");
  const auto plan = ParsePlan(text, "p");
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->layer_id.size(), 8U);
  EXPECT_EQ(plan->slots[3], (Slots{0, 2, 1, 2}));
  EXPECT_EQ(plan->slots[5], (Slots{0, 1, 2, 1}));
  for (const std::size_t l : {0U, 4U, 7U}) EXPECT_EQ(plan->slots[l], (Slots{0, 1, 2, 0}));
}

}  // namespace
}  // namespace shardwright::placement
