// SPDX-License-Identifier: Apache-2.0
// States that an optimizer fuses and the model splits: torchtitan's fused projections.
#include "checkpoints/torchtitan_fused_qkv.h"

#include <gtest/gtest.h>

#include "map_model.h"

namespace shardwright::checkpoints {
namespace {

constexpr std::uint64_t kKeys = 2;   // heads of keys and values
constexpr std::uint64_t kQuery = 3;  // heads of queries for each of them
constexpr std::uint64_t kHead = 2;   // rows of a head
constexpr std::uint64_t kWidth = 4;
const std::string kModule = "layers.0.attention.qkv_linear.";

Checkpoint Model() {
  return MadeUp({{"tok_embeddings.weight", {5, kWidth}},
                 {kModule + "wq.weight", {kKeys * kQuery * kHead, kWidth}},
                 {kModule + "wk.weight", {kKeys * kHead, kWidth}},
                 {kModule + "wv.weight", {kKeys * kHead, kWidth}},
                 {"norm.weight", {kWidth}}},
                {.ranks = 3});
}

TEST(Fused, StatesLieGroupByGroup) {
  const auto before = ElementsOf(Model().map);
  auto made = FuseOptimizer(Model(), {{"kv_heads", kKeys}}, Patterns());
  ASSERT_TRUE(made) << made.error().message;
  const Checkpoint& checkpoint = made->checkpoint;
  ASSERT_EQ(checkpoint.fused.size(), 1U);
  const Param& fused = checkpoint.fused.front();
  EXPECT_EQ(fused.name, kModule + "wqkv.weight");
  EXPECT_EQ(fused.shape, (Shape{kKeys * (kQuery + 2) * kHead, kWidth}));
  EXPECT_EQ(fused.group, 0);
  EXPECT_EQ(fused.scalars.size(), 1U);
  const auto after = ElementsOf(checkpoint.map);
  EXPECT_FALSE(after.contains(kModule + "wq.weight exp_avg"));
  EXPECT_EQ(after.at(kModule + "wq.weight fp32"), before.at(kModule + "wq.weight fp32"));
  EXPECT_FALSE(after.contains(kModule + "wqkv.weight fp32")) << "the model stays as it is";
  std::vector<ElementId> expected;
  const auto add = [&](const char* part, std::uint64_t first, std::uint64_t rows) {
    const auto& from = before.at(kModule + part + ".weight exp_avg");
    const auto begin = from.begin() + static_cast<std::ptrdiff_t>(first * kWidth);
    expected.insert(expected.end(), begin, begin + static_cast<std::ptrdiff_t>(rows * kWidth));
  };
  for (std::uint64_t key = 0; key < kKeys; ++key) {
    add("wq", key * kQuery * kHead, kQuery * kHead);
    add("wk", key * kHead, kHead);
    add("wv", key * kHead, kHead);
  }
  EXPECT_EQ(after.at(kModule + "wqkv.weight exp_avg"), expected);
  EXPECT_TRUE(checkpoint.params[1].scalars.empty());
  EXPECT_EQ(checkpoint.params[1].group, -1);
  EXPECT_EQ(checkpoint.groups[0].params, (std::vector<std::uint32_t>{0, 4}));
}

TEST(Fused, ThereAndBackIsTheSame) {
  auto fused = FuseOptimizer(Model(), {{"kv_heads", kKeys}}, Patterns());
  ASSERT_TRUE(fused) << fused.error().message;
  auto split = SplitFused(std::move(fused->checkpoint), {{"kv_heads", kKeys}}, Patterns());
  ASSERT_TRUE(split) << split.error().message;
  const Checkpoint before = Model();
  const Checkpoint& after = split->checkpoint;
  EXPECT_TRUE(after.fused.empty());
  EXPECT_EQ(ElementsOf(after.map), ElementsOf(before.map));
  EXPECT_EQ(after.groups[0].params, before.groups[0].params);
  for (std::size_t i = 0; i < before.params.size(); ++i) {
    EXPECT_EQ(after.params[i].scalars, before.params[i].scalars) << before.params[i].name;
    EXPECT_EQ(after.params[i].group, 0);
    EXPECT_EQ(after.params[i].kind, ParamKind::kTrainable);
  }
  EXPECT_EQ(split->sizes.at("query"), kQuery);
}

Checkpoint FusedModel() {
  auto fused = FuseOptimizer(Model(), {{"kv_heads", kKeys}}, Patterns());
  EXPECT_TRUE(fused) << fused.error().message;
  return fused ? std::move(fused->checkpoint) : Checkpoint();
}

TEST(Fused, TheNumberOfHeadsIsAskedFor) {
  const auto split = SplitFused(FusedModel(), {}, Patterns());
  ASSERT_FALSE(split);
  EXPECT_EQ(split.error().code, Errc::kUsage) << split.error().message;
  EXPECT_NE(split.error().message.find("kv_heads"), std::string::npos) << split.error().message;
  const auto fused = FuseOptimizer(Model(), {}, Patterns());
  ASSERT_FALSE(fused);
  EXPECT_EQ(fused.error().code, Errc::kUsage) << fused.error().message;
}

TEST(Fused, SizesThatContradictTheModelAreRefused) {
  for (const ModelSizes& sizes :
       {ModelSizes{{"kv_heads", kKeys}, {"heads", 2 * kKeys}},
        ModelSizes{{"kv_heads", kKeys}, {"query", 2}}, ModelSizes{{"kv_heads", 5}}}) {
    const auto split = SplitFused(FusedModel(), sizes, Patterns());
    ASSERT_FALSE(split);
    EXPECT_TRUE(split.error().code == Errc::kBadInput || split.error().code == Errc::kUsage)
        << split.error().message;
  }
}

TEST(Fused, WhatNoRuleTakesApartIsNamed) {
  Checkpoint source = FusedModel();
  const std::string name = "layers.0.feed_forward.w13.weight";
  source.map.tensors.back().name = name;
  source.fused.front().name = name;
  const auto split = SplitFused(std::move(source), {{"kv_heads", kKeys}}, Patterns());
  ASSERT_FALSE(split);
  EXPECT_EQ(split.error().code, Errc::kUnsupported) << split.error().message;
  EXPECT_NE(split.error().message.find(name), std::string::npos) << split.error().message;
}

TEST(Fused, WithoutProjectionsOrStatesThereIsNothingToFuse) {
  const auto other = FuseOptimizer(MadeUp({{"norm.weight", {4}}}), {}, Patterns());
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, Errc::kUnsupported);
  Checkpoint weights = Model();
  weights.groups.clear();
  const auto alone = FuseOptimizer(std::move(weights), {{"kv_heads", kKeys}}, Patterns());
  ASSERT_FALSE(alone);
  EXPECT_EQ(alone.error().code, Errc::kUnsupported);
}

}  // namespace
}  // namespace shardwright::checkpoints
