// SPDX-License-Identifier: Apache-2.0
// Native stage 1 and 2 checkpoints made by the test: broken and unsupported ones.

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/native/deepspeed.h"
#include "fixtures.h"
#include "flat_layout.h"
#include "tiny_checkpoint.h"

namespace shardwright::checkpoints {
namespace {

TEST_F(FlatLayout, MissingRanksAreAllNamed) {
  TinyZero tiny;
  tiny.ranks = 4;
  tiny.Write(save_);
  fs::remove(Shard(1));
  fs::remove(Shard(3));
  ExpectRefused(Errc::kNotFound, {"2 files", "zero_pp_rank_1_mp_rank_00_optim_states.pt",
                                  "zero_pp_rank_3_mp_rank_00_optim_states.pt"});
}

TEST_F(FlatLayout, MissingShardsAreNamedWhenAllAreGone) {
  TinyZero().Write(save_);
  fs::remove(Shard(0));
  fs::remove(Shard(1));
  ExpectRefused(Errc::kNotFound, {"zero_pp_rank_0_mp_rank_00_optim_states.pt",
                                  "zero_pp_rank_1_mp_rank_00_optim_states.pt"});
}

TEST_F(FlatLayout, AMissingModelIsNamed) {
  TinyZero().Write(save_);
  fs::remove(Model());
  ExpectRefused(Errc::kNotFound, {"mp_rank_00_model_states.pt"});
}

TEST_F(FlatLayout, RanksThatDisagreeOnTheStepAreNamedWithTheirValues) {
  for (const auto step : {TinyZero::Step::kTensor, TinyZero::Step::kInt}) {
    TinyZero tiny;
    tiny.step = step;
    tiny.Write(save_);
    tiny.steps = 5;
    tiny.WriteShard(save_ / "global_step4", 1);
    ExpectRefused(Errc::kBadInput,
                  {"zero_pp_rank_0_mp_rank_00_optim_states.pt",
                   "zero_pp_rank_1_mp_rank_00_optim_states.pt", "\"step\"", "4", "5"});
    fs::remove_all(save_);
  }
}

TEST_F(FlatLayout, RanksThatDisagreeOnGroupsStatesOrStageAreNamed) {
  const auto mix = [&](const TinyZero& other, const std::string& word) {
    TinyZero().Write(save_);
    other.WriteShard(save_ / "global_step4", 1);
    ExpectRefused(Errc::kBadInput, {"zero_pp_rank_0_mp_rank_00_optim_states.pt",
                                    "zero_pp_rank_1_mp_rank_00_optim_states.pt", word});
  };
  TinyZero other;
  other.groups = 1;
  mix(other, "groups");
  other = {};
  other.states = {"exp_avg"};
  mix(other, "states");
  other = {};
  other.stage = 1;
  mix(other, "zero_stage");
}

TEST_F(FlatLayout, ShapesThatDoNotFitThePartitionsAreRefused) {
  TinyZero tiny;
  tiny.slices = TinyZero::Slices::kNone;
  tiny.Write(save_);
  tiny.params[0].shape = {21, 6};
  tiny.WriteModel(save_ / "global_step4");
  ExpectRefused(Errc::kBadInput, {"group 0", "210", "76"});
}

TEST_F(FlatLayout, AShapeThatDiffersFromTheWeightIsRefused) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) {
    Node* shapes = pickle::CopyDict(file.arena, root->Find("param_shapes")->items[0]);
    pickle::Set(file.arena, shapes, "emb.weight", file.arena.SizeOf({6, 11}));
    pickle::Set(file.arena, root, "param_shapes",
                file.arena.List({shapes, root->Find("param_shapes")->items[1]}));
  };
  tiny.Write(save_);
  ExpectRefused(Errc::kBadInput, {"emb.weight", "[6, 11]", "[11, 6]"});
}

TEST_F(FlatLayout, ATruncatedFileIsNamed) {
  TinyZero().Write(save_);
  fs::resize_file(Shard(1), fs::file_size(Shard(1)) - 100);
  ExpectRefused(Errc::kBadInput, {Shard(1).string()});
}

TEST_F(FlatLayout, ExpandedStorageIsRefused) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) {
    Node* module = pickle::CopyDict(file.arena, root->Find("module"));
    pickle::Tensor turned = *module->Find("emb.weight")->tensor;
    turned.strides = {0, 1};
    pickle::Set(file.arena, module, "emb.weight", file.arena.TensorOf(turned));
    pickle::Set(file.arena, root, "module", module);
  };
  tiny.Write(save_);
  ExpectRefused(Errc::kUnsupported, {"emb.weight", "save a contiguous copy"});
}

TEST_F(FlatLayout, EmptyMastersAreTakenForOffloadedOnes) {
  TinyZero tiny;
  tiny.slices = TinyZero::Slices::kNone;
  tiny.states.clear();
  tiny.change_shard = [](PtFile& file, std::uint64_t, Node* inner) {
    pickle::Set(file.arena, inner, "single_partition_of_fp32_groups",
                file.arena.List({file.Flat({}), file.Flat({})}));
  };
  tiny.Write(save_);
  ExpectRefused(Errc::kUnsupported, {"NVMe"});
}

TEST_F(FlatLayout, WhatIsNotSupportedIsSaid) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) {
    pickle::Set(file.arena, root, "ds_autoep_layers", file.arena.List({file.arena.Dict()}));
  };
  tiny.Write(save_);
  ExpectRefused(Errc::kUnsupported, {"AutoEP"});

  TinyZero().Write(save_);
  fs::create_directories(save_ / "global_step4" / "offloaded_tensors" / "rank00");
  ExpectRefused(Errc::kUnsupported, {"offloaded_tensors", "NVMe"});
  fs::remove_all(save_ / "global_step4" / "offloaded_tensors");

  std::ofstream(Shard(1), std::ios::binary) << std::string("\x80\x02X\0\0\0\0q\0.", 10);
  ExpectRefused(Errc::kUnsupported, {"Nebula"});

  const std::string header = R"({"module": {"dtype": "F32"}, "datastates_metadata": {}})";
  std::ofstream(Shard(1), std::ios::binary)
      << static_cast<char>(header.size()) << std::string(7, '\0') << header << "tensors";
  ExpectRefused(Errc::kUnsupported, {"DataStates", "rank_1"});
}

TEST_F(FlatLayout, AStateWithAReservedNameIsNotWritten) {
  TinyZero tiny;
  tiny.states = {"weight"};
  tiny.Write(save_);
  const auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const Status unbound = CheckUnbound(*checkpoint);
  ASSERT_FALSE(unbound);
  EXPECT_EQ(unbound.error().code, Errc::kUnsupported);
  EXPECT_NE(unbound.error().message.find("\"weight\""), std::string::npos);
}

TEST_F(FlatLayout, FilesOfAnotherTrainingAreRefused) {
  TinyZero().Write(save_);
  fs::copy(Shard(0), Shard(2));
  ExpectRefused(Errc::kBadInput, {"3 ZeRO ranks", "2"});
  fs::remove(Shard(2));
  fs::copy(Shard(0), save_ / "global_step4" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt");
  ExpectRefused(Errc::kBadInput, {"same rank", "bf16_zero_pp_rank_0"});
}

}  // namespace
}  // namespace shardwright::checkpoints
