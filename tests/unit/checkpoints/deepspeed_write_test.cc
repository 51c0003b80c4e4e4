// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "write_model.h"
#include "written_deepspeed.h"

namespace shardwright::checkpoints::test {
namespace {

/// Emb 11x6, l1 7x6, l2 6x7 and their biases; one group, or weights and biases apart.
void AddTwoLayers(Model& model, bool two_groups) {
  const int biases = two_groups ? 1 : 0;
  model.Add("emb.weight", {11, 6});
  model.Add("l1.weight", {7, 6});
  model.Add("l1.bias", {7}, biases);
  model.Add("l2.weight", {6, 7});
  model.Add("l2.bias", {6}, biases);
}

// docs/formats/deepspeed.md, example A.
TEST(DeepSpeedWriteTest, TwoGroupsOnTwoRanks) {
  Model model;
  AddTwoLayers(model, true);
  const Rendered files = Write(model, model.source(), Zero(2, 2));
  const auto first = files.Parse(Shard(0));
  const auto second = files.Parse(Shard(1));
  EXPECT_EQ(Mapping(Inner(first), 0), (Texts{"emb.weight 0 66", "l1.weight 66 10"}));
  EXPECT_EQ(Mapping(Inner(second), 0), (Texts{"l1.weight 0 32", "l2.weight 32 42"}));
  EXPECT_EQ(Mapping(Inner(first), 1), (Texts{"l1.bias 0 7", "l2.bias 7 1"}));
  EXPECT_EQ(Mapping(Inner(second), 1), (Texts{"l2.bias 0 5"}));
  EXPECT_EQ(Ints(Inner(first)->Find("group_paddings")), (Numbers{0, 0}));
  EXPECT_EQ(Ints(Inner(second)->Find("group_paddings")), (Numbers{2, 3}));
  EXPECT_EQ(Ints(Inner(second)->Find("partition_count")), (Numbers{2, 2}));
  const Node* masters = Inner(second)->Find("single_partition_of_fp32_groups");
  EXPECT_EQ(masters->items[0]->tensor->shape, Shape{74});
  EXPECT_EQ(masters->items[1]->tensor->shape, Shape{5});
  const Node* state = StateOf(Inner(second)->Find("base_optimizer_state")->Find("state"), 1);
  EXPECT_EQ(Keys(state), (Texts{"step", "exp_avg", "exp_avg_sq"}));
  EXPECT_EQ(state->Find("exp_avg")->tensor->shape, Shape{8});
  EXPECT_EQ(files.Floats(Shard(1), second, state->Find("step")), std::vector<float>{4.0F});
  const auto moments = files.Floats(Shard(1), second, state->Find("exp_avg"));
  const std::size_t bias = model.TensorOf("l2.bias", "exp_avg");
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(moments[i], Model::ValueOf(bias, i + 1));
  for (std::size_t i = 5; i < 8; ++i) EXPECT_EQ(moments[i], 0.0F);
}

// Example B: the flat order is permuted, and the mappings record the true order.
TEST(DeepSpeedWriteTest, RoundRobin) {
  Model model;
  AddTwoLayers(model, false);
  Topology to = Zero(2, 2);
  to.round_robin = true;
  const Rendered files = Write(model, model.source(), to);
  EXPECT_EQ(Mapping(Inner(files.Parse(Shard(0))), 0),
            (Texts{"emb.weight 0 66", "l1.bias 66 7", "l2.bias 73 6", "l1.weight 79 3"}));
  EXPECT_EQ(Mapping(Inner(files.Parse(Shard(1))), 0), (Texts{"l1.weight 0 39", "l2.weight 39 42"}));
  const auto document = files.Parse(kTag + "mp_rank_00_model_states.pt");
  EXPECT_EQ(Keys(document.root->Find("param_shapes")->items[0]),
            (Texts{"emb.weight", "l1.bias", "l2.bias", "l1.weight", "l2.weight"}));
}

// Example C: padding may reach into more ranks than the last.
TEST(DeepSpeedWriteTest, PaddingOnSeveralRanks) {
  Model model;
  model.Add("a", {75}, 0);
  model.Add("b", {10}, 1);
  model.Change([](auto& topology) { topology.dtype = DType::kBF16; });
  Topology to = Zero(1, 4);
  to.dtype = DType::kBF16;
  for (Param& param : model.source().params) param.dtype = DType::kBF16;
  const Rendered files = Write(model, model.source(), to);
  const std::vector<Numbers> paddings = {{0, 0}, {0, 0}, {0, 2}, {5, 4}};
  for (std::size_t rank = 0; rank < 4; ++rank) {
    const auto document = files.Parse(Shard(rank, "bf16_"));
    EXPECT_EQ(Ints(Inner(document)->Find("group_paddings")), paddings[rank]);
    const Node* masters = Inner(document)->Find("single_partition_of_fp32_groups");
    EXPECT_EQ(masters->items[1]->tensor->shape[0],
              static_cast<std::uint64_t>(4 - paddings[rank][1]));
  }
}

// Example D: sub-groups of ZeRO-3.
TEST(DeepSpeedWriteTest, SubGroups) {
  Model model;
  AddTwoLayers(model, true);
  Topology to = Zero(3, 2);
  to.sub_group = 50;
  const Rendered files = Write(model, model.source(), to);
  const auto document = files.Parse(Shard(1));
  const Node* inner = Inner(document);
  Numbers lengths;
  for (const Node* flat : inner->Find("fp32_flat_groups")->items) {
    lengths.push_back(static_cast<std::int64_t>(flat->tensor->shape.at(0)));
  }
  EXPECT_EQ(lengths, (Numbers{54, 21, 7}));
  const Node* groups = inner->Find("optimizer_state_dict")->Find("param_groups");
  EXPECT_EQ(Ints(groups->items[0]->Find("params")), (Numbers{0, 1}));
  EXPECT_EQ(Ints(groups->items[1]->Find("params")), (Numbers{2}));
  EXPECT_EQ(inner->Find("partition_count")->integer, 2);
  const auto model_file = files.Parse(kTag + "zero_pp_rank_1_mp_rank_00_model_states.pt");
  const Node* shapes = model_file.root->Find("param_shapes");
  ASSERT_EQ(shapes->items.size(), 3U);
  EXPECT_EQ(Keys(shapes->items[0]), (Texts{"emb.weight", "l1.weight"}));
  EXPECT_EQ(model_file.root->Find("module")->Find("l1.bias")->tensor->shape, Shape{0});
  // Rank 1 holds the second half of every parameter: 33 of emb, 21 of l1.
  const auto values = files.Floats(Shard(1), document, inner->Find("fp32_flat_groups")->items[0]);
  EXPECT_EQ(values[0], Model::ValueOf(model.TensorOf("emb.weight", "fp32"), 33));
  EXPECT_EQ(values[33], Model::ValueOf(model.TensorOf("l1.weight", "fp32"), 21));
}

TEST(DeepSpeedWriteTest, FrozenTiedAndBuffers) {
  Model model;
  model.Add("emb.weight", {11, 6});
  model.Add("scale", {3}, -2);
  model.Add("proj.weight", {5, 5}, -1);
  model.AddAlias("head.weight", "emb.weight");
  model.AddAlias("head.scale", "scale");
  const Rendered two = Write(model, model.source(), Zero(2, 2));
  const auto document = two.Parse(kTag + "mp_rank_00_model_states.pt");
  const Node* module = document.root->Find("module");
  EXPECT_EQ(Keys(module),
            (Texts{"emb.weight", "scale", "proj.weight", "head.weight", "head.scale"}));
  EXPECT_EQ(module->Find("head.scale")->tensor->storage, module->Find("scale")->tensor->storage);
  EXPECT_EQ(module->Find("head.weight")->tensor->storage,
            module->Find("emb.weight")->tensor->storage);
  const Node* shared = document.root->Find("shared_params");
  EXPECT_EQ(shared->Find("head.weight")->text, "emb.weight");
  EXPECT_EQ(shared->entry_count(), 1U) << "buffers are no parameters";
  EXPECT_EQ(Keys(document.root->Find("frozen_param_shapes")), (Texts{"proj.weight"}));
  EXPECT_EQ(document.root->Find("frozen_param_fragments")->Find("proj.weight")->tensor->storage,
            module->Find("proj.weight")->tensor->storage);
  EXPECT_EQ(document.root->Find("buffer_names")->items.at(0)->text, "scale");

  const Rendered three = Write(model, model.source(), Zero(3, 4));
  const std::string last = kTag + "zero_pp_rank_3_mp_rank_00_model_states.pt";
  const auto rank3 = three.Parse(last);
  const Node* share = rank3.root->Find("frozen_param_fragments")->Find("proj.weight");
  EXPECT_EQ(share->tensor->shape, Shape{7});
  const auto values = three.Floats(last, rank3, share);
  const std::size_t proj = model.TensorOf("proj.weight", "frozen");
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(values[i], Model::ValueOf(proj, 21 + i));
  for (std::size_t i = 4; i < 7; ++i) EXPECT_EQ(values[i], 0.0F);
  EXPECT_EQ(rank3.root->Find("module")->Find("scale")->tensor->shape, Shape{3});
  EXPECT_EQ(rank3.root->Find("shared_params")->entry_count(), 0U);

  const Rendered one = Write(model, model.source(), Zero(1, 2));
  const auto stage1 = one.Parse(kTag + "mp_rank_00_model_states.pt");
  EXPECT_TRUE(stage1.root->Find("frozen_param_shapes")->is_none());
}

TEST(DeepSpeedWriteTest, StageZeroHoldsStatesByParameter) {
  Model model;
  AddTwoLayers(model, true);
  const Rendered files = Write(model, model.source(), Zero(0, 4));
  EXPECT_EQ(files.paths(), (Texts{kTag + "mp_rank_00_model_states.pt", "latest"}));
  EXPECT_EQ(files.bytes("latest"), "global_step4");
  const auto document = files.Parse(kTag + "mp_rank_00_model_states.pt");
  const Node* optimizer = document.root->Find("optimizer");
  EXPECT_EQ(Ints(optimizer->Find("param_groups")->items[1]->Find("params")), (Numbers{3, 4}));
  EXPECT_EQ(StateOf(optimizer->Find("state"), 3)->Find("exp_avg")->tensor->shape, Shape{7});
  EXPECT_TRUE(document.root->Find("param_shapes")->is_none());
  EXPECT_EQ(document.root->Find("dp_world_size")->integer, 4);
  EXPECT_EQ(document.root->Find("note")->text, "kept");
  EXPECT_EQ(document.root->Find("ds_config")->Find("zero_optimization")->Find("stage")->integer, 0);
}

TEST(DeepSpeedWriteTest, StageZeroInLowPrecisionKeepsMasters) {
  Model model;
  AddTwoLayers(model, true);
  Topology to = Zero(0, 1);
  to.dtype = DType::kBF16;
  const Rendered files = Write(model, model.source(), to);
  const auto document = files.Parse(kTag + "mp_rank_00_model_states.pt");
  const Node* optimizer = document.root->Find("optimizer");
  EXPECT_EQ(Keys(optimizer), (Texts{"dynamic_loss_scale", "cur_scale", "cur_iter",
                                    "optimizer_state_dict", "fp32_groups"}));
  const Node* master = optimizer->Find("fp32_groups")->items[1]->items[0];
  EXPECT_EQ(master->tensor->dtype, DType::kF32);
  EXPECT_EQ(document.root->Find("module")->Find("l1.bias")->tensor->dtype, DType::kBF16);

  // FusedAdam trains in flat groups without padding.
  for (Group& group : model.source().groups) {
    Node* options = CopyDict(model.arena(), group.options);
    Set(model.arena(), options, "bias_correction", model.arena().Bool(true));
    group.options = options;
  }
  const Rendered fused = Write(model, model.source(), to);
  const auto flat = fused.Parse(kTag + "mp_rank_00_model_states.pt");
  const Node* groups = flat.root->Find("optimizer")->Find("fp32_groups_flat");
  EXPECT_EQ(groups->items[1]->tensor->shape, Shape{13});
}

TEST(DeepSpeedWriteTest, DynamicLossScaleOnlyInHalfPrecision) {
  Model model;
  AddTwoLayers(model, true);
  const Rendered plain = Write(model, model.source(), Zero(1, 1));
  const auto shard = plain.Parse(Shard(0));
  EXPECT_EQ(Inner(shard)->Find("loss_scaler")->callable->text,
            "deepspeed.runtime.fp16.loss_scaler.LossScaler");
  Topology to = Zero(1, 1);
  to.dtype = DType::kF16;
  const Rendered half = Write(model, model.source(), to);
  const auto scaled = half.Parse(Shard(0));
  const Node* scaler = Inner(scaled)->Find("loss_scaler");
  EXPECT_EQ(scaler->callable->text, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler");
  EXPECT_EQ(scaler->state->Find("cur_scale")->real, 65536.0);
  EXPECT_EQ(Inner(scaled)->Find("dynamic_loss_scale")->integer, 1);
}

TEST(DeepSpeedWriteTest, TensorParallelCuts) {
  Model model;
  model.Add("emb.weight", {11, 6});
  model.Add("up.weight", {8, 6}).rule.split = layout::Split::kDim;
  Param& down = model.Add("down.weight", {6, 8});
  down.rule.split = layout::Split::kDim;
  down.rule.dim = 1;
  model.Add("norm", {6}).rule.split = layout::Split::kAverage;
  Topology to = Zero(1, 1);
  to.tp = 2;
  const Rendered files = Write(model, model.source(), to);
  const std::string path = kTag + "zero_pp_rank_0_mp_rank_01_optim_states.pt";
  const auto document = files.Parse(path);
  EXPECT_EQ(Mapping(Inner(document), 0),
            (Texts{"emb.weight 0 66", "up.weight 66 24", "down.weight 90 24", "norm 114 6"}));
  const auto values = files.Floats(
      path, document, Inner(document)->Find("single_partition_of_fp32_groups")->items[0]);
  EXPECT_EQ(values[66], Model::ValueOf(model.TensorOf("up.weight", "fp32"), 24));
  EXPECT_EQ(values[94], Model::ValueOf(model.TensorOf("down.weight", "fp32"), 12));
  const auto root = files.Parse(kTag + "mp_rank_01_model_states.pt");
  EXPECT_EQ(root.root->Find("mp_world_size")->integer, 2);
  EXPECT_EQ(root.root->Find("checkpoint_parallel_dimensions")->Find("tp_degree")->integer, 2);
  EXPECT_NE(root.root->Find("universal_checkpoint_info"), nullptr);
}

// Three matrices in one, cut along an inner dimension: a rank's shard is a matrix as well.
TEST(DeepSpeedWriteTest, ShardsOfAViewHaveTheParametersOwnDimensions) {
  layout::SplitRule experts;
  experts.split = layout::Split::kSub;
  experts.view = {3, 4, 5};
  experts.dim = 1;
  experts.sub_sizes = {4};
  Model model;
  model.Add("experts", {12, 5}).rule = experts;
  model.Add("frozen", {12, 5}, -1).rule = experts;
  model.Add("buffer", {12, 5}, -2).rule = experts;
  const Shape shard{6, 5};
  for (const std::uint64_t stage : {0U, 1U, 2U, 3U}) {
    Topology to = Zero(stage, 1);
    to.tp = 2;
    const Rendered files = Write(model, model.source(), to);
    const bool stage3 = stage == 3;
    const auto root = files.Parse(kTag + (stage3 ? "zero_pp_rank_0_mp_rank_01_model_states.pt"
                                                 : "mp_rank_01_model_states.pt"));
    const Node* module = root.root->Find("module");
    EXPECT_EQ(module->Find("buffer")->tensor->shape, shard) << stage;
    if (!stage3) {
      for (const char* name : {"experts", "frozen"}) {
        EXPECT_EQ(module->Find(name)->tensor->shape, shard) << name << " " << stage;
      }
    }
    if (stage > 0) {
      const Node* shapes = root.root->Find("param_shapes")->items[0]->Find("experts");
      EXPECT_EQ(pickle::AsShape(shapes).value(), shard) << stage;
    }
    if (stage > 1) {
      const Node* shapes = root.root->Find("frozen_param_shapes")->Find("frozen");
      EXPECT_EQ(pickle::AsShape(shapes).value(), shard) << stage;
    }
    if (stage == 0) {
      const Node* state = root.root->Find("optimizer")->Find("state");
      ASSERT_NE(state, nullptr);
      EXPECT_EQ(state->value(0)->Find("exp_avg")->tensor->shape, shard);
    }
  }
}

TEST(DeepSpeedWriteTest, AViewThatMixesDimensionsIsRefused) {
  Model model;
  layout::SplitRule& rule = model.Add("mixed", {6, 4}).rule;
  rule.split = layout::Split::kSub;
  rule.view = {4, 6};
  rule.sub_sizes = {4};
  Topology to = Zero(1, 1);
  to.tp = 2;
  const auto written = WriteDeepSpeed(model.source(), to);
  ASSERT_FALSE(written.has_value());
  EXPECT_EQ(written.error().code, Errc::kUnsupported);
  EXPECT_NE(written.error().message.find("\"mixed\""), std::string::npos);
}

TEST(DeepSpeedWriteTest, PipelineStagesRepeatTiedParameters) {
  Model model;
  Param& tied = model.Add("tied_modules.emb.weight", {11, 6});
  tied.layer = 0;
  tied.tied_layers = {0, 3};
  model.Add("1.weight", {7, 6}).layer = 1;
  model.Add("2.weight", {6, 7}).layer = 2;
  model.Change([](auto& topology) { topology.pipeline = true; });
  model.Change([](auto& topology) { topology.stages = {{0, 1, 2, 3}}; });
  Topology to = Zero(1, 2);
  to.pp = 2;
  to.pipeline = true;
  to.stages = {{0, 1}, {2, 3}};
  const Rendered files = Write(model, model.source(), to);
  EXPECT_EQ(Mapping(Inner(files.Parse(kTag + "zero_pp_rank_0_mp_rank_00_optim_states.pt")), 0),
            (Texts{"tied_modules.emb.weight 0 54"}));
  EXPECT_EQ(Mapping(Inner(files.Parse(kTag + "zero_pp_rank_1_mp_rank_01_optim_states.pt")), 0),
            (Texts{"tied_modules.emb.weight 0 12", "2.weight 12 42"}));
  for (const char* layer : {"layer_00", "layer_03"}) {
    const auto document = files.Parse(kTag + layer + "-model_states.pt");
    EXPECT_EQ(Keys(document.root), (Texts{"weight"}));
  }
  const auto root = files.Parse(kTag + "mp_rank_01_model_states.pt");
  EXPECT_TRUE(root.root->Find("module")->is_none());
  EXPECT_EQ(Keys(root.root->Find("param_shapes")->items[0]),
            (Texts{"tied_modules.emb.weight", "2.weight"}));
}

// Megatron-DeepSpeed refuses a checkpoint if its arguments have other sizes than the job.
TEST(DeepSpeedWriteTest, MegatronsArgumentsHaveTheTargetsSizes) {
  Model model;
  Param& words = model.Add("word_embeddings.weight", {130, 2});
  words.rule.split = layout::Split::kDim;
  words.rule.padded = true;
  words.rule.granule = {128};
  pickle::Arena& arena = model.arena();
  Node* args = arena.Dict();
  for (const char* key : {"tensor_model_parallel_size", "pipeline_model_parallel_size",
                          "padded_vocab_size", "world_size", "hidden_size"}) {
    Set(arena, args, key, arena.Int(7));
  }
  Set(arena, model.model(), "args", arena.Object("argparse.Namespace", args));
  Topology to = Zero(1, 3);
  to.tp = 4;
  const auto file = Write(model, model.source(), to).Parse(kTag + "mp_rank_03_model_states.pt");
  const Node* written = file.root->Find("args");
  ASSERT_NE(written, nullptr);
  ASSERT_NE(written->state, nullptr);
  EXPECT_EQ(written->callable->text, "argparse.Namespace");
  const std::pair<const char*, std::int64_t> sizes[] = {{"tensor_model_parallel_size", 4},
                                                        {"pipeline_model_parallel_size", 1},
                                                        {"padded_vocab_size", 512},
                                                        {"world_size", 12},
                                                        {"hidden_size", 7}};
  for (const auto& [key, size] : sizes) EXPECT_EQ(written->state->Find(key)->integer, size) << key;
  EXPECT_EQ(written->state->Find("data_parallel_size"), nullptr);
}

TEST(DeepSpeedWriteTest, ClientTensorsArePassedThrough) {
  Model model;
  AddTwoLayers(model, false);
  Passed& passed = model.state().model_states[0];
  torch_pt::Document::StorageRef bytes;
  bytes.bytes = 16;
  passed.document.storages.push_back(bytes);
  passed.members = {2};
  pickle::Tensor tensor;
  tensor.dtype = DType::kU8;
  tensor.offset = 4;
  tensor.shape = {8};
  tensor.strides = {1};
  Node* states = model.arena().Dict();
  Set(model.arena(), states, "torch", model.arena().TensorOf(std::move(tensor)));
  Set(model.arena(), model.model(), "rng", model.arena().List({states, states}));
  const Rendered files = Write(model, model.source(), Zero(1, 1));
  const auto document = files.Parse(kTag + "mp_rank_00_model_states.pt");
  const Node* rng = document.root->Find("rng");
  ASSERT_NE(rng, nullptr);
  EXPECT_EQ(rng->items.at(0), rng->items.at(1));
  const Node* copy = rng->items[0]->Find("torch");
  EXPECT_EQ(copy->tensor->offset, 4U);
  const auto& storage = document.storages[copy->tensor->storage];
  EXPECT_EQ(storage.bytes, 16U);
  EXPECT_EQ(files.bytes(kTag + "mp_rank_00_model_states.pt").substr(storage.offset, 16),
            std::string(16, 'c'));
}

TEST(DeepSpeedWriteTest, StepsThatDisagreeCannotShareAGroup) {
  Model model;
  AddTwoLayers(model, false);
  model.source().params[1].scalars[0].bytes = std::string(4, '\0');
  const auto target = WriteDeepSpeed(model.source(), Zero(1, 2));
  ASSERT_FALSE(target.has_value());
  EXPECT_EQ(target.error().code, Errc::kUnsupported);
  EXPECT_NE(target.error().message.find("\"emb.weight\" and \"l1.weight\""), std::string::npos);
  EXPECT_TRUE(WriteDeepSpeed(model.source(), Zero(0, 2)).has_value());
}

TEST(DeepSpeedWriteTest, StatesThatAStageWantsInAnotherFormAreRefusedThere) {
  struct Row {
    const char* state;
    const char* option;
    const char* optimizer;
    std::vector<std::uint64_t> refused;
  };
  const Row rows[] = {{"momentum_buffer", "use_muon", "Muon", {1, 2}},
                      {"p0", "growth_rate", "Prodigy", {0}}};
  for (const Row& row : rows) {
    Model model;
    AddTwoLayers(model, false);
    model.source().states.emplace_back(row.state);
    pickle::Node* options = pickle::CopyDict(model.arena(), model.source().groups[0].options);
    pickle::Set(model.arena(), options, row.option, model.arena().Float(1.0));
    model.source().groups[0].options = options;
    for (const std::uint64_t stage : {0U, 1U, 2U, 3U}) {
      const auto target = WriteDeepSpeed(model.source(), Zero(stage, 2));
      const bool refused = std::count(row.refused.begin(), row.refused.end(), stage) > 0;
      EXPECT_EQ(target.has_value(), !refused) << row.state << " " << stage;
      if (target) continue;
      EXPECT_EQ(target.error().code, Errc::kUnsupported);
      for (const char* word : {row.state, row.optimizer}) {
        EXPECT_NE(target.error().message.find(word), std::string::npos) << target.error().message;
      }
    }
  }
}

TEST(DeepSpeedWriteTest, UniversalTagLosesItsSuffix) {
  Model model;
  AddTwoLayers(model, false);
  model.source().origin = "universal";
  model.source().tag = "global_step4_universal";
  const Rendered files = Write(model, model.source(), Zero(0, 1));
  EXPECT_TRUE(files.has(kTag + "mp_rank_00_model_states.pt"));
}

}  // namespace
}  // namespace shardwright::checkpoints::test
