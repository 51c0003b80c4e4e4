// SPDX-License-Identifier: Apache-2.0
// Native stage 1 and 2 checkpoints made by the test: layouts that no available real checkpoint has.

#include <gtest/gtest.h>

#include <optional>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/native/deepspeed.h"
#include "fixtures.h"
#include "flat_layout.h"
#include "tiny_checkpoint.h"

namespace shardwright::checkpoints {
namespace {

std::vector<std::string> Names(const Checkpoint& checkpoint, std::size_t group) {
  std::vector<std::string> out;
  for (const std::uint32_t param : checkpoint.groups[group].params) {
    out.push_back(checkpoint.params[param].name);
  }
  return out;
}

TEST_F(FlatLayout, TwoGroupsOverTwoRanks) {
  const TinyZero tiny;
  tiny.Write(save_);
  const auto checkpoint = ReadRight(tiny);
  ASSERT_TRUE(checkpoint);
  EXPECT_EQ(TopologyOf(checkpoint->layout).zero, 2U);
  EXPECT_EQ(TopologyOf(checkpoint->layout).dp, 2U);
  EXPECT_EQ(checkpoint->tag, "global_step4");
  EXPECT_EQ(Names(*checkpoint, 1), (std::vector<std::string>{"l1.bias", "l2.bias"}));
  // Lengths of the worked example: 76 and 74 elements of group 0, 8 and 5 of group 1.
  const layout::TensorIndex index(checkpoint->map);
  const auto lengths = [&](const char* name) {
    const auto& tensor = checkpoint->map.tensors[*index.Find(name, "fp32")];
    const auto& array = checkpoint->map.arrays[tensor.fragments[0].at.array];
    return std::pair(array.regions[0].elems, array.regions[1].elems);
  };
  EXPECT_EQ(lengths("emb.weight"), std::pair(std::uint64_t{76}, std::uint64_t{74}));
  EXPECT_EQ(lengths("l1.bias"), std::pair(std::uint64_t{8}, std::uint64_t{5}));
}

TEST_F(FlatLayout, EveryNumberOfRanks) {
  for (const std::uint64_t ranks : {1U, 2U, 3U, 5U, 8U, 40U, 200U}) {
    TinyZero tiny;
    tiny.ranks = ranks;
    tiny.Write(save_);
    const auto checkpoint = ReadRight(tiny);
    ASSERT_TRUE(checkpoint) << ranks;
    EXPECT_EQ(TopologyOf(checkpoint->layout).dp, ranks);
    fs::remove_all(save_);
  }
}

// With process groups for sequence parallelism DeepSpeed writes their ranks as tp_degree.
TEST_F(FlatLayout, DegreesOfOtherGroupsAreNotThoseOfTheModel) {
  TinyZero tiny;
  std::int64_t counted = 1;
  tiny.change_model = [&](PtFile& file, Node* root) {
    pickle::Set(file.arena, root, "checkpoint_parallel_dimensions",
                file.Dict({{"pp_degree", file.arena.Int(1)}, {"tp_degree", file.arena.Int(2)}}));
    pickle::Set(file.arena, root, "mp_world_size", file.arena.Int(counted));
  };
  tiny.Write(save_);
  const auto checkpoint = ReadRight(tiny);
  ASSERT_TRUE(checkpoint);
  EXPECT_EQ(TopologyOf(checkpoint->layout).tp, 1U);
  fs::remove_all(save_);
  counted = 2;
  tiny.Write(save_);
  ExpectRefused(Errc::kNotFound, {"mp_rank_01"});
}

TEST_F(FlatLayout, WithoutStatesOnlyMastersTellTheLength) {
  for (const std::uint64_t ranks : {1U, 2U, 40U}) {
    TinyZero tiny;
    tiny.ranks = ranks;
    tiny.states.clear();
    tiny.step = TinyZero::Step::kNone;
    tiny.Write(save_);
    ASSERT_TRUE(ReadRight(tiny)) << ranks;
    fs::remove_all(save_);
  }
}

TEST_F(FlatLayout, RoundRobinIsFoundByTheMappingsOfTheOriginalOrder) {
  TinyZero tiny;
  tiny.params = {
      {"emb", {66}, 0}, {"l1.w", {42}, 0}, {"l1.b", {7}, 0}, {"l2.w", {42}, 0}, {"l2.b", {6}, 0}};
  tiny.groups = 1;
  tiny.round_robin = true;
  tiny.slices = TinyZero::Slices::kOriginalOrder;
  tiny.Write(save_);
  const auto checkpoint = ReadRight(tiny);
  ASSERT_TRUE(checkpoint);
  EXPECT_TRUE(TopologyOf(checkpoint->layout).round_robin);
  EXPECT_EQ(Names(*checkpoint, 0),
            (std::vector<std::string>{"emb", "l1.w", "l1.b", "l2.w", "l2.b"}));
}

TEST_F(FlatLayout, RoundRobinWithoutMappingsIsFoundByTheConfig) {
  TinyZero tiny;
  tiny.round_robin = true;
  tiny.slices = TinyZero::Slices::kNone;
  tiny.change_model = [](PtFile& file, Node* root) {
    Node* zero = file.Dict({{"round_robin_gradients", file.arena.Bool(true)}});
    pickle::Set(file.arena, root, "ds_config", file.Dict({{"zero_optimization", zero}}));
  };
  tiny.Write(save_);
  const auto checkpoint = ReadRight(tiny);
  ASSERT_TRUE(checkpoint);
  EXPECT_TRUE(TopologyOf(checkpoint->layout).round_robin);
  EXPECT_EQ(Names(*checkpoint, 0),
            (std::vector<std::string>{"emb.weight", "l1.weight", "l2.weight"}));
}

TEST_F(FlatLayout, GapsAreTakenFromTheFile) {
  TinyZero tiny;
  tiny.gaps = {{2, 3, 0}, {1, 0}};
  tiny.write_gaps = true;
  tiny.Write(save_);
  ASSERT_TRUE(ReadRight(tiny));
}

TEST_F(FlatLayout, GapsAreTakenFromTheMappings) {
  TinyZero tiny;
  tiny.gaps = {{2, 3, 0}, {1, 0}};
  tiny.Write(save_);
  ASSERT_TRUE(ReadRight(tiny));
}

TEST_F(FlatLayout, GapsOfARoundRobinOrder) {
  TinyZero tiny;
  tiny.ranks = 2;
  tiny.round_robin = true;
  tiny.gaps = {{4, 0, 0}, {0, 0}};
  tiny.write_gaps = true;
  tiny.Write(save_);
  ASSERT_TRUE(ReadRight(tiny));
}

TEST_F(FlatLayout, MappingsThatAgreeWithNothingAreRefused) {
  TinyZero tiny;
  tiny.change_shard = [](PtFile& file, std::uint64_t rank, Node* inner) {
    if (rank != 0) return;
    TinyZero other;
    std::reverse(other.params.begin(), other.params.end());
    const std::vector<const Node*> slices{other.SlicesOf(file, 0, 0, 76),
                                          other.SlicesOf(file, 1, 0, 8)};
    pickle::Set(file.arena, inner, "param_slice_mappings", file.arena.List(slices));
  };
  tiny.Write(save_);
  ExpectRefused(Errc::kBadInput, {"param_slice_mappings", "group 0"});
}

TEST_F(FlatLayout, ParametersThatOverlapInABufferAreRefused) {
  TinyZero tiny;
  tiny.change_shard = [&](PtFile& file, std::uint64_t rank, Node* inner) {
    // l1.bias takes 0 to 6 of rank 0's partition of 8, and l2.bias starts at 6 instead of 7.
    const auto address = [&](std::int64_t start, std::int64_t elems) {
      return file.arena.Object(
          "deepspeed.utils.tensor_fragment.fragment_address",
          file.Dict({{"numel", file.arena.Int(elems)}, {"start", file.arena.Int(start)}}));
    };
    const Node* biases =
        rank == 0 ? file.Dict({{"l1.bias", address(0, 7)}, {"l2.bias", address(6, 1)}}, true)
                  : file.Dict({{"l2.bias", address(0, 5)}}, true);
    pickle::Set(file.arena, inner, "param_slice_mappings",
                file.arena.List({tiny.SlicesOf(file, 0, rank, 76), biases}));
  };
  tiny.Write(save_);
  ExpectRefused(Errc::kBadInput, {"param_slice_mappings", "group 1"});
}

TEST_F(FlatLayout, GapsForOtherParametersAreRefused) {
  TinyZero tiny;
  tiny.gaps = {{2, 3, 0}, {1, 0}};
  tiny.change_shard = [](PtFile& file, std::uint64_t, Node* inner) {
    pickle::Set(file.arena, inner, "param_alignment_paddings",
                file.arena.List({file.Counts({2, 3}), file.Counts({1, 0})}));
  };
  tiny.Write(save_);
  ExpectRefused(Errc::kBadInput, {"group 0", "param_alignment_paddings", "3 parameters", "2"});
}

TEST_F(FlatLayout, APartitionThatLacksElementsIsRefused) {
  TinyZero tiny;
  tiny.change_shard = [&](PtFile& file, std::uint64_t rank, Node* inner) {
    if (rank == 0) return;
    // 74 elements of group 0 and 5 of group 1 are the second rank's.
    pickle::Set(
        file.arena, inner, "single_partition_of_fp32_groups",
        file.arena.List({file.Flat(std::vector<float>(73)), file.Flat(std::vector<float>(5))}));
  };
  tiny.Write(save_);
  ExpectRefused(Errc::kBadInput, {"zero_pp_rank_1", "group 0 fp32", "74 to 76", "found 73"});
}

TEST_F(FlatLayout, ShapesOfAnotherNumberOfGroupsAreRefused) {
  for (const std::size_t groups : {1U, 3U}) {
    TinyZero tiny;
    tiny.change_model = [&](PtFile& file, Node* root) {
      const Node* shapes = root->Find("param_shapes");
      std::vector<const Node*> list(shapes->items.begin(), shapes->items.end());
      list.resize(groups, file.arena.Dict(true));
      pickle::Set(file.arena, root, "param_shapes", file.arena.List(list));
    };
    tiny.Write(save_);
    ExpectRefused(Errc::kBadInput,
                  {"mp_rank_00_model_states.pt", "2 groups", std::to_string(groups)});
  }
}

TEST_F(FlatLayout, MastersWithPaddingAsTheBf16OptimizerSavesThem) {
  TinyZero tiny;
  tiny.strip_padding = false;
  tiny.change_shard = [](PtFile&, std::uint64_t, Node* inner) {
    pickle::Remove(inner, "zero_stage");
    pickle::Remove(inner, "loss_scaler");
  };
  tiny.Write(save_);
  const auto checkpoint = ReadRight(tiny);
  ASSERT_TRUE(checkpoint);
  EXPECT_TRUE(TopologyOf(checkpoint->layout).bf16_optimizer);
  EXPECT_EQ(TopologyOf(checkpoint->layout).zero, 1U);
}

TEST_F(FlatLayout, TheStepMayBeANumber) {
  TinyZero tiny;
  tiny.step = TinyZero::Step::kInt;
  tiny.Write(save_);
  const auto checkpoint = ReadRight(tiny);
  ASSERT_TRUE(checkpoint);
  const Scalar& step = checkpoint->params[0].scalars.at(0);
  EXPECT_FALSE(step.is_tensor);
  EXPECT_EQ(step.value->integer, 4);
}

TEST_F(FlatLayout, TheStepMayBeAnEntryOfTheGroup) {
  TinyZero tiny;
  tiny.step = TinyZero::Step::kGroup;
  tiny.Write(save_);
  const auto checkpoint = ReadRight(tiny);
  ASSERT_TRUE(checkpoint);
  EXPECT_EQ(checkpoint->params[0].scalars.at(0).value->integer, 4);
  EXPECT_NE(checkpoint->groups[0].options->Find("step"), nullptr);
}

TEST_F(FlatLayout, StageMayBeAnEnumOrItsMember) {
  for (const bool by_name : {false, true}) {
    TinyZero tiny;
    tiny.change_shard = [&](PtFile& file, std::uint64_t, Node* inner) {
      const Node* type = file.arena.Global("deepspeed.runtime.zero.config.ZeroStageEnum");
      Node* stage = file.arena.New(pickle::Kind::kObject);
      stage->callable = by_name ? file.arena.Global("__builtin__.getattr") : type;
      stage->args = by_name ? file.arena.Tuple({type, file.arena.String("optimizer_states")})
                            : file.arena.Tuple({file.arena.Int(1)});
      pickle::Set(file.arena, inner, "zero_stage", stage);
    };
    tiny.Write(save_);
    const auto checkpoint = ReadRight(tiny);
    ASSERT_TRUE(checkpoint);
    EXPECT_EQ(TopologyOf(checkpoint->layout).zero, 1U);
    fs::remove_all(save_);
  }
}

TEST_F(FlatLayout, FrozenAndTiedAreFoundWithoutTheirLists) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) {
    Node* module = pickle::CopyDict(file.arena, root->Find("module"));
    pickle::Set(file.arena, module, "frozen.weight", file.Flat({1, 2, 3}));
    pickle::Set(file.arena, module, "head.weight", module->Find("emb.weight"));
    pickle::Set(file.arena, root, "module", module);
  };
  tiny.Write(save_);
  const auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  ASSERT_EQ(checkpoint->params.size(), 7U);
  EXPECT_EQ(checkpoint->params[5].kind, ParamKind::kFrozen);
  EXPECT_EQ(checkpoint->params[6].alias_of, "emb.weight");
  EXPECT_EQ(checkpoint->params[6].shape, (Shape{11, 6}));
  EXPECT_EQ(checkpoint->params[6].group, 0);
  const layout::TensorIndex index(checkpoint->map);
  EXPECT_TRUE(index.Find("frozen.weight", "frozen"));
  EXPECT_FALSE(index.Find("head.weight", "weight"));
}

TEST_F(FlatLayout, TensorsWithoutElementsKeepTheirShapesThoughTheFileTiesThem) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) {
    Node* module = pickle::CopyDict(file.arena, root->Find("module"));
    pickle::Set(file.arena, module, "none", file.Flat({}));
    pickle::Set(file.arena, module, "rows_of_none", file.Tensor({}, {3, 0}));
    pickle::Set(file.arena, root, "module", module);
    pickle::Set(file.arena, root, "shared_params",
                file.Dict({{"rows_of_none", file.arena.String("none")}}));
  };
  tiny.Write(save_);
  const auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  ASSERT_EQ(checkpoint->params.size(), 7U);
  EXPECT_EQ(checkpoint->params[5].shape, (Shape{0}));
  EXPECT_EQ(checkpoint->params[6].shape, (Shape{3, 0}));
  EXPECT_EQ(checkpoint->params[6].alias_of, "");
}
}  // namespace
}  // namespace shardwright::checkpoints
