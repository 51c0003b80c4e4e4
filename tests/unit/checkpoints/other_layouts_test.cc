// SPDX-License-Identifier: Apache-2.0
// Native checkpoints made by the test: without ZeRO, pipeline modules, experts, stage 3.

#include <gtest/gtest.h>

#include <functional>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/native/deepspeed.h"
#include "fixtures.h"
#include "tiny_checkpoint.h"
#include "unit/support/os/scratch.h"

namespace shardwright::checkpoints {
namespace {

class OtherLayouts : public os::Scratch {
 protected:
  void SetUp() override {
    Scratch::SetUp();
    folder_ = At("save");
    fs::create_directories(folder_);
  }

  Result<Checkpoint> Read() const {
    SW_TRY_ASSIGN(const SourceSet source, ScanSource({folder_.string()}));
    Patterns patterns;
    return ReadDeepSpeed(source, patterns);
  }

  void ExpectRefused(Errc code, const std::vector<std::string>& words) const {
    const auto checkpoint = Read();
    ASSERT_FALSE(checkpoint);
    EXPECT_EQ(checkpoint.error().code, code) << checkpoint.error().message;
    for (const std::string& word : words) {
      EXPECT_NE(checkpoint.error().message.find(word), std::string::npos)
          << "\"" << word << "\" is not in: " << checkpoint.error().message;
    }
  }

  fs::path folder_;
};

std::vector<float> Ramp(float first, const Shape& shape) {
  std::vector<float> out;
  for (std::uint64_t i = 0; i < Elems(shape); ++i) out.push_back(first + static_cast<float>(i));
  return out;
}

float FirstOf(const Checkpoint& checkpoint, const std::string& name, const std::string& state) {
  const auto index = layout::TensorIndex(checkpoint.map).Find(name, state);
  EXPECT_TRUE(index) << name << " " << state;
  if (!index) return 0;
  Gatherer gatherer(checkpoint.map);
  const std::string bytes = gatherer.Whole(checkpoint.map.tensors[*index]);
  float value = 0;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

/// Parameters of a checkpoint without ZeRO: module order, and the optimizer's groups.
struct Plain {
  std::vector<std::pair<std::string, Shape>> module;
  std::vector<std::vector<std::string>> groups;
  bool names = false;  ///< param_names in the groups
  bool states = true;  ///< moments; first element 100 + index in module
  enum class Form { kTorch, kUnfused, kFused } form = Form::kTorch;
  /// Adds module entries before all others.
  std::function<void(PtFile&, Node*)> add = [](PtFile&, Node*) {};
  /// Last changes to a parameter's states. kTorch, kUnfused
  std::function<void(PtFile&, const Shape&, Node*)> change = [](PtFile&, const Shape&, Node*) {};
};

void WritePlain(const fs::path& folder, const Plain& plain) {
  PtFile file;
  Node* module = file.arena.Dict(true);
  plain.add(file, module);
  std::map<std::string, std::size_t> index;
  std::vector<std::vector<float>> flat;
  for (const auto& group : plain.groups) {
    flat.emplace_back();
    for (const std::string& name : group) {
      for (const auto& [other, shape] : plain.module) {
        if (other != name) continue;
        const std::vector<float> values = Ramp(10, shape);
        flat.back().insert(flat.back().end(), values.begin(), values.end());
      }
    }
  }
  std::vector<std::uint32_t> storages;
  storages.reserve(flat.size());
  for (const auto& values : flat) storages.push_back(file.Storage(values));
  for (std::size_t i = 0; i < plain.module.size(); ++i) {
    const auto& [name, shape] = plain.module[i];
    index[name] = i;
    pickle::Set(file.arena, module, name, file.Tensor(Ramp(static_cast<float>(i), shape), shape));
  }
  Node* state = file.arena.Dict();
  std::vector<const Node*> groups;
  std::vector<const Node*> masters;
  std::uint64_t id = 0;
  for (std::size_t g = 0; g < plain.groups.size(); ++g) {
    std::vector<std::uint64_t> ids;
    std::vector<const Node*> names;
    std::vector<const Node*> group_masters;
    std::uint64_t at = 0;
    std::vector<float> moments;
    for (const std::string& name : plain.groups[g]) {
      const std::size_t i = index.at(name);
      const Shape& shape = plain.module[i].second;
      const float first = 100 + static_cast<float>(i);
      names.push_back(file.arena.String(name));
      group_masters.push_back(file.Tensor(Ramp(200 + static_cast<float>(i), shape), shape));
      const std::vector<float> moment = Ramp(first, shape);
      moments.insert(moments.end(), moment.begin(), moment.end());
      if (plain.form == Plain::Form::kFused) {
        pickle::Set(file.arena, module, name, file.View(storages[g], shape, at));
        at += Elems(shape);
        continue;
      }
      Node* entry = file.Dict({{"step", file.arena.Int(3)}});
      if (plain.states) pickle::Set(file.arena, entry, "exp_avg", file.Tensor(moment, shape));
      plain.change(file, shape, entry);
      state->items.push_back(file.arena.Int(static_cast<std::int64_t>(id)));
      state->items.push_back(entry);
      ids.push_back(id++);
    }
    if (plain.form == Plain::Form::kFused) {
      state->items.push_back(file.arena.Int(static_cast<std::int64_t>(g)));
      state->items.push_back(
          file.Dict({{"step", file.arena.Int(3)}, {"exp_avg", file.Flat(moments)}}));
      ids.push_back(g);
      masters.push_back(file.Flat(flat[g]));
    } else {
      masters.push_back(file.arena.List(group_masters));
    }
    Node* options = file.Dict({{"lr", file.arena.Float(0.1)}, {"params", file.Counts(ids)}});
    if (plain.names) pickle::Set(file.arena, options, "param_names", file.arena.List(names));
    groups.push_back(options);
  }
  const Node* torch = file.Dict({{"state", state}, {"param_groups", file.arena.List(groups)}});
  const Node* optimizer = torch;
  if (plain.form != Plain::Form::kTorch) {
    const bool fused = plain.form == Plain::Form::kFused;
    optimizer = file.Dict({{"optimizer_state_dict", torch},
                           {fused ? "fp32_groups_flat" : "fp32_groups", file.arena.List(masters)}});
  }
  file.Write(folder / "mp_rank_00_model_states.pt",
             file.Dict({{"module", module},
                        {"optimizer", optimizer},
                        {"param_shapes", file.arena.None()},
                        {"global_steps", file.arena.Int(3)},
                        {"dp_world_size", file.arena.Int(2)},
                        {"mp_world_size", file.arena.Int(1)}}));
}

TEST_F(OtherLayouts, OneGroupFollowsTheModule) {
  WritePlain(folder_, {{{"a", {2, 3}}, {"b", {2, 3}}, {"c", {4}}}, {{"a", "b", "c"}}});
  const auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_EQ(TopologyOf(checkpoint->layout).zero, 0U);
  EXPECT_EQ(TopologyOf(checkpoint->layout).dp, 2U);
  for (const auto& [name, i] : {std::pair("a", 0.0F), std::pair("b", 1.0F), std::pair("c", 2.0F)}) {
    EXPECT_EQ(FirstOf(*checkpoint, name, "exp_avg"), 100 + i);
    EXPECT_EQ(FirstOf(*checkpoint, name, "fp32"), i);  // the weight is the master
  }
  EXPECT_EQ(checkpoint->params[0].scalars.at(0).value->integer, 3);
}

TEST_F(OtherLayouts, TheTypeOfTheModelIsThatOfTrainedWeights) {
  Plain plain;
  plain.module = {{"a", {2, 3}}, {"b", {4, 5}}};
  plain.groups = {{"a", "b"}};
  plain.names = true;
  plain.add = [](PtFile& file, Node* module) {
    pickle::Set(file.arena, module, "quantized.weight",
                file.View(file.Storage(Ramp(0, {5}), DType::kU8), {4, 5}));
  };
  WritePlain(folder_, plain);
  const auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_EQ(checkpoint->params.at(0).dtype, DType::kU8);
  EXPECT_EQ(checkpoint->layout.dtype, DType::kF32);
}

TEST_F(OtherLayouts, GroupsAreToldApartByShape) {
  WritePlain(folder_, {{{"a", {2, 3}}, {"x", {4}}, {"b", {2, 3}}, {"y", {4}}, {"z", {9}}},
                       {{"a", "b"}, {"x", "y"}}});
  const auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_EQ(FirstOf(*checkpoint, "b", "exp_avg"), 102);
  EXPECT_EQ(FirstOf(*checkpoint, "y", "exp_avg"), 103);
  EXPECT_TRUE(checkpoint->params[4].undecided);  // in no group
  EXPECT_EQ(checkpoint->groups[1].params, (std::vector<std::uint32_t>{1, 3}));
}

TEST_F(OtherLayouts, WhatShapesDoNotTellIsRefused) {
  // Two groups share a shape.
  WritePlain(folder_, {{{"a", {2, 3}}, {"b", {2, 3}}}, {{"a"}, {"b"}}});
  ExpectRefused(Errc::kUnsupported, {"[2, 3]", "groups 0 and 1"});
  // One of two equal parameters is frozen.
  WritePlain(folder_, {{{"a", {4}}, {"b", {4}}}, {{"b"}}});
  ExpectRefused(Errc::kUnsupported, {"more than one way"});
  // No states, so no shapes.
  WritePlain(folder_, {{{"a", {4}}, {"b", {2}}}, {{"b"}, {"a"}}, false, false});
  ExpectRefused(Errc::kUnsupported, {"no states"});
}

TEST_F(OtherLayouts, NamesInTheGroupsDecide) {
  WritePlain(folder_, {{{"a", {2, 3}}, {"b", {2, 3}}, {"c", {2, 3}}}, {{"c"}, {"a"}}, true});
  const auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_EQ(FirstOf(*checkpoint, "c", "exp_avg"), 102);
  EXPECT_EQ(FirstOf(*checkpoint, "a", "exp_avg"), 100);
  EXPECT_TRUE(checkpoint->params[1].undecided);
  EXPECT_EQ(checkpoint->groups[0].options->Find("param_names"), nullptr);
}

TEST_F(OtherLayouts, StatesOfAnotherShapeThanTheParameterAreBound) {
  Plain plain;
  plain.module = {{"a", {2, 3}}, {"b", {4, 5}}};
  plain.groups = {{"a", "b"}};
  plain.change = [](PtFile& file, const Shape& shape, Node* states) {
    pickle::Set(file.arena, states, "exp_avg_sq_row", file.Flat(Ramp(0, {shape[0]})));
  };
  WritePlain(folder_, plain);
  const auto factors = Read();
  ASSERT_TRUE(factors) << factors.error().message;
  EXPECT_EQ(FirstOf(*factors, "b", "exp_avg"), 101);
  ASSERT_EQ(factors->bound.size(), 1U);
  for (const char* word : {"exp_avg_sq_row", "Adafactor", "\"a\"", "[2]", "[2, 3]"}) {
    EXPECT_NE(factors->bound[0].find(word), std::string::npos) << factors->bound[0];
  }

  // Two moments in one come first, and the reader still identifies the parameters by their shapes.
  plain.states = false;
  plain.change = [](PtFile& file, const Shape& shape, Node* states) {
    const Shape stacked{2, shape[0], shape[1]};
    pickle::Set(file.arena, states, "state1", file.Tensor(Ramp(0, stacked), stacked));
    pickle::Set(file.arena, states, "state2", file.Tensor(Ramp(7, shape), shape));
  };
  plain.groups = {{"b"}, {"a"}};
  WritePlain(folder_, plain);
  const auto stacked = Read();
  ASSERT_TRUE(stacked) << stacked.error().message;
  EXPECT_EQ(FirstOf(*stacked, "a", "state2"), 7);
  ASSERT_EQ(stacked->bound.size(), 1U);
  EXPECT_NE(stacked->bound[0].find("[2, 4, 5]"), std::string::npos) << stacked->bound[0];
}

TEST_F(OtherLayouts, FactorsThatDoNotTellTheShapeAreNamed) {
  Plain plain;
  plain.module = {{"a", {2, 3}}, {"b", {4, 5}}};
  plain.groups = {{"a"}, {"b"}};
  plain.states = false;
  plain.change = [](PtFile& file, const Shape& shape, Node* states) {
    pickle::Set(file.arena, states, "row_var", file.Tensor(Ramp(0, {shape[0]}), {shape[0], 1}));
  };
  WritePlain(folder_, plain);
  ExpectRefused(Errc::kUnsupported, {"row_var", "torch.optim.Adafactor"});
}

TEST_F(OtherLayouts, UnfusedMastersAreSeparate) {
  WritePlain(folder_,
             {{{"a", {2, 3}}, {"b", {5}}}, {{"a"}, {"b"}}, false, true, Plain::Form::kUnfused});
  const auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_EQ(FirstOf(*checkpoint, "b", "fp32"), 201);
  EXPECT_EQ(FirstOf(*checkpoint, "b", "weight"), 1);
  EXPECT_EQ(FirstOf(*checkpoint, "b", "exp_avg"), 101);
}

TEST_F(OtherLayouts, FusedGroupsAreFoundByThePackingOfTheWeights) {
  WritePlain(folder_, {{{"a", {2, 3}}, {"b", {5}}, {"c", {2, 3}}, {"d", {3}}},
                       {{"c", "a"}, {"d", "b"}},
                       false,
                       true,
                       Plain::Form::kFused});
  const auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_EQ(checkpoint->groups[0].params, (std::vector<std::uint32_t>{2, 0}));
  EXPECT_EQ(checkpoint->groups[1].params, (std::vector<std::uint32_t>{3, 1}));
  for (const auto& [name, i] : {std::pair("a", 0.0F), std::pair("b", 1.0F), std::pair("c", 2.0F)}) {
    EXPECT_EQ(FirstOf(*checkpoint, name, "exp_avg"), 100 + i);
  }
}

/// Stage 1 on one ZeRO rank of a pipeline of two stages; layers 0 and 3 are tied.
struct Pipe {
  std::vector<std::vector<std::pair<std::string, Shape>>> stages{
      {{"tied_modules.embed.weight", {4, 2}}, {"1.weight", {3}}},
      {{"2.weight", {3}}, {"tied_modules.embed.weight", {4, 2}}}};
  bool megatron = false;  ///< client state has Megatron's arguments
  std::vector<std::pair<int, std::vector<std::string>>> layers{{0, {"tied_modules.embed.weight"}},
                                                               {1, {"1.weight"}},
                                                               {2, {"2.weight"}},
                                                               {3, {"tied_modules.embed.weight"}}};
};

void WritePipe(const fs::path& folder, const Pipe& pipe) {
  std::map<std::string, std::pair<float, Shape>> values;
  for (std::size_t stage = 0; stage < pipe.stages.size(); ++stage) {
    PtFile model;
    PtFile shard;
    Node* shapes = model.arena.Dict(true);
    std::vector<float> flat;
    for (const auto& [name, shape] : pipe.stages[stage]) {
      pickle::Set(model.arena, shapes, name, model.arena.SizeOf(shape));
      const auto at =
          values.emplace(name, std::pair(static_cast<float>(values.size() * 100), shape));
      const std::vector<float> ramp = Ramp(at.first->second.first, shape);
      flat.insert(flat.end(), ramp.begin(), ramp.end());
    }
    const auto mp = static_cast<int>(stage);
    const std::string rank = "mp_rank_0" + std::to_string(mp);
    Node* args = model.arena.Dict();
    pickle::Set(model.arena, args, pipe.megatron ? "tensor_model_parallel_size" : "another",
                model.arena.Int(1));
    const auto stages = static_cast<std::int64_t>(pipe.stages.size());
    model.Write(folder / (rank + "_model_states.pt"),
                model.Dict({{"module", model.arena.None()},
                            {"buffer_names", model.arena.List({})},
                            {"param_shapes", model.arena.List({shapes})},
                            {"args", model.arena.Object("argparse.Namespace", args)},
                            {"dp_world_size", model.arena.Int(1)},
                            {"mp_world_size", model.arena.Int(stages)}}));
    const Node* options =
        shard.Dict({{"lr", shard.arena.Float(0.1)}, {"params", shard.Counts({0})}});
    shard.Write(
        folder / ("zero_pp_rank_0_" + rank + "_optim_states.pt"),
        shard.Dict(
            {{"optimizer_state_dict",
              shard.Dict({{"loss_scaler", shard.arena.Float(1)},
                          {"zero_stage", shard.arena.Int(1)},
                          {"base_optimizer_state",
                           shard.Dict({{"state", shard.arena.Dict()},
                                       {"param_groups", shard.arena.List({options})}})},
                          {"single_partition_of_fp32_groups", shard.arena.List({shard.Flat(flat)})},
                          {"partition_count", shard.Counts({1})}})}}));
  }
  for (const auto& [layer, names] : pipe.layers) {
    PtFile file;
    Node* dict = file.arena.Dict(true);
    for (const std::string& name : names) {
      const auto& [first, shape] = values.at(name);
      pickle::Set(file.arena, dict, name.substr(name.rfind('.') + 1),
                  file.Tensor(Ramp(first, shape), shape));
    }
    file.Write(folder / ("layer_0" + std::to_string(layer) + "-model_states.pt"), dict);
  }
}

TEST_F(OtherLayouts, TiedLayersOfAPipelineAreOneParameter) {
  WritePipe(folder_, {});
  const auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_EQ(TopologyOf(checkpoint->layout).pp, 2U);
  EXPECT_EQ(TopologyOf(checkpoint->layout).stages,
            (std::vector<std::vector<std::uint32_t>>{{0, 1}, {2, 3}}));
  ASSERT_EQ(checkpoint->params.size(), 3U);
  const Param& tied = checkpoint->params[0];
  EXPECT_EQ(tied.name, "tied_modules.embed.weight");
  EXPECT_EQ(tied.tied_layers, (std::vector<std::uint32_t>{0, 3}));
  EXPECT_EQ(tied.layer, 0U);
  EXPECT_EQ(checkpoint->groups[0].params.size(), 3U);
  const layout::TensorIndex index(checkpoint->map);
  const auto& master = checkpoint->map.tensors[*index.Find(tied.name, "fp32")];
  ASSERT_EQ(master.fragments.size(), 2U);
  EXPECT_EQ(master.fragments[0].role, layout::Role::kOwner);
  EXPECT_EQ(master.fragments[1].role, layout::Role::kReplica);
  EXPECT_EQ(FirstOf(*checkpoint, "2.weight", "fp32"), FirstOf(*checkpoint, "2.weight", "weight"));
}

TEST_F(OtherLayouts, ATiedLayerWithoutAFileFollowsItsStage) {
  Pipe pipe;
  pipe.layers.pop_back();
  WritePipe(folder_, pipe);
  const auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_EQ(checkpoint->params[0].tied_layers, (std::vector<std::uint32_t>{0, 3}));
  EXPECT_EQ(checkpoint->warnings.size(), 1U);
}

TEST_F(OtherLayouts, MegatronsOutputLayerIsTiedInASingleStageToo) {
  Pipe pipe;
  pipe.stages = {{{"tied_modules.embed.weight", {4, 2}}, {"1.weight", {3}}}};
  pipe.layers.resize(2);
  for (const bool megatron : {false, true}) {
    pipe.megatron = megatron;
    WritePipe(folder_, pipe);
    const auto checkpoint = Read();
    ASSERT_TRUE(checkpoint) << checkpoint.error().message;
    const std::vector<std::uint32_t> uses =
        megatron ? std::vector<std::uint32_t>{0, 2} : std::vector<std::uint32_t>{0};
    EXPECT_EQ(checkpoint->params[0].tied_layers, uses);
    EXPECT_TRUE(checkpoint->warnings.empty());
  }
}

TEST_F(OtherLayouts, AMissingLayerIsNamed) {
  Pipe pipe;
  pipe.layers.erase(pipe.layers.begin() + 2);
  WritePipe(folder_, pipe);
  ExpectRefused(Errc::kNotFound, {"layer_02-model_states.pt"});
}

TEST_F(OtherLayouts, AModuleThatTwoTiedKeysFitIsRefused) {
  Pipe pipe;
  pipe.stages[0].push_back({"tied_modules.other.weight", {4, 2}});
  WritePipe(folder_, pipe);
  ExpectRefused(Errc::kUnsupported, {"tied_modules.embed", "tied_modules.other"});
}

TEST_F(OtherLayouts, AMissingStageIsNamed) {
  WritePipe(folder_, {});
  fs::remove(folder_ / "mp_rank_01_model_states.pt");
  fs::remove(folder_ / "zero_pp_rank_0_mp_rank_01_optim_states.pt");
  ExpectRefused(Errc::kNotFound,
                {"mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt"});
}

/// Removing a real checkpoint's expert file makes the error name it.
TEST_F(OtherLayouts, AMissingExpertIsNamed) {
  const std::string expert = "layer_1_expert_2_mp_rank_00_model_states.pt";
  for (const auto& entry :
       fs::directory_iterator(OwnCheckpoints() / "moe4_ep2_zero1_w2" / "ckpt" / "global_step4")) {
    if (entry.path().filename() != expert) fs::copy(entry.path(), folder_);
  }
  ExpectRefused(Errc::kNotFound, {"1 file is missing", expert});
}

/// A real checkpoint with one expert file in which the weight is transposed against its masters.
TEST_F(OtherLayouts, AnExpertOfAnotherShapeThanItsMastersIsNamed) {
  fs::copy(OwnCheckpoints() / "moe4_ep2_zero1_w2" / "ckpt" / "global_step4", folder_);
  PtFile file;
  const std::string expert = "blocks.0.moe.deepspeed_moe.experts.deepspeed_experts.2.";
  file.Write(folder_ / "layer_0_expert_2_mp_rank_00_model_states.pt",
             file.Dict({{expert + "0.weight", file.Tensor(Ramp(0, {8, 11}), {8, 11})},
                        {expert + "0.bias", file.Flat(Ramp(0, {11}))},
                        {expert + "2.weight", file.Tensor(Ramp(0, {8, 11}), {8, 11})},
                        {expert + "2.bias", file.Flat(Ramp(0, {8}))}},
                       true));
  ExpectRefused(Errc::kBadInput, {"deepspeed_experts.0.0.weight", "[11, 8]", "[8, 11]"});
}

TEST_F(OtherLayouts, Stage3SharesOfAnotherLengthAreRefused) {
  PtFile model;
  const Node* shapes =
      model.Dict({{"a", model.arena.SizeOf({5})}, {"b", model.arena.SizeOf({2, 2})}}, true);
  const Node* module = model.Dict({{"a", model.Flat({})}, {"b", model.Flat({})}}, true);
  Node* root = model.Dict({{"module", module},
                           {"param_shapes", model.arena.List({shapes})},
                           {"dp_world_size", model.arena.Int(4)},
                           {"mp_world_size", model.arena.Int(1)}});
  const auto write = [&](std::uint64_t rank, std::vector<float> share) {
    const std::string name = "zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_";
    model.Write(folder_ / (name + "model_states.pt"), root);
    PtFile shard;
    const Node* options = shard.Dict({{"lr", shard.arena.Float(1)}, {"params", shard.Counts({0})}});
    shard.Write(
        folder_ / (name + "optim_states.pt"),
        shard.Dict({{"optimizer_state_dict",
                     shard.Dict({{"zero_stage", shard.arena.Int(3)},
                                 {"partition_count", shard.arena.Int(4)},
                                 {"optimizer_state_dict",
                                  shard.Dict({{"state", shard.arena.Dict()},
                                              {"param_groups", shard.arena.List({options})}})},
                                 {"fp32_flat_groups",
                                  shard.arena.List({shard.Flat(std::move(share))})}})}}));
  };
  // a: 2, 2, 1, 0 elements and padding; b: one each.
  write(0, {0, 1, 100});
  write(1, {2, 3, 101});
  write(2, {4, -1, 102});
  write(3, {-1, -1, 103});
  const auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  Gatherer gatherer(checkpoint->map);
  for (const layout::LogicalTensor& tensor : checkpoint->map.tensors) {
    const std::vector<float> want = Ramp(tensor.name == "a" ? 0.0F : 100.0F, tensor.shape);
    const std::string have = gatherer.Whole(tensor);
    EXPECT_EQ(std::memcmp(have.data(), want.data(), have.size()), 0) << tensor.name;
  }
  Node* zero = model.Dict({{"mics_shard_size", model.arena.Int(2)}});
  pickle::Set(model.arena, root, "ds_config", model.Dict({{"zero_optimization", zero}}));
  write(0, {0, 1, 100});
  ExpectRefused(Errc::kUnsupported, {"MiCS", "2 of 4 ranks"});
  pickle::Set(model.arena, zero, "mics_shard_size", model.arena.Int(4));
  write(0, {0, 1, 100});
  EXPECT_TRUE(Read());

  write(3, {-1, -1});
  ExpectRefused(Errc::kBadInput, {"zero_pp_rank_3_mp_rank_00_optim_states.pt", "3", "2"});
  write(3, {});
  ExpectRefused(Errc::kUnsupported, {"NVMe"});
}

}  // namespace
}  // namespace shardwright::checkpoints
