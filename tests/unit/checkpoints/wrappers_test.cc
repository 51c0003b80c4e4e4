// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/wrappers.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace shardwright::checkpoints {
namespace {

using Names = std::vector<std::string_view>;

TEST(Wrappers, AdaptersHaveTheirNameInTheModel) {
  EXPECT_TRUE(IsWithAdapter("q.lora_A.default.weight", "q.lora_A.weight"));
  EXPECT_TRUE(IsWithAdapter("lm_head.modules_to_save.default.weight", "lm_head.weight"));
  EXPECT_FALSE(IsWithAdapter("q.lora_A.weight", "q.lora_A.weight"));
  EXPECT_FALSE(IsWithAdapter("q.lora_B.default.weight", "q.lora_A.weight"));
  EXPECT_FALSE(IsWithAdapter("_orig_mod.q.lora_A.default.weight", "q.lora_A.weight"));
}

TEST(Wrappers, PlainNamesAreWithoutThem) {
  EXPECT_EQ(PlainName("_orig_mod.layers.0.weight"), "layers.0.weight");
  EXPECT_EQ(PlainName("layers.0._checkpoint_wrapped_module.mlp.weight"), "layers.0.mlp.weight");
  EXPECT_EQ(PlainName("_fsdp_wrapped_module.a._fsdp_wrapped_module.b"), "a.b");
  EXPECT_EQ(PlainName("q_proj.lora_A.default.weight"), "q_proj.lora_A.weight");
  EXPECT_EQ(PlainName("q_proj.lora_A.weight"), "q_proj.lora_A.weight");
  EXPECT_EQ(PlainName("wte.lora_embedding_A.default"), "wte.lora_embedding_A");
  EXPECT_EQ(PlainName("lm_head.modules_to_save.default.weight"), "lm_head.weight");
  EXPECT_EQ(PlainName("default.weight"), "default.weight");
  EXPECT_EQ(PlainName("module.weight"), "module.weight");
}

TEST(Wrappers, NamesInFilesOfPeftLackTheAdapter) {
  EXPECT_EQ(PeftName("model.q_proj.lora_A.default.weight"), "model.q_proj.lora_A.weight");
  EXPECT_EQ(PeftName("lm_head.modules_to_save.default.weight"), "lm_head.weight");
  EXPECT_EQ(PeftName("q_proj.lora_A.weight"), "q_proj.lora_A.weight");
  EXPECT_EQ(PeftName("_orig_mod.q_proj.lora_A.default.weight"),
            "_orig_mod.q_proj.lora_A.default.weight");
  EXPECT_EQ(PeftName("_orig_mod.mlp.weight"), "_orig_mod.mlp.weight");
}

TEST(Wrappers, NamesOfModelAndOptimizerAreMatched) {
  const auto match = [](const Names& model, const Names& optimizer) {
    std::string text;
    const auto matched = MatchNames(model, optimizer);
    for (const std::string_view name : optimizer) {
      const auto found = matched.find(name);
      text += (text.empty() ? "" : " ") + std::string(found == matched.end() ? "-" : found->second);
    }
    return text;
  };
  EXPECT_EQ(match({"a", "b"}, {"b", "a", "c"}), "b a -");
  EXPECT_EQ(match({"_orig_mod.a", "_orig_mod.b"}, {"a", "b"}), "_orig_mod.a _orig_mod.b");
  EXPECT_EQ(match({"a", "b"}, {"_orig_mod.a", "_orig_mod.b"}), "a b");
  EXPECT_EQ(match({"module.a", "module.b"}, {"a", "b"}), "module.a module.b");
  EXPECT_EQ(match({"a.x", "b.x"}, {"model.a.x", "model.b.x"}), "a.x b.x");
  EXPECT_EQ(match({"q.lora_A.weight"}, {"q.lora_A.default.weight"}), "q.lora_A.weight");
  // Not all names of a scheme start with it, so it may be a module of the model.
  EXPECT_EQ(match({"module.a", "b"}, {"a"}), "-");
  // Two adapters have the same names except for their own.
  EXPECT_EQ(match({"q.lora_A.weight"}, {"q.lora_A.one.weight", "q.lora_A.two.weight"}), "- -");
}

std::string Removed(const Names& names, bool lightning = false) {
  const Unwrapped unwrapped = Unwrap(names, lightning);
  std::string text;
  for (const std::string& name : unwrapped.names) text += (text.empty() ? "" : " ") + name;
  return text;
}

TEST(Wrappers, AreRemovedOnlyWhereTheyAreKnown) {
  EXPECT_EQ(Removed({"_orig_mod.a.w", "b.w"}), "a.w b.w");
  EXPECT_EQ(Removed({"module.a.w", "module.b.w"}), "a.w b.w");
  EXPECT_EQ(Removed({"module.a.w", "b.w"}), "module.a.w b.w");
  EXPECT_EQ(Removed({"module._orig_mod.a.w", "module._orig_mod.b.w"}), "a.w b.w");
  // A language model with tied embeddings has "model." in front of all names itself.
  EXPECT_EQ(Removed({"model.embed.weight", "model.norm.weight"}),
            "model.embed.weight model.norm.weight");
  EXPECT_EQ(Removed({"model.embed.weight", "model.norm.weight"}, true), "embed.weight norm.weight");
  EXPECT_EQ(Removed({"model.model.norm.weight", "model.lm_head.weight"}),
            "model.norm.weight lm_head.weight");
}

TEST(Wrappers, StayWhereTwoNamesWouldBecomeOne) {
  EXPECT_EQ(Removed({"_orig_mod.a.w", "a.w"}), "_orig_mod.a.w a.w");
  EXPECT_FALSE(Unwrap(Names{"_orig_mod.a.w", "a.w"}, false).changed());
}

}  // namespace
}  // namespace shardwright::checkpoints
