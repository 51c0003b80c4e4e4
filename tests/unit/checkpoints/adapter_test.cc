// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/safetensors/adapter_internal.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "checkpoints/registry.h"
#include "write_model.h"

namespace shardwright::checkpoints::safetensors {
namespace {

Checkpoint Of(const std::vector<std::pair<std::string, Shape>>& tensors) {
  Checkpoint made;
  for (const auto& [name, shape] : tensors) {
    Param param;
    param.name = name;
    param.shape = shape;
    made.params.push_back(std::move(param));
  }
  return made;
}

std::vector<std::string> NamesOf(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const Param& param : checkpoint.params) names.push_back(param.name);
  return names;
}

Result<AdapterFolder> Make(const Checkpoint& source, const FilesLayout& layout = {}) {
  return MakeAdapterFolder(source, layout, NamesOf(source));
}

const std::string kQ = "base_model.model.layers.0.q_proj";

TEST(Adapter, IsNamedAsPeftNamesIt) {
  const Checkpoint source = Of({{kQ + ".lora_A.default.weight", {2, 4}},
                                {kQ + ".lora_B.default.weight", {4, 2}},
                                {"base_model.model.head.modules_to_save.default.weight", {3, 4}},
                                {kQ + ".base_layer.weight", {4, 4}}});
  const auto folder = Make(source);
  ASSERT_TRUE(folder) << folder.error().message;
  ASSERT_EQ(folder->tensors.size(), 3U);
  EXPECT_EQ(folder->tensors[0].name, kQ + ".lora_A.weight");
  EXPECT_EQ(folder->tensors[2].name, "base_model.model.head.weight");
  const auto config = nlohmann::json::parse(folder->config);
  EXPECT_EQ(config["r"], 2);
  EXPECT_EQ(config["target_modules"], std::vector<std::string>{"layers.0.q_proj"});
  EXPECT_EQ(config["modules_to_save"], std::vector<std::string>{"head"});
  ASSERT_EQ(folder->not_carried.size(), 2U);
  EXPECT_NE(folder->not_carried[0].find("1 tensor outside"), std::string::npos);
  EXPECT_NE(folder->not_carried[1].find("--lora-alpha"), std::string::npos);
}

TEST(Adapter, TakesTheConfigurationThatTrainingWrote) {
  Checkpoint source = Of({{"layers.0.q.lora_A.weight", {2, 4}}});
  source.adapter_config = R"({"r": 2, "lora_alpha": 32})";
  const auto folder = Make(source);
  ASSERT_TRUE(folder) << folder.error().message;
  EXPECT_EQ(folder->config, source.adapter_config);
  EXPECT_TRUE(folder->not_carried.empty());
  EXPECT_EQ(folder->tensors.front().name, "base_model.model.layers.0.q.lora_A.weight");
  source.adapter_config = R"({"r": 8})";
  EXPECT_EQ(Make(source)->notes.size(), 2U);
}

TEST(Adapter, RanksThatDifferAreInThePattern) {
  const Checkpoint source =
      Of({{"a.lora_A.weight", {2, 4}}, {"b.lora_A.weight", {2, 4}}, {"c.lora_A.weight", {8, 4}}});
  FilesLayout layout;
  layout.lora_alpha = 16;
  const auto folder = Make(source, layout);
  ASSERT_TRUE(folder) << folder.error().message;
  const auto config = nlohmann::json::parse(folder->config);
  EXPECT_EQ(config["r"], 2);
  EXPECT_EQ(config["lora_alpha"], 16);
  EXPECT_EQ(config["rank_pattern"], (nlohmann::json{{"c", 8}}));
  EXPECT_TRUE(folder->not_carried.empty());
}

TEST(Adapter, OneOfSeveralIsChosenByName) {
  const Checkpoint source = Of({{"a.lora_A.one.weight", {2, 4}}, {"a.lora_A.two.weight", {2, 4}}});
  const auto refused = Make(source);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_NE(refused.error().message.find("one, two"), std::string::npos);
  FilesLayout layout;
  layout.adapter = "two";
  EXPECT_EQ(Make(source, layout)->tensors.front().param, 1U);
  layout.adapter = "three";
  EXPECT_EQ(Make(source, layout).error().code, Errc::kUsage);
  layout.adapter = kAllTensors;
  EXPECT_TRUE(Make(source, layout)->tensors.empty());
}

TEST(Adapter, AModelThatIsTrainedBesideItsAdapterStaysAModel) {
  Checkpoint source = Of({{"a.lora_A.weight", {2, 4}}, {"norm.weight", {4}}});
  source.params[1].group = 0;
  const auto folder = Make(source);
  ASSERT_TRUE(folder);
  EXPECT_TRUE(folder->tensors.empty());
  EXPECT_EQ(folder->notes.size(), 1U);
  EXPECT_TRUE(Make(Of({{"norm.weight", {4}}}))->notes.empty());
}

/// Names of the tensors written from a source, and the messages.
std::pair<std::vector<std::string>, std::vector<std::string>> WrittenAs(const Checkpoint& source,
                                                                        const char* target) {
  const Format* row = FindFormat("safetensors");
  const auto spec = ParseTarget(*row, target);
  EXPECT_TRUE(spec) << spec.error().message;
  const auto layout = row->resolve(*spec, source);
  EXPECT_TRUE(layout) << layout.error().message;
  const auto written = row->write(source, *layout);
  EXPECT_TRUE(written) << written.error().message;
  std::vector<std::string> names;
  for (const layout::Member& member : written->target.map.members) names.push_back(member.name);
  return {names, written->notes};
}

TEST(ModelFiles, HaveNamesWithoutWhatWrappersAdd) {
  test::Model model;
  model.Add("_orig_mod.a.weight", {2});
  model.Add("_orig_mod.b.weight", {2});
  const auto [names, notes] = WrittenAs(model.source(), "");
  EXPECT_EQ(names, (std::vector<std::string>{"a.weight", "b.weight"}));
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_NE(notes[0].find("_orig_mod."), std::string::npos) << notes[0];
  const auto [kept, none] = WrittenAs(model.source(), "keep-prefixes=yes");
  EXPECT_EQ(kept.front(), "_orig_mod.a.weight");
  EXPECT_TRUE(none.empty());
}

}  // namespace
}  // namespace shardwright::checkpoints::safetensors
