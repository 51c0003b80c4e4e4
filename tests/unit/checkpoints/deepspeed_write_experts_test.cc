// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "write_model.h"
#include "written_deepspeed.h"

namespace shardwright::checkpoints::test {
namespace {

Model Experts(std::uint32_t experts) {
  Model model;
  model.Add("emb.weight", {11, 6});
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    for (std::uint32_t expert = 0; expert < experts; ++expert) {
      model.AddExpert(layer, expert, "weight", {4, 4}, 1);
      model.AddExpert(layer, expert, "bias", {4}, 1);
    }
  }
  return model;
}

std::string Expert(int layer, int expert, const std::string& rest) {
  return "blocks." + std::to_string(layer) + ".moe.deepspeed_moe.experts.deepspeed_experts." +
         std::to_string(expert) + "." + rest;
}

// Example E: expert groups over W / ep ranks, with local names.
TEST(DeepSpeedWriteTest, ExpertGroups) {
  const Model model = Experts(4);
  Checkpoint source = const_cast<Model&>(model).source();
  Topology to = Zero(1, 4);
  to.ep = 2;
  const Rendered files = Write(model, source, to);
  for (std::uint64_t rank = 0; rank < 4; ++rank) {
    const auto document = files.Parse(Shard(rank));
    const Node* inner = Inner(document);
    EXPECT_EQ(Ints(inner->Find("partition_count")), (Numbers{4, 2}));
    const int layer = rank < 2 ? 0 : 1;
    EXPECT_EQ(Mapping(inner, 1),
              (Texts{Expert(layer, 0, "weight") + " 0 16", Expert(layer, 0, "bias") + " 16 4",
                     Expert(layer, 1, "weight") + " 20 16", Expert(layer, 1, "bias") + " 36 4"}));
    const auto values = files.Floats(Shard(rank), document,
                                     inner->Find("single_partition_of_fp32_groups")->items[1]);
    const int expert = rank % 2 == 0 ? 0 : 2;  // expert, then data
    EXPECT_EQ(values[0],
              Model::ValueOf(model.TensorOf(Expert(layer, expert, "weight"), "fp32"), 0));
    EXPECT_EQ(values[36],
              Model::ValueOf(model.TensorOf(Expert(layer, expert + 1, "bias"), "fp32"), 0));
    const Node* options = inner->Find("base_optimizer_state")->Find("param_groups")->items[1];
    EXPECT_EQ(options->Find("name")->text, "ep_size_2");
  }
  const auto expert = files.Parse(kTag + "layer_1_expert_3_mp_rank_00_model_states.pt");
  EXPECT_EQ(Keys(expert.root), (Texts{Expert(1, 3, "weight"), Expert(1, 3, "bias")}));
  const auto root = files.Parse(kTag + "mp_rank_00_model_states.pt");
  EXPECT_EQ(Keys(root.root->Find("module")), (Texts{"emb.weight"}));
  EXPECT_EQ(Ints(root.root->Find("num_experts")), (Numbers{4, 4}));
}

// DeepSpeed would load the frozen experts of the first rank from a list everywhere.
TEST(DeepSpeedWriteTest, FrozenExpertsAreNotListed) {
  Model model;
  model.Add("emb.weight", {11, 6});
  model.Add("proj.weight", {3, 4}, -1);
  model.AddExpert(0, 0, "weight", {4, 4}, 1);
  Param& frozen = model.Add(Expert(0, 1, "weight"), {4, 4}, -1);
  frozen.expert = ExpertId{0, 1, ExpertModuleOf(frozen.name)};
  const Rendered files = Write(model, model.source(), Zero(2, 2));
  const auto document = files.Parse(kTag + "mp_rank_00_model_states.pt");
  EXPECT_TRUE(document.root->Find("frozen_param_shapes")->is_none());
  EXPECT_TRUE(document.root->Find("frozen_param_fragments")->is_none());
  EXPECT_EQ(document.root->Find("shardwright_kinds")->Find("proj.weight")->text, "frozen");
}

TEST(DeepSpeedWriteTest, ExpertsByDataFirst) {
  Model model = Experts(4);
  Set(model.arena(), const_cast<Node*>(model.model()->Find("ds_config")),
      "use_data_before_expert_parallelism", model.arena().Bool(true));
  Topology to = Zero(1, 4);
  to.ep = 2;
  const Rendered files = Write(model, model.source(), to);
  const auto document = files.Parse(Shard(2));
  const auto values = files.Floats(
      Shard(2), document, Inner(document)->Find("single_partition_of_fp32_groups")->items[1]);
  EXPECT_EQ(values[0], Model::ValueOf(model.TensorOf(Expert(0, 2, "weight"), "fp32"), 0));
}

TEST(DeepSpeedWriteTest, ExpertsWithoutZero) {
  Model model = Experts(4);
  Topology to = Zero(0, 2);
  to.ep = 2;
  const Rendered files = Write(model, model.source(), to);
  const auto document = files.Parse(kTag + "expp_rank_1_mp_rank_00_optim_states.pt");
  const Node* optimizer = document.root->Find("optimizer");
  EXPECT_EQ(Ints(optimizer->Find("param_groups")->items[1]->Find("params")).size(), 8U);
  const auto values = files.Floats(kTag + "expp_rank_1_mp_rank_00_optim_states.pt", document,
                                   StateOf(optimizer->Find("state"), 1)->Find("exp_avg"));
  EXPECT_EQ(values[0], Model::ValueOf(model.TensorOf(Expert(0, 2, "weight"), "exp_avg"), 0));
}

TEST(DeepSpeedWriteTest, LargeExpertGroupsAreSplitAgain) {
  Model model;
  // 60 M elements each: two per rank and group at ep=2, so layers 0 and 1 went to two groups each.
  for (std::uint32_t expert = 0; expert < 8; ++expert) {
    model.AddExpert(0, expert, "weight", {60'000, 1'000}, expert % 4 < 2 ? 0 : 1);
  }
  model.Change([](auto& topology) { topology.ep = 2; });
  Topology to = Zero(1, 8);
  to.ep = 8;
  const auto merged = WriteDeepSpeed(model.source(), to);
  ASSERT_TRUE(merged.has_value()) << merged.error().message;
  std::size_t arrays = 0;
  for (const auto& tensor : merged->target.map.tensors) arrays += tensor.state == "fp32" ? 1 : 0;
  EXPECT_EQ(arrays, 8U);
  to.ep = 1;
  const auto split = WriteDeepSpeed(model.source(), to);
  ASSERT_TRUE(split.has_value()) << split.error().message;
  // Eight experts on every rank now: groups of at most 178 956 971 elements hold two.
  std::set<std::uint32_t> groups;
  for (const auto& tensor : split->target.map.tensors) {
    if (tensor.state == "fp32") groups.insert(tensor.fragments.at(0).at.array);
  }
  EXPECT_EQ(groups.size(), 4U);
}
}  // namespace
}  // namespace shardwright::checkpoints::test
