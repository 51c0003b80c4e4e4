// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "placement/core/parallel.h"
#include "placement/io/plan_file.h"
#include "placement/io/plan_text.h"
#include "placement/io/report_page.h"
#include "support.h"

namespace shardwright::placement {
namespace {

/// A verified plan without any of the algorithms, as the writers need it.
VerifiedPlan Verified(const TokenCounts& loads, const Cluster& cluster,
                      const Placement& placement) {
  VerifiedPlan plan;
  plan.strategy = "hand";
  plan.result.placement = placement;
  plan.metrics = Measure(placement, loads, cluster);
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    plan.layer_recovery.push_back(LayerRecovery(placement, cluster, l));
  }
  plan.model_recovery = ModelRecovery(placement, cluster);
  return plan;
}

PlanFile Read(const std::string& text) {
  auto plan = ParsePlan(text, "p");
  EXPECT_TRUE(plan) << plan.error().message << "\n" << text;
  return plan ? *plan : PlanFile();
}

TEST(IoPlanTest, OurRecordReadsBack) {
  const TokenCounts loads = TwoLayers();
  Cluster cluster = UniformCluster(2, 1, 2);
  cluster.expert_bytes = 14;
  const Placement placement = Placed(loads, cluster, {0, 2, 1, 2, 0, 2, 1, kNoExpert});
  const std::string text =
      PlanText(Verified(loads, cluster, placement), loads, cluster, FailureUnit::kNode);
  const PlanFile file = Read(text);
  EXPECT_EQ(file.format, "plan");
  EXPECT_EQ(file.experts, 3U);
  EXPECT_EQ(file.layer_id, (std::vector<std::uint32_t>{3, 5}));
  ASSERT_TRUE(file.cluster);
  EXPECT_EQ(ClusterText(*file.cluster), ClusterText(cluster));
  const auto again = PlacedOn(file, loads, cluster);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->slot_expert, placement.slot_expert);
  // One line per layer, and every value in place.
  EXPECT_NE(text.find("\n{\"layer\":3,\"loads\":[10,20,30],\"replicas\":[1,1,2],"
                      "\"placement\":[[0,2],[1,2]],\"devices\":[[0,2],[1,2]],\"cut\":false,"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("\"placement\":[[0,2],[1]],\"devices\":[[0,2],[1,-1]]"), std::string::npos);
}

TEST(IoPlanTest, NoBitOfOurRecordChangesThePlan) {
  const TokenCounts loads = TwoLayers();
  const Cluster cluster = UniformCluster(2, 1, 2);
  const Placement placement = Placed(loads, cluster, {0, 2, 1, 2, 0, 2, 1, kNoExpert});
  const std::string text =
      PlanText(Verified(loads, cluster, placement), loads, cluster, FailureUnit::kNode);
  const auto sound = ParsePlan(text, "p");
  ASSERT_TRUE(sound) << sound.error().message;
  std::size_t accepted = 0;
  for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
    std::string damaged = text;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    const auto found = ParsePlan(damaged, "p");
    if (!found) continue;
    EXPECT_EQ(found->slots, sound->slots) << "bit " << bit;
    ++accepted;
  }
  EXPECT_LE(accepted, 8 * sizeof("\"xxh3_128\":")) << "its own name";
}

TEST(IoPlanTest, OwnersOfARecordAreItsState) {
  const PlanFile file = Read(
      "{\"experts\":2,\"cluster\":{\"nodes\":2,\"gpus\":1,\"slots\":1},\"layers\":["
      "{\"layer\":1,\"devices\":[[0,1],[1,0]],\"owners\":[[1],[0]]},"
      "{\"layer\":0,\"devices\":[[0,1],[1,-1]],\"owners\":[[0],[1]]}]}");
  EXPECT_EQ(file.slots, (std::vector<std::vector<std::int32_t>>{{0, 1, 1, -1}, {0, 1, 1, 0}}));
  const PlanFile state = StateOf(file);
  EXPECT_EQ(state.slots, (std::vector<std::vector<std::int32_t>>{{0, 1}, {1, 0}}));
  EXPECT_EQ(state.device_slots, (std::vector<std::uint32_t>{1, 1}));
  // A record without owners is its own state.
  EXPECT_EQ(StateOf(state).slots, state.slots);
  for (const char* const text :
       {"{\"layers\":[{\"layer\":0,\"devices\":[[0]],\"owners\":[[0]]},"
        "{\"layer\":1,\"devices\":[[0]]}]}",
        "{\"layers\":[{\"layer\":0,\"devices\":[[0]]},"
        "{\"layer\":1,\"devices\":[[0]],\"owners\":[[0]]}]}",
        "{\"experts\":1,\"layers\":[{\"layer\":0,\"devices\":[[0]],\"owners\":[[5]]}]}",
        "{\"layers\":[{\"layer\":0,\"devices\":[[0]],\"owners\":7}]}"}) {
    const auto plan = ParsePlan(text, "p");
    ASSERT_FALSE(plan) << text;
    EXPECT_EQ(plan.error().code, Errc::kBadInput) << text;
  }
}

TEST(IoPlanTest, TheMigrationOfARecordIsRead) {
  const TokenCounts loads = TwoLayers();
  const Cluster cluster = UniformCluster(2, 1, 2);
  const Placement now = Placed(loads, cluster, {0, 2, 1, 2, 0, 2, 1, kNoExpert});
  const Placement next = Placed(loads, cluster, {0, 1, 1, 2, 0, 2, 1, 0});
  VerifiedPlan verified = Verified(loads, cluster, next);
  auto moves = PlanMigration(now, next, cluster);
  ASSERT_TRUE(moves);
  ASSERT_EQ(moves->transfers.size(), 2U);
  verified.migration = *moves;
  const PlanFile file = Read(PlanText(verified, loads, cluster, FailureUnit::kNode));
  ASSERT_TRUE(file.migration);
  EXPECT_EQ(file.migration->rounds, moves->rounds);
  for (std::size_t i = 0; i < 2; ++i) {
    const Transfer& found = file.migration->transfers[i];
    const Transfer& want = moves->transfers[i];
    EXPECT_EQ(std::tie(found.layer, found.expert, found.from, found.to, found.round),
              std::tie(want.layer, want.expert, want.from, want.to, want.round));
  }
  EXPECT_TRUE(Prove(*file.migration, now, next, cluster, loads.layer_id));
}

TEST(IoPlanTest, ARecordWithNodesAloneIsRead) {
  const PlanFile file = Read(
      "{\"nodes\":2,\"slots_per_node\":2,\"fault_threshold\":1,\"layers\":[{\"layer\":0,"
      "\"loads\":[1,2,3],\"replicas\":[1,1,2],\"placement\":[[0,2],[1,2]],\"cut\":false}]}");
  ASSERT_TRUE(file.cluster);
  EXPECT_EQ(file.cluster->device_count(), 2U);
  EXPECT_EQ(file.cluster->live_slots(), 4U);
}

class RoundTrip : public testing::TestWithParam<PlanFormat> {};

TEST_P(RoundTrip, OtherProgramsPlansReadBack) {
  TokenCounts loads = TwoLayers();
  loads.layer_id = {0, 1};
  const Cluster cluster = UniformCluster(2, 2, 1);
  const Placement placement = Placed(loads, cluster, {0, 2, 1, 2, 2, 1, 0, 1});
  PlanNotes notes;
  const auto text =
      ForeignPlanText(GetParam(), placement, loads, cluster, 1, loads.layer_id, &notes);
  ASSERT_TRUE(text) << text.error().message;
  EXPECT_TRUE(notes.empty()) << notes.front();
  const PlanFile file = Read(*text);
  const auto again = PlacedOn(file, loads, cluster);
  ASSERT_TRUE(again) << again.error().message << "\n" << *text;
  EXPECT_EQ(again->slot_expert, placement.slot_expert) << *text;
}

INSTANTIATE_TEST_SUITE_P(IoPlanTest, RoundTrip,
                         testing::Values(PlanFormat::kEplb, PlanFormat::kSglang, PlanFormat::kVllm,
                                         PlanFormat::kTensorrt, PlanFormat::kAscend));

TEST(IoPlanTest, ForeignTextsAreWhatTheirReadersExpect) {
  const TokenCounts loads = TwoLayers();
  const Cluster cluster = UniformCluster(2, 1, 2);
  const Placement placement = Placed(loads, cluster, {0, 2, 1, 2, 0, 1, 2, 1});
  PlanNotes notes;
  const auto text = [&](PlanFormat format) {
    return ForeignPlanText(format, placement, loads, cluster, 4, loads.layer_id, &notes).value();
  };
  EXPECT_EQ(text(PlanFormat::kTensorrt),
            "num_slots: 4\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n"
            "  3: [0, 2, 1, 2]\n  5: [0, 1, 2, 1]\n");
  EXPECT_EQ(text(PlanFormat::kVllm),
            "{\"record_type\":\"eplb_initial_mapping\",\"version\":1,\"num_redundant_experts\":1,"
            "\"num_slots\":4,\"initial_global_assignments\":{\"0\":[0,2,1,2],\"1\":[0,1,2,1]}}\n");
  EXPECT_EQ(text(PlanFormat::kAscend),
            "{\"moe_layer_count\":2,\"layer_list\":[\n"
            "{\"layer_id\":0,\"device_count\":2,\"device_list\":[{\"device_id\":0,"
            "\"device_expert\":[0,2]},{\"device_id\":1,\"device_expert\":[1,2]}]},\n"
            "{\"layer_id\":1,\"device_count\":2,\"device_list\":[{\"device_id\":0,"
            "\"device_expert\":[0,1]},{\"device_id\":1,\"device_expert\":[2,1]}]}\n]}\n");
  EXPECT_TRUE(notes.empty());
  // SGLang numbers all layers: those without a plan are in plain order, and a note reports it.
  EXPECT_EQ(text(PlanFormat::kSglang),
            "{\"physical_to_logical_map\":[[0,1,2,0],\n[0,1,2,0],\n[0,1,2,0],\n[0,2,1,2],\n"
            "[0,1,2,0],\n[0,1,2,1]]}\n");
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_EQ(notes[0], "4 layers without a plan: their experts are in default order");
  const std::string eplb = text(PlanFormat::kEplb);
  EXPECT_NE(eplb.find("\"groups\":4"), std::string::npos);
  EXPECT_NE(eplb.find("\"logical_to_physical\":[[[0,-1],\n[2,-1],\n[1,3]]"), std::string::npos)
      << eplb;
  EXPECT_NE(eplb.find("\"logical_count\":[[1,1,2],\n[1,2,1]]"), std::string::npos) << eplb;
}

TEST(IoPlanTest, WhatAFormatCannotSayIsRefused) {
  const TokenCounts loads = TwoLayers();
  const Cluster cluster = UniformCluster(2, 1, 2);
  PlanNotes notes;
  const Placement uneven = Placed(loads, cluster, {0, 2, 1, 2, 0, 1, 2, kNoExpert});
  auto text =
      ForeignPlanText(PlanFormat::kAscend, uneven, loads, cluster, 1, loads.layer_id, &notes);
  ASSERT_FALSE(text);
  EXPECT_EQ(text.error().code, Errc::kUnsupported);
  EXPECT_NE(text.error().message.find("layer 5: node \"node1\" gpu 0 holds 1 experts, others 2"),
            std::string::npos)
      << text.error().message;
  const Placement twice = Placed(loads, cluster, {0, 1, 2, 2, 0, 1, 2, 1});
  text = ForeignPlanText(PlanFormat::kAscend, twice, loads, cluster, 1, loads.layer_id, &notes);
  ASSERT_FALSE(text);
  EXPECT_NE(text.error().message.find("layer 3 expert 2: occurs twice on rank 1"),
            std::string::npos);
  EXPECT_TRUE(notes.empty());
  EXPECT_TRUE(ForeignPlanText(PlanFormat::kVllm, twice, loads, cluster, 1, loads.layer_id, &notes));
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_EQ(notes[0], "layer 3 expert 2: occurs twice on rank 1: the second copy wastes memory");
}

TEST(IoPlanTest, DeadGpusAreNoRanks) {
  const TokenCounts loads = TwoLayers();
  Cluster cluster = UniformCluster(3, 1, 2);
  cluster.nodes[1].alive = false;
  const Placement placement = Placed(loads, cluster, {0, 2, -1, -1, 1, 2, 0, 1, -1, -1, 2, 1});
  PlanNotes notes;
  const auto text =
      ForeignPlanText(PlanFormat::kVllm, placement, loads, cluster, 1, loads.layer_id, &notes);
  ASSERT_TRUE(text);
  EXPECT_NE(text->find("\"0\":[0,2,1,2]"), std::string::npos);
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_NE(notes[0].find("1 dead ones are left out"), std::string::npos);
  const auto again = PlacedOn(Read(*text), loads, cluster);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->slot_expert, placement.slot_expert);
}

TEST(IoPlanTest, YamlOfEveryStyleIsRead) {
  const PlanFile file = Read(
      "# plan\ninitial_global_assignments:\n  3: [0, 2,\n    1, 2]\n  '5':\n  - 0\n  - 1\n  - 2\n"
      "  - 1\nlayer_updates_per_iter: 0\nnum_slots: 4\n");
  EXPECT_EQ(file.format, "tensorrt-llm");
  EXPECT_EQ(file.layer_id, (std::vector<std::uint32_t>{3, 5}));
  EXPECT_EQ(file.slots[0], (std::vector<std::int32_t>{0, 2, 1, 2}));
  EXPECT_EQ(file.slots[1], (std::vector<std::int32_t>{0, 1, 2, 1}));
}

TEST(IoPlanTest, NodesAreFoundByName) {
  const TokenCounts loads = TwoLayers();
  const Cluster old = UniformCluster(2, 1, 2);
  const Placement placement = Placed(loads, old, {0, 2, 1, 2, 0, 1, 2, 1});
  const PlanFile file =
      Read(PlanText(Verified(loads, old, placement), loads, old, FailureUnit::kNode));
  Cluster now = UniformCluster(3, 1, 2);
  now.nodes[0].name = "node1";
  now.nodes[1].name = "new";
  now.nodes[2].name = "newer";
  const auto placed = PlacedOn(file, loads, now);
  ASSERT_TRUE(placed) << placed.error().message;
  EXPECT_EQ(placed->slot_expert,
            (std::vector<std::int32_t>{1, 2, -1, -1, -1, -1, 2, 1, -1, -1, -1, -1}));
}

TEST(IoPlanTest, PlansOfAnotherShapeAreRefused) {
  const TokenCounts loads = TwoLayers();
  const Cluster cluster = UniformCluster(2, 1, 2);
  const auto message = [&](const std::string& text) {
    const auto placed = PlacedOn(Read(text), loads, cluster);
    EXPECT_FALSE(placed) << text;
    if (placed) return std::string();
    EXPECT_EQ(placed.error().code, Errc::kBadInput);
    return placed.error().message;
  };
  EXPECT_NE(message("[[0,1,2,3],[0,1,2,3]]").find("4 experts, the token counts have 3"),
            std::string::npos);
  EXPECT_NE(message("[[0,1,2],[0,1,2]]").find("3 slots do not divide among 2"), std::string::npos);
  EXPECT_NE(message("[[0,1,2,0]]").find("1 layer without layer numbers, the token counts have 2"),
            std::string::npos);
  EXPECT_NE(message("{\"gpus\":4,\"nodes\":1,\"physical_to_logical\":[[0,1,2,0],[0,1,2,0]]}")
                .find("gpus"),
            std::string::npos);
}

/// Layers 3 and 5 with three and two experts.
TokenCounts UnevenLayers() {
  TokenCounts loads = TwoLayers();
  loads.layer_experts = {3, 2};
  loads.tokens = {10, 20, 30, 5, 50, 0};
  return loads;
}

TEST(IoPlanTest, LayersWithDifferentNumbersOfExpertsReadBack) {
  const TokenCounts loads = UnevenLayers();
  const Cluster cluster = UniformCluster(2, 1, 2);
  const Placement placement = Placed(loads, cluster, {0, 2, 1, 2, 0, 1, 1, 0});
  const std::string text =
      PlanText(Verified(loads, cluster, placement), loads, cluster, FailureUnit::kNode);
  EXPECT_NE(text.find("\"experts\":3,\"iteration\""), std::string::npos) << text;
  EXPECT_NE(text.find("{\"layer\":5,\"experts\":2,\"loads\":[5,50],\"replicas\":[2,2],"),
            std::string::npos)
      << text;
  const PlanFile file = Read(text);
  EXPECT_EQ(file.experts, 3U);
  EXPECT_EQ(file.layer_experts, (std::vector<std::uint32_t>{3, 2}));
  const auto again = PlacedOn(file, loads, cluster);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->slot_expert, placement.slot_expert);
  EXPECT_EQ(again->layer_experts, loads.layer_experts);
  // One of the layers alone.
  TokenCounts small = LayersOf(loads, 1, 2);
  const auto part = PlacedOn(file, small, cluster);
  ASSERT_TRUE(part) << part.error().message;
  EXPECT_EQ(part->experts, 2U);
  EXPECT_TRUE(part->layer_experts.empty());
  const auto other = PlacedOn(file, TwoLayers(), cluster);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().message, "plan: layer 5 has 2 experts, the token counts have 3");
}

TEST(IoPlanTest, EqualNumbersByLayerAreOneNumber) {
  const PlanFile file = Read(
      "{\"layers\":[{\"layer\":0,\"experts\":3,\"devices\":[[0,1]]},"
      "{\"layer\":1,\"experts\":3,\"devices\":[[1,0]]}]}");
  EXPECT_EQ(file.experts, 3U);
  EXPECT_TRUE(file.layer_experts.empty());
}

TEST(IoPlanTest, OtherProgramsWithOneNumberOfExpertsRefuseOthers) {
  const TokenCounts loads = UnevenLayers();
  const Cluster cluster = UniformCluster(2, 1, 2);
  const Placement placement = Placed(loads, cluster, {0, 2, 1, 2, 0, 1, 1, 0});
  PlanNotes notes;
  for (const auto& [format, name] :
       {std::pair(PlanFormat::kEplb, "eplb"), std::pair(PlanFormat::kVllm, "vllm")}) {
    const auto text = ForeignPlanText(format, placement, loads, cluster, 1, loads.layer_id, &notes);
    ASSERT_FALSE(text);
    EXPECT_EQ(text.error().code, Errc::kUnsupported);
    EXPECT_EQ(text.error().message,
              StrCat("--format ", name,
                     " requires the same number of experts in all layers, found 2 to 3 experts; "
                     "choose layers of one number with --layers"));
  }
  for (const PlanFormat format :
       {PlanFormat::kSglang, PlanFormat::kTensorrt, PlanFormat::kAscend}) {
    const auto text = ForeignPlanText(format, placement, loads, cluster, 1, loads.layer_id, &notes);
    ASSERT_TRUE(text) << text.error().message;
    const auto again = PlacedOn(Read(*text), loads, cluster);
    ASSERT_TRUE(again) << again.error().message << "\n" << *text;
    EXPECT_EQ(again->slot_expert, placement.slot_expert) << *text;
  }
}

class BadPlan : public testing::TestWithParam<std::tuple<const char*, const char*>> {};

TEST_P(BadPlan, IsRefusedWithItsPlace) {
  const auto& [text, part] = GetParam();
  const auto plan = ParsePlan(text, "p");
  ASSERT_FALSE(plan) << text;
  EXPECT_TRUE(plan.error().code == Errc::kBadInput || plan.error().code == Errc::kLimit);
  EXPECT_NE(plan.error().message.find(part), std::string::npos) << plan.error().message;
}

INSTANTIATE_TEST_SUITE_P(
    IoPlanTest, BadPlan,
    testing::Values(
        std::tuple("", "is empty"), std::tuple("{}", "not a plan: expected one of"),
        std::tuple("[[0,1],[0]]", "layer 1: 1 slots, layer 0 has 2"),
        std::tuple("[[0,-2]]", "layer 0 slot 1: a whole number"),
        std::tuple("[[0,1.5]]", "layer 0 slot 1"), std::tuple("[[0,70000]]", "slot 1"),
        std::tuple("[[-1]]", "expert -1 does not exist"), std::tuple("[[]]", "without slots"),
        std::tuple("[]", "a list of layers"), std::tuple("{\"layers\":[]}", "without layers"),
        std::tuple("{\"layers\":[{\"layer\":0}]}", "layer and placement"),
        std::tuple("{\"layers\":[{\"layer\":0,\"placement\":[[0]]},"
                   "{\"layer\":0,\"placement\":[[0]]}]}",
                   "layer 0 occurs twice"),
        std::tuple("{\"experts\":1,\"layers\":[{\"layer\":0,\"placement\":[[1]]}]}",
                   "expert 1 does not exist"),
        std::tuple("{\"nodes\":3,\"layers\":[{\"layer\":0,\"placement\":[[1],[0]]}]}", "3 nodes"),
        std::tuple("{\"layers\":[{\"layer\":0,\"experts\":2,\"devices\":[[0]]},"
                   "{\"layer\":1,\"devices\":[[0]]}]}",
                   "layer 1: either all layers or none must have experts"),
        std::tuple("{\"layers\":[{\"layer\":0,\"experts\":2,\"devices\":[[0]]},"
                   "{\"layer\":1,\"experts\":1,\"devices\":[[1]]}]}",
                   "layer 1: expert 1 does not exist, there are 1"),
        std::tuple("{\"experts\":3,\"layers\":[{\"layer\":0,\"experts\":2,\"devices\":[[0]]}]}",
                   "experts is 3, but the largest number in a layer is 2"),
        std::tuple("{\"layers\":[{\"layer\":0,\"experts\":0,\"devices\":[[0]]}]}",
                   "layer 0: experts"),
        std::tuple("{\"layers\":[{\"layer\":0,\"experts\":2,\"devices\":[[0],[1]]},"
                   "{\"layer\":1,\"experts\":1,\"devices\":[[0],[0]]}],\"migration\":"
                   "{\"transfers\":[[1,1,0,1,0]],\"lost\":[]}}",
                   "layer 1 has no expert 1"),
        std::tuple("{\"layers\":[{\"layer\":4,\"devices\":[[0],[1]]}],\"migration\":"
                   "7}",
                   "lists transfers and lost"),
        std::tuple("{\"layers\":[{\"layer\":4,\"devices\":[[0],[1]]}],\"migration\":"
                   "{\"transfers\":[]}}",
                   "lists transfers and lost"),
        std::tuple("{\"layers\":[{\"layer\":4,\"devices\":[[0],[1]]}],\"migration\":"
                   "{\"transfers\":[[4,0,0,1]],\"lost\":[]}}",
                   "transfer 0: a list of 5 numbers"),
        std::tuple("{\"layers\":[{\"layer\":4,\"devices\":[[0],[1]]}],\"migration\":"
                   "{\"transfers\":[[3,0,0,1,0]],\"lost\":[]}}",
                   "layer 3 is not in the plan"),
        std::tuple("{\"layers\":[{\"layer\":4,\"devices\":[[0],[1]]}],\"migration\":"
                   "{\"transfers\":[[4,2,0,1,0]],\"lost\":[]}}",
                   "transfer 0"),
        std::tuple("{\"layers\":[{\"layer\":4,\"devices\":[[0],[1]]}],\"migration\":"
                   "{\"transfers\":[[4,0,0,2,0]],\"lost\":[]}}",
                   "transfer 0"),
        std::tuple("{\"layers\":[{\"layer\":4,\"devices\":[[0],[1]]}],\"migration\":"
                   "{\"transfers\":[[4,0,0,1,1],[4,1,1,0,0]],\"lost\":[]}}",
                   "transfer 1: round 0 after round 1"),
        std::tuple("{\"layers\":[{\"layer\":4,\"devices\":[[0],[1]]}],\"migration\":"
                   "{\"transfers\":[],\"lost\":[[4]]}}",
                   "lost: a list of 2 numbers"),
        std::tuple("{\"record_type\":\"x\"}", "eplb_initial_mapping"),
        std::tuple("{\"record_type\":\"eplb_initial_mapping\",\"num_redundant_experts\":2,"
                   "\"initial_global_assignments\":{\"0\":[0,1,2]}}",
                   "2 redundant experts"),
        std::tuple("{\"record_type\":\"eplb_initial_mapping\","
                   "\"initial_global_assignments\":{\"a\":[0]}}",
                   "layer a: a number expected"),
        std::tuple("{\"layer_list\":[{\"layer_id\":0}]}", "device_list"),
        std::tuple("{\"gpus\":3,\"physical_to_logical\":[[0,1]]}", "do not divide"),
        std::tuple("num_slots: 4\n", "initial_global_assignments is missing"),
        std::tuple("initial_global_assignments:\n  0: [0, 1\n", "the list does not end"),
        std::tuple("initial_global_assignments:\n  0: [0, x]\n",
                   "p:2: the number of an expert expected, found \"x\""),
        std::tuple("initial_global_assignments:\n  a: [0]\n", "a layer number"),
        std::tuple("num_slots: 3\ninitial_global_assignments:\n  0: [0, 1]\n", "num_slots is 3"),
        std::tuple("hello\n", "cannot read \"hello\"")));

TEST(IoPlanTest, ResultsTravelBetweenRanks) {
  const TokenCounts loads = TwoLayers();
  const Cluster cluster = UniformCluster(2, 1, 2);
  StrategyResult result;
  result.placement = Placed(loads, cluster, {0, 2, 1, 2, 0, 1, 2, 1});
  result.owners = result.placement;
  result.notes = {{true, 2}, {false, 1}};
  result.warnings = {"one", ""};
  const comm::Bytes bytes = Pack(result);
  const auto again = UnpackResult(bytes);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(Pack(*again), bytes);
  EXPECT_TRUE(again->notes[0].cut);
  EXPECT_EQ(again->warnings, result.warnings);
  for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
    EXPECT_FALSE(UnpackResult(std::span(bytes).first(cut))) << cut;
  }
}

TEST(IoPlanTest, NamesCannotLeaveThePagesScript) {
  const TokenCounts loads = TwoLayers();
  Cluster cluster = UniformCluster(2, 1, 2);
  cluster.nodes[0].name = "</script><b>";
  const Placement placement = Placed(loads, cluster, {0, 2, 1, 2, 0, 1, 2, 1});
  const VerifiedPlan plan = Verified(loads, cluster, placement);
  ReportPage page;
  page.loads = &loads;
  page.cluster = &cluster;
  page.plan = &plan;
  page.before = &placement;
  page.loads_name = "<img src=x onerror=alert(1)>";
  const std::string text = PageText(page);
  EXPECT_EQ(text.find("</script><b>"), std::string::npos);
  EXPECT_EQ(text.find("<img"), std::string::npos);
  EXPECT_NE(text.find("\\u003c/script>"), std::string::npos);
  EXPECT_EQ(text.find("http://"), text.find("http://www.w3.org/2000/svg"));
  EXPECT_EQ(text.find("https://"), std::string::npos);
}

}  // namespace
}  // namespace shardwright::placement
