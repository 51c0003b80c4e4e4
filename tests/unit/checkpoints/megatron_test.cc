// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/megatron.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "checkpoints/megatron/buckets.h"
#include "checkpoints/megatron/folder.h"
#include "checkpoints/megatron/holdings.h"
#include "checkpoints/megatron/keys.h"
#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/rules.h"
#include "checkpoints/megatron/stages.h"

namespace shardwright::checkpoints::megatron {
namespace {

TEST(MegatronNames, LayersAndExpertsAreTold) {
  const ParamName plain = ParseName("decoder.layers.3.mlp.linear_fc1.weight");
  EXPECT_EQ(plain.stack, "decoder.layers.");
  EXPECT_EQ(plain.layer, 3U);
  EXPECT_EQ(plain.rest, "mlp.linear_fc1.weight");
  for (const char* text : {"decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight",
                           "decoder.layers.3.mlp.experts.linear_fc1.weight5"}) {
    const ParamName expert = ParseName(text);
    EXPECT_EQ(expert.expert, 5U) << text;
    EXPECT_EQ(expert.Text(), "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight");
  }
  for (const char* text : {"output_layer.weight", "decoder.layers.x.weight", "decoder.layers.",
                           "decoder.layers.03.weight", "mlp.experts.linear_fc1.weight", ""}) {
    EXPECT_EQ(ParseName(text).Text(), text);
    EXPECT_FALSE(ParseName(text).layer) << text;
    EXPECT_FALSE(ParseName(text).expert) << text;
  }
}

TEST(MegatronNames, FoldersAreOfRanks) {
  const auto both = ParseFolder("mp_rank_01_002_003");
  ASSERT_TRUE(both);
  EXPECT_EQ(both->tensor, 1U);
  EXPECT_EQ(both->more, (std::vector<std::uint64_t>{2, 3}));
  EXPECT_TRUE(ParseFolder("mp_rank_100"));
  for (const char* name : {"mp_rank_1", "mp_rank_001", "mp_rank_01_02", "mp_rank_", "mp_rank_xx",
                           "mp_rank_01_002_003_004", "rank_01", "mp_rank_01_"}) {
    EXPECT_FALSE(ParseFolder(name)) << name;
  }
  Args args;
  args.pp = 2;
  EXPECT_EQ(FolderName(args, 1, 1, 0), "mp_rank_01_001");
  args.ep = 4;
  EXPECT_EQ(FolderName(args, 1, 1, 3), "mp_rank_01_001_003");
}

TEST(MegatronNames, TrackersMeanFolders) {
  EXPECT_EQ(*TagOf("4"), "iter_0000004");
  EXPECT_EQ(*TagOf("12345678"), "iter_12345678");
  EXPECT_EQ(*TagOf("release"), "release");
  for (const char* text : {"", "-1", "latest", "4 5", "0x4"}) {
    EXPECT_EQ(TagOf(text).error().code, Errc::kBadInput) << text;
  }
}

TEST(MegatronKeys, AStackIsOneKey) {
  Args args;
  const Key key = KeyOf("decoder.layers.1.input_layernorm.weight", args);
  EXPECT_EQ(KeyText(key), "decoder.layers.self_attention.linear_qkv.layer_norm_weight");
  EXPECT_EQ(ParseKey(KeyText(key), args).Text(1, 0), "decoder.layers.1.input_layernorm.weight");
  const char* expert = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight";
  EXPECT_EQ(KeyText(KeyOf(expert, args)), "decoder.layers.mlp.experts.experts.linear_fc2.weight");
  args.layers_differ = true;
  const std::string numbered = KeyText(KeyOf(expert, args));
  EXPECT_EQ(numbered, "decoder.layers.1.mlp.experts.experts.linear_fc2.weight");
  EXPECT_EQ(ParseKey(numbered, args).Text(0, 3), expert);
  args.transformer_engine = true;
  const char* norm = "decoder.layers.1.pre_mlp_layernorm.weight";
  EXPECT_EQ(KeyText(KeyOf(norm, args)), norm);
}

TEST(MegatronKeys, ObjectsAreInGrids) {
  const auto key = ParseObjectKey("rng_state/shard_0.1_2.2");
  ASSERT_TRUE(key);
  EXPECT_EQ(key->name, "rng_state");
  EXPECT_EQ(ObjectKeyText(key->name, key->offset, key->shape), "rng_state/shard_0.1_2.2");
  EXPECT_EQ(ParseObjectKey("a/shard_1.0_2")->offset, std::vector<std::uint64_t>{1});
  for (const char* text : {"rng_state", "a/shard_", "a/shard_0", "a/shard_2_2", "a/shard_x_2",
                           "a/shard_0.0.0_2", "a/shard_0_2."}) {
    EXPECT_EQ(ParseObjectKey(text).error().code, Errc::kBadInput) << text;
  }
}

TEST(MegatronKeys, BucketsHaveAPlace) {
  const std::string text =
      "chained_1.optimizer.distributed.dp_group_idx_2.gbuf_idx_3.dtype_(torch.bfloat16, "
      "torch.float32).bucket_idx_4.exp_avg";
  const auto key = ParseBucketKey(text);
  ASSERT_TRUE(key);
  EXPECT_EQ(key->part, 1U);
  EXPECT_EQ(key->group, 2U);
  EXPECT_EQ(key->buffer, 3U);
  EXPECT_EQ(key->bucket, 4U);
  EXPECT_EQ(key->slot, "exp_avg");
  EXPECT_EQ(BucketKeyText(*key), text);
  EXPECT_FALSE(ParseBucketKey("optimizer.state.exp_avg.output_layer.weight"));
}

TEST(MegatronBuckets, ThereIsOneForEachType) {
  const DType half = DType::kBF16;
  const auto buffers = BuffersOf(std::vector{half, DType::kF32, half});
  ASSERT_EQ(buffers.size(), 2U);
  EXPECT_EQ(buffers[0].params, (std::vector<std::size_t>{0, 2}));
  EXPECT_EQ(buffers[1].dtype, DType::kF32);
  Args args;
  EXPECT_EQ(GradientType(args, half), DType::kF32);
  EXPECT_EQ(GradientType(args, DType::kF16), DType::kF16);
  args.gradients_in_f32 = false;
  EXPECT_EQ(GradientType(args, half), half);
  EXPECT_EQ(GradientType(args, DType::kF32), DType::kF32);
}

TEST(MegatronBuckets, EveryRankMustHaveAParameter) {
  const auto loadable = [](const std::vector<BufferParam>& params, const BucketRule& rule) {
    return CheckLoadable(params, LayOut(params, rule), rule.shards).has_value();
  };
  EXPECT_TRUE(loadable({{100}, {60}}, {{}, 2}));  // 160 elements, padded to 256
  EXPECT_FALSE(loadable({{100}, {60}}, {{}, 4})) << "the last 64 are padding alone";
  EXPECT_FALSE(loadable({{100}, {60}}, {1, 2})) << "60 elements in a bucket of 128";
  EXPECT_TRUE(loadable({{128, true}, {64}}, {{}, 1}));
}

std::vector<std::string> Names(const Args& args, const std::vector<Param>& params,
                               const Rank& rank) {
  std::vector<std::string> names;
  const auto order = ModelOrder(params);
  for (const Holding& one : HoldingsOf(args, *StagesOf(args), params, order, rank, 0)) {
    names.push_back(params[one.param].name + (one.shared ? "!" : "") + (one.copy ? "?" : ""));
  }
  return names;
}

TEST(MegatronHoldings, EveryRankHasItsPart) {
  std::vector<Param> params(5);
  params[0].name = "decoder.final_layernorm.weight";
  params[1].name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight";
  params[2].name = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight";
  params[3].name = "decoder.layers.0.input_layernorm.weight";
  params[4].name = kEmbedding;
  Args args;
  args.layers = 2;
  args.experts = 4;
  args.pp = 2;
  args.ep = 2;
  using Words = std::vector<std::string>;
  const std::string embedding(kEmbedding);
  EXPECT_EQ(Names(args, params, {0, 0, 0}), (Words{embedding + "!", params[3].name}));
  EXPECT_EQ(Names(args, params, {0, 1, 1}),
            (Words{params[1].name, params[0].name, embedding + "!?"}));
  args.untied = true;
  EXPECT_EQ(Names(args, params, {0, 1, 0}), (Words{params[2].name, params[0].name}));
  EXPECT_EQ(BufferRanks(args, false).size(), 2U);
  EXPECT_EQ(BufferRanks(args, true)[1].e, 1U);
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> Pairs(const Args& args) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> pairs;
  const auto stages = StagesOf(args);
  if (stages) {
    for (const Stage& stage : *stages) pairs.emplace_back(stage.begin, stage.count);
  }
  return pairs;
}

TEST(MegatronVocabularies, AreCutWithTheirPadding) {
  Whole whole{{3, 4}, {}, 1};
  whole.rule.padded = true;
  const auto first = PartsOf(whole, 2, 0);
  const auto second = PartsOf(whole, 2, 1);
  ASSERT_TRUE(first && second);
  ASSERT_EQ(first->size(), 1U);
  ASSERT_EQ(second->size(), 2U);
  EXPECT_EQ(second->back().first, 4U);
  EXPECT_TRUE(second->back().padding);
  whole.shape = {0, 4};
  whole.padding = 0;
  const auto none = PartsOf(whole, 1, 0);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Errc::kUnsupported);
}

TEST(MegatronStages, LayersAreSharedOut) {
  using Expected = std::vector<std::pair<std::uint64_t, std::uint64_t>>;
  Args args;
  args.layers = 8;
  args.pp = 2;
  EXPECT_EQ(Pairs(args), (Expected{{0, 4}, {4, 4}}));
  args.vpp = 2;  // chunk 0 of both stages, then chunk 1
  EXPECT_EQ(Pairs(args), (Expected{{0, 2}, {2, 2}, {4, 2}, {6, 2}}));
  args.vpp = 1;
  args.first = 3;
  EXPECT_EQ(Pairs(args), (Expected{{0, 3}, {3, 5}}));
  args.pp = 3;
  args.last = 1;
  EXPECT_EQ(Pairs(args), (Expected{{0, 3}, {3, 4}, {7, 1}}));
  args.first.reset();
  args.last.reset();
  args.layers = 7;
  args.pp = 4;
  args.embedding_counts = true;
  EXPECT_EQ(Pairs(args), (Expected{{0, 1}, {1, 2}, {3, 2}, {5, 2}}));
}

TEST(MegatronStages, WhatDoesNotDivideIsRefused) {
  Args args;
  args.layers = 7;
  args.pp = 2;
  EXPECT_EQ(StagesOf(args).error().code, Errc::kBadInput);
  args.first = 9;
  EXPECT_EQ(StagesOf(args).error().code, Errc::kBadInput);
  args.first.reset();
  args.listed_stages = true;
  EXPECT_EQ(StagesOf(args).error().code, Errc::kUnsupported);
}

TEST(MegatronBuckets, ParametersLieInReverseWithGaps) {
  const std::vector<BufferParam> params{{252}, {12}, {144}, {288}};
  const Buffer one = LayOut(params, {});
  EXPECT_EQ(one.offsets, (std::vector<std::uint64_t>{576, 512, 320, 0}));
  EXPECT_EQ(one.stored(), 828U);
  const Buffer several = LayOut(params, {.elems = 400, .shards = 3});
  EXPECT_EQ(several.bucket_of, (std::vector<std::uint32_t>{1, 1, 0, 0}));
  EXPECT_EQ(several.unpadded, (std::vector<std::uint64_t>{464, 316}));
  EXPECT_EQ(several.padded, (std::vector<std::uint64_t>{768, 384}));
  EXPECT_EQ(several.stored_offset(0), 464U + 64U);
}

TEST(MegatronBuckets, ASharedEmbeddingHasABucketOfItsOwn) {
  const std::vector<BufferParam> params{{468, true}, {12}, {100}};
  const Buffer buffer = LayOut(params, {});
  EXPECT_EQ(buffer.unpadded, (std::vector<std::uint64_t>{192, 468}));  // the gap before it is kept
  EXPECT_EQ(LayOutIn(params, std::vector<std::uint64_t>{192, 468})->offsets, buffer.offsets);
}

TEST(MegatronBuckets, SizesThatAreToldMustFit) {
  const std::vector<BufferParam> params{{252}, {12}, {144}, {288}};
  const auto told = LayOutIn(params, std::vector<std::uint64_t>{464, 316});
  ASSERT_TRUE(told);
  EXPECT_EQ(told->bucket_of, (std::vector<std::uint32_t>{1, 1, 0, 0}));
  EXPECT_EQ(LayOutIn(params, std::vector<std::uint64_t>{464, 300}).error().code, Errc::kBadInput);
  EXPECT_EQ(LayOutIn(params, std::vector<std::uint64_t>{464}).error().code, Errc::kBadInput);
}

}  // namespace
}  // namespace shardwright::checkpoints::megatron
