// SPDX-License-Identifier: Apache-2.0
// The flags for maps that messages name, and exports that need no split of fused optimizer states.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "checkpoints/torchtitan_fused_qkv.h"
#include "convert/mapping.h"
#include "support/comm/comm.h"
#include "unit/checkpoints/map_model.h"

namespace shardwright::convert {
namespace {

using checkpoints::Checkpoint;

/// A model with names of torchtitan, and fused states of its optimizer.
Checkpoint Titan() {
  const std::string module = "layers.0.attention.qkv_linear.";
  Checkpoint made = checkpoints::MadeUp({{"tok_embeddings.weight", {5, 4}},
                                         {module + "wq.weight", {12, 4}},
                                         {module + "wk.weight", {4, 4}},
                                         {module + "wv.weight", {4, 4}},
                                         {"norm.weight", {4}}},
                                        {.ranks = 3});
  auto fused = checkpoints::FuseOptimizer(std::move(made), {{"kv_heads", 2}}, {});
  EXPECT_TRUE(fused) << fused.error().message;
  return fused ? std::move(fused->checkpoint) : Checkpoint();
}

MapsAsked AskFor(bool weights_alone) {
  MapsAsked asked;
  asked.sides = {"hf"};
  asked.weights_alone = weights_alone;
  return asked;
}

TEST(MapFlags, NameTheSizeThatIsMissing) {
  for (const bool alone : {false, true}) {
    const auto flags = MapFlagsFor(Titan(), AskFor(alone), {}, "");
    ASSERT_TRUE(flags) << flags.error().message;
    EXPECT_EQ(std::ranges::count(*flags, "--map llama:hf --map-sizes kv_heads=N"), 1)
        << testing::PrintToString(*flags);
  }
}

TEST(MapFlags, AreThoseOfAutoIfTheConfigIsKnown) {
  const auto flags =
      MapFlagsFor(Titan(), AskFor(false), {}, "x/config.json\n{\"model_type\": \"llama\"}");
  ASSERT_TRUE(flags) << flags.error().message;
  EXPECT_EQ(*flags, std::vector<std::string>{"--map auto"});
}

TEST(MapFlags, AreNoneForNamesThatAreWanted) {
  MapsAsked asked;
  asked.sides = {"torchtitan"};
  const auto flags = MapFlagsFor(Titan(), asked, {}, "");
  ASSERT_TRUE(flags) << flags.error().message;
  EXPECT_TRUE(flags->empty());
}

TEST(MapFlags, ExportsOfWeightsSplitNoOptimizerState) {
  const auto comm = comm::MakeSerialComm();
  for (const bool alone : {false, true}) {
    MapsAsked asked = AskFor(alone);
    asked.maps = {"llama:hf"};
    asked.sizes = "kv_heads=2";
    const auto choices = ReadMaps(*comm, asked);
    ASSERT_TRUE(choices) << choices.error().message;
    Checkpoint source = Titan();
    NullSink sink;
    const auto used = UseMaps(*choices, asked, "", {}, &source, sink);
    ASSERT_TRUE(used) << used.error().message;
    EXPECT_EQ(used->size(), alone ? 1U : 2U);
    EXPECT_EQ(used->back().name, "llama");
    EXPECT_TRUE(source.fused.empty());
  }
}

TEST(MapFlags, SizesThatNoMapHasAreRefused) {
  const auto comm = comm::MakeSerialComm();
  MapsAsked asked = AskFor(false);
  asked.maps = {"qwen3:hf"};
  for (const auto& [sizes, known] : {std::pair("kv_heads=2", true), std::pair("bits=4", false)}) {
    asked.sizes = sizes;
    const auto choices = ReadMaps(*comm, asked);
    ASSERT_TRUE(choices) << choices.error().message;
    Checkpoint source = Titan();
    NullSink sink;
    const auto used = UseMaps(*choices, asked, "", {}, &source, sink);
    const std::string why = used ? "" : used.error().message;
    EXPECT_EQ(why.find("unknown size") == std::string::npos, known) << why;
  }
}

}  // namespace
}  // namespace shardwright::convert
