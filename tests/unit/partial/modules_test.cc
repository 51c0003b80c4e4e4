// SPDX-License-Identifier: Apache-2.0
#include "partial/store/modules.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "unit/checkpoints/write_model.h"

namespace shardwright::partial {
namespace {

using checkpoints::test::Model;

Model TwoLayers() {
  Model model;
  model.Add("emb.weight", {5, 4});
  model.Add("model.norm.weight", {4});
  model.Add("scale", {3}, -2);
  model.Add("blocks.0.qkv.weight", {4, 4});
  model.Add("blocks.0.qkv.bias", {4});
  model.Add("blocks.0.moe.deepspeed_moe.gate.wg.weight", {2, 4});
  model.Add("blocks.0.ln", {4}, -1);
  // Layers have the numbers of the files: with gaps, and not in the order of reading.
  for (const std::uint32_t layer : {7U, 2U}) {
    for (const std::uint32_t expert : {1U, 0U}) {
      model.AddExpert(layer, expert, "0.weight", {3, 4}, 1);
      model.AddExpert(layer, expert, "2.bias", {4}, 1);
    }
  }
  return model;
}

std::vector<std::string> NamesOf(const partial::Model& model) {
  std::vector<std::string> names;
  for (const Module& module : model.modules) names.push_back(module.name);
  return names;
}

TEST(DescribeModel, GroupsByNameAndExpert) {
  Model model = TwoLayers();
  const auto found = DescribeModel(model.source());
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(NamesOf(*found), (std::vector<std::string>{
                                 "blocks.0", "blocks.0.moe", "blocks.0.qkv", "emb", "model.norm",
                                 "scale", "blocks.2.moe.deepspeed_moe.experts.deepspeed_experts.0",
                                 "blocks.2.moe.deepspeed_moe.experts.deepspeed_experts.1",
                                 "blocks.7.moe.deepspeed_moe.experts.deepspeed_experts.0",
                                 "blocks.7.moe.deepspeed_moe.experts.deepspeed_experts.1"}));
  EXPECT_EQ(found->nonexpert_count, 6U);
  EXPECT_EQ(found->experts, (LayerExperts{2, 2}));
  EXPECT_EQ(found->layer_id, (std::vector<std::uint32_t>{2, 7}));
  EXPECT_EQ(found->expert_module(1, 1), 9U);
  EXPECT_EQ(found->modules[9].id, (ModuleId{1, 1}));
  EXPECT_EQ(found->modules[3].id, (ModuleId{3, kNonExpert}));
}

TEST(DescribeModel, LaysComponentsEndToEnd) {
  Model model = TwoLayers();
  const auto found = DescribeModel(model.source());
  ASSERT_TRUE(found);
  const Module& expert = found->modules[6];
  EXPECT_EQ(expert.part(Component::kWeights).bytes, 4 * (12 + 4));
  EXPECT_EQ(expert.part(Component::kMaster).bytes, 4 * (12 + 4));
  EXPECT_EQ(expert.part(Component::kMoments).bytes, 2 * 4 * (12 + 4));
  EXPECT_EQ(expert.bytes(), 4 * 4 * (12 + 4));
  std::uint64_t end = 0;
  std::vector<std::string> order;
  for (const ModuleTensor& one : expert.part(Component::kMoments).tensors) {
    EXPECT_EQ(one.offset, end);
    end += one.bytes;
    const auto& tensor = model.source().map.tensors[one.tensor];
    order.push_back(tensor.name.substr(tensor.name.rfind("experts.") + 10) + " " + tensor.state);
  }
  EXPECT_EQ(order, (std::vector<std::string>{"0.weight exp_avg", "0.weight exp_avg_sq",
                                             "2.bias exp_avg", "2.bias exp_avg_sq"}));
  // Frozen parameters and buffers are weights.
  EXPECT_EQ(found->modules[0].part(Component::kWeights).bytes, 16U);
  EXPECT_EQ(found->modules[0].part(Component::kMaster).bytes, 0U);
  EXPECT_EQ(found->modules[5].part(Component::kWeights).bytes, 12U);
}

TEST(DescribeModel, RefusesAMissingExpert) {
  Model model;
  model.Add("emb.weight", {5, 4});
  model.AddExpert(0, 0, "0.weight", {3, 4}, 1);
  model.AddExpert(0, 2, "0.weight", {3, 4}, 1);
  const auto found = DescribeModel(model.source());
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, Errc::kBadInput);
  EXPECT_NE(found.error().message.find("expert 1 of MoE layer 0 expected, found expert 2"),
            std::string::npos)
      << found.error().message;
}

TEST(Fingerprint, IsOfTheModelNotOfItsReading) {
  Model a = TwoLayers();
  Model b = TwoLayers();
  std::reverse(b.source().map.tensors.begin(), b.source().map.tensors.end());
  EXPECT_EQ(DescribeModel(a.source())->fingerprint, DescribeModel(b.source())->fingerprint);
  EXPECT_EQ(FirstDifference(a.source(), b.source()), "");
  b.Change([](auto& topology) { topology.dp = 8; });
  b.source().tag = "global_step9";
  EXPECT_EQ(DescribeModel(a.source())->fingerprint, DescribeModel(b.source())->fingerprint);
}

TEST(Fingerprint, TellsShapesTypesStatesAndTies) {
  const auto differs = [](const auto& change, const std::string& text) {
    Model a = TwoLayers();
    Model b = TwoLayers();
    change(b.source());
    EXPECT_NE(DescribeModel(a.source())->fingerprint, DescribeModel(b.source())->fingerprint);
    EXPECT_EQ(FirstDifference(a.source(), b.source()), text);
  };
  differs(
      [](auto& source) {
        source.map.tensors[0].shape = {4, 5};
      },
      "\"emb.weight\" fp32: expected float32 [5, 4], found float32 [4, 5]");
  differs([](auto& source) { source.map.tensors[1].dtype = DType::kBF16; },
          "\"emb.weight\" weight: expected float32 [5, 4], found bfloat16 [5, 4]");
  differs([](auto& source) { source.map.tensors[2].state = "momentum"; },
          "\"emb.weight\" exp_avg: expected float32 [5, 4], found none");
  Model tied = TwoLayers();
  tied.AddAlias("head.weight", "emb.weight");
  EXPECT_EQ(FirstDifference(TwoLayers().source(), tied.source()),
            "\"head.weight\": expected none, found tied to \"emb.weight\"");
}

TEST(PassedMembers, AreThoseThatNoTensorUses) {
  Model model = TwoLayers();
  layout::ShardMap& map = model.source().map;
  const auto random = static_cast<std::uint32_t>(map.members.size());
  map.members.push_back({.file = 0, .offset = 0, .bytes = 100, .crc32 = {}, .name = "random"});
  map.members.push_back({.file = 0, .offset = 0, .bytes = 0, .crc32 = {}, .name = "empty"});
  model.state().model_states[0].members = {0, 1, random, random + 1};
  EXPECT_EQ(PassedMembers(model.source()), (std::vector<std::uint32_t>{random}));
}

TEST(Components, HaveNames) {
  for (const Component component : kAllComponents) {
    EXPECT_EQ(*ParseComponent(Name(component)), component);
  }
  EXPECT_EQ(ParseComponent("optimizer").error().code, Errc::kUsage);
  EXPECT_EQ(ComponentOf("buffer"), Component::kWeights);
  EXPECT_EQ(ComponentOf("max_exp_avg_sq"), Component::kMoments);
}

}  // namespace
}  // namespace shardwright::partial
