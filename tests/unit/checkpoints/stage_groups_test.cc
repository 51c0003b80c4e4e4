// SPDX-License-Identifier: Apache-2.0
// Pipeline stages without a parameter of some group: their files do not contain that group.

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "same_checkpoint.h"
#include "written_deepspeed.h"

namespace shardwright::checkpoints::test {
namespace {

/// A layer of the pipeline: the groups of its parameters.
using Layer = std::vector<int>;

/// One parameter for each group of each layer; layer l is the whole stage l.
Model OneLayerEach(const std::vector<Layer>& layers, std::uint64_t zero) {
  Model model;
  for (std::uint32_t l = 0; l < layers.size(); ++l) {
    for (const int group : layers[l]) {
      const std::string name = std::to_string(l) + ".w" + std::to_string(group);
      model.Add(name, {5 + l, 3 + static_cast<std::uint64_t>(group)}, group).layer = l;
    }
    // At stage 0 only buffers show the stage of a layer.
    model.Add(std::to_string(l) + ".scale", {2}, -2).layer = l;
  }
  model.Change([&](Topology& topology) {
    topology.zero = zero;
    topology.dp = 2;
    topology.pipeline = true;
    topology.pp = layers.size();
    topology.stages.clear();
    for (std::uint32_t l = 0; l < layers.size(); ++l) topology.stages.push_back({l});
  });
  return model;
}

/// Gives a group the options of another one.
void CopyOptions(Model& model, std::size_t from, std::size_t to) {
  model.source().groups[to].options = model.source().groups[from].options;
}

/// Writes the files of a model to a folder: all, or those of one model-parallel rank.
void Save(Model model, const fs::path& folder, const std::string& part = "") {
  const Rendered files = Write(model, model.source(), TopologyOf(model.source().layout));
  for (const std::string& path : files.paths()) {
    if (path.find(part) == std::string::npos) continue;
    fs::create_directories((folder / path).parent_path());
    std::ofstream(folder / path, std::ios::binary) << files.bytes(path);
  }
}

std::vector<std::string> NamesOf(const Checkpoint& read, std::size_t group) {
  std::vector<std::string> names;
  for (const std::uint32_t param : read.groups.at(group).params) {
    EXPECT_EQ(read.params[param].group, static_cast<std::int32_t>(group));
    names.push_back(read.params[param].name);
  }
  return names;
}

std::string OptionOf(const Checkpoint& read, std::size_t group) {
  return read.groups.at(group).options->Find("name")->text;
}

/// By ZeRO stage.
class StageGroups : public testing::TestWithParam<std::uint64_t> {
 protected:
  Scratch scratch_;
};

TEST_P(StageGroups, AreFoundByTheirOptions) {
  const Model model = OneLayerEach({{1}, {0, 1, 2}, {0, 2}, {2}}, GetParam());
  Save(model, scratch_ / "ckpt");
  const auto read = Read(scratch_ / "ckpt");
  ASSERT_TRUE(read.has_value()) << read.error().message;
  ASSERT_EQ(read->groups.size(), 3U);
  EXPECT_EQ(NamesOf(*read, 0), (Texts{"1.w0", "2.w0"}));
  EXPECT_EQ(NamesOf(*read, 1), (Texts{"0.w1", "1.w1"}));
  EXPECT_EQ(NamesOf(*read, 2), (Texts{"1.w2", "2.w2", "3.w2"}));
  for (std::size_t g = 0; g < 3; ++g) EXPECT_EQ(OptionOf(*read, g), "g" + std::to_string(g));
  EXPECT_EQ(EngineStateOf(*read)->options_rank, 1U);
  EXPECT_TRUE(read->bound.empty());
  Gatherer gather(read->map);
  for (const layout::LogicalTensor& tensor : read->map.tensors) {
    if (tensor.state != "fp32" && tensor.state != "exp_avg") continue;
    const std::string bytes = gather.Whole(tensor);
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    const std::size_t number = model.TensorOf(tensor.name, tensor.state);
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(values[i], Model::ValueOf(number, i)) << tensor.name << " " << tensor.state;
    }
  }
}

TEST_P(StageGroups, WithEqualOptionsAreNotGuessed) {
  Model model = OneLayerEach({{0, 1}, {1}}, GetParam());
  CopyOptions(model, 0, 1);
  Save(model, scratch_ / "ckpt");
  const auto read = Read(scratch_ / "ckpt");
  ASSERT_FALSE(read.has_value());
  EXPECT_EQ(read.error().code, Errc::kUnsupported);
  for (const char* part :
       {"mp_rank_01", "mp_rank_00", "group 0 has the options of its groups 0 and 1", "\"name\""}) {
    EXPECT_NE(read.error().message.find(part), std::string::npos) << read.error().message;
  }
}

TEST_P(StageGroups, WithEqualOptionsAreClearIfNoneIsMissing) {
  Model model = OneLayerEach({{0, 1, 2}, {0, 1}}, GetParam());
  CopyOptions(model, 0, 1);
  Save(model, scratch_ / "ckpt");
  const auto read = Read(scratch_ / "ckpt");
  ASSERT_TRUE(read.has_value()) << read.error().message;
  EXPECT_EQ(NamesOf(*read, 1), (Texts{"0.w1", "1.w1"}));
}

TEST_P(StageGroups, WithOptionsOfNoOtherStageAreRefused) {
  Save(OneLayerEach({{0, 1}, {2}}, GetParam()), scratch_ / "ckpt");
  const auto read = Read(scratch_ / "ckpt");
  ASSERT_FALSE(read.has_value());
  EXPECT_EQ(read.error().code, Errc::kUnsupported);
  EXPECT_NE(read.error().message.find("group 0 has the options of none"), std::string::npos)
      << read.error().message;
}

TEST_P(StageGroups, InAnotherOrderAreRefused) {
  Model model = OneLayerEach({{0, 1, 2}, {0, 1}}, GetParam());
  Save(model, scratch_ / "ckpt");
  Model swapped = OneLayerEach({{0, 1, 2}, {0, 1}}, GetParam());
  std::swap(swapped.source().groups[0].options, swapped.source().groups[1].options);
  Save(swapped, scratch_ / "ckpt", GetParam() == 0 ? "/mp_rank_01" : "mp_rank_01_optim");
  const auto read = Read(scratch_ / "ckpt");
  ASSERT_FALSE(read.has_value());
  EXPECT_EQ(read.error().code, Errc::kUnsupported);
  EXPECT_NE(read.error().message.find("group 1 has the options of none"), std::string::npos)
      << read.error().message;
}

std::vector<std::string> WarningsOf(Model model, const std::function<void(Topology&)>& change) {
  model.Change(change);
  const Result<Written> written = WriteDeepSpeed(model.source(), TopologyOf(model.source().layout));
  EXPECT_TRUE(written.has_value()) << (written ? "" : written.error().message);
  return written ? written->warnings : std::vector<std::string>{"failed"};
}

TEST(StageGroupsThatDiffer, AreWarnedOfIfDeepSpeedSumsTheirNorms) {
  const std::vector<Layer> layers = {{1}, {0, 1}, {0, 1}};
  for (const std::uint64_t zero : {1U, 2U}) {
    const auto warnings =
        WarningsOf(OneLayerEach(layers, 1), [&](Topology& to) { to.zero = zero; });
    ASSERT_EQ(warnings.size(), 1U) << zero;
    for (const std::string& part :
         {std::string(
              "stage 0 has group 1, stage 1 has groups 0 and 1, stage 2 has groups 0 and 1"),
          "zero=" + std::to_string(zero), std::string("never returns"), std::string("pp=")}) {
      EXPECT_NE(warnings[0].find(part), std::string::npos) << warnings[0];
    }
  }
}

TEST(StageGroupsThatDiffer, AreNotWarnedOfOtherwise) {
  const auto none = [](Topology&) {};
  EXPECT_TRUE(WarningsOf(OneLayerEach({{0, 1}, {0, 1}}, 1), none).empty());
  EXPECT_TRUE(WarningsOf(OneLayerEach({{1}, {0, 1}}, 0), none).empty());
  // One stage has the parameters of all.
  EXPECT_TRUE(WarningsOf(OneLayerEach({{1}, {0, 1}}, 1), [](Topology& to) {
                to.pp = 1;
                to.stages = {{0, 1}};
              }).empty());
  // BF16_Optimizer computes one norm of all groups.
  Model model = OneLayerEach({{1}, {0, 1}}, 1);
  pickle::Arena& arena = *model.source().arena;
  pickle::Node* types = arena.Dict();
  Set(arena, types, "grad_accum_dtype", arena.String("fp32"));
  Set(arena, const_cast<pickle::Node*>(model.model()->Find("ds_config")), "data_types", types);
  const auto bf16 = [](Topology& to) { to.dtype = DType::kBF16; };
  EXPECT_TRUE(WarningsOf(model, bf16).empty());
  EXPECT_EQ(WarningsOf(OneLayerEach({{1}, {0, 1}}, 1), bf16).size(), 1U);
}

INSTANTIATE_TEST_SUITE_P(Zero, StageGroups, testing::Values(0, 1));

}  // namespace
}  // namespace shardwright::checkpoints::test
