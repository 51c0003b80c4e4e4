// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/tp_rules/patterns.h"

#include <gtest/gtest.h>

#include "checkpoints/deepspeed/common/universal_info.h"
#include "checkpoints/tp_rules/expression.h"
#include "fixtures.h"

namespace shardwright::checkpoints {
namespace {

using layout::Split;

struct Known {
  std::string name;
  Shape whole;
  std::vector<Shape> shards;  // of two ranks, as DeepSpeed AutoTP 0.19.8 makes them
};

struct Family {
  std::string name;
  std::vector<Known> params;
};

void PrintTo(const Family& family, std::ostream* out) { *out << family.name; }

Known Same(const std::string& name, const Shape& shape) { return {name, shape, {shape, shape}}; }
Known Rows(const std::string& name, const Shape& shape) {
  Shape half = shape;
  half[0] /= 2;
  return {name, shape, {half, half}};
}
Known Columns(const std::string& name, const Shape& shape) {
  Shape half = shape;
  half[1] /= 2;
  return {name, shape, {half, half}};
}
Known Head(const std::string& name) { return {name, {61, 32}, {{31, 32}, {30, 32}}}; }

std::vector<Family> Families() {
  const std::string l = "model.layers.0.";
  const std::string n = "gpt_neox.layers.0.";
  const std::string h = "transformer.h.0.";
  const std::string o = "model.decoder.layers.0.";
  const std::string m = "3.";
  return {
      {"hf_llama",
       {Same("model.embed_tokens.weight", {61, 32}), Rows(l + "self_attn.q_proj.weight", {32, 32}),
        Rows(l + "self_attn.k_proj.weight", {16, 32}), Rows(l + "self_attn.v_proj.bias", {16}),
        Columns(l + "self_attn.o_proj.weight", {32, 32}), Same(l + "self_attn.o_proj.bias", {32}),
        Same(l + "self_attn.q_norm.weight", {8}), Rows(l + "mlp.gate_proj.weight", {64, 32}),
        Rows(l + "mlp.up_proj.bias", {64}), Columns(l + "mlp.down_proj.weight", {32, 64}),
        Same(l + "mlp.down_proj.bias", {32}), Same(l + "input_layernorm.weight", {32}),
        Same(l + "post_attention_layernorm.weight", {32}), Same("model.norm.weight", {32}),
        Head("lm_head.weight")}},
      {"hf_gpt_neox",
       {Same("gpt_neox.embed_in.weight", {61, 32}), Same(n + "input_layernorm.bias", {32}),
        Rows(n + "attention.query_key_value.weight", {96, 32}),
        Rows(n + "attention.query_key_value.bias", {96}),
        Columns(n + "attention.dense.weight", {32, 32}), Same(n + "attention.dense.bias", {32}),
        Rows(n + "mlp.dense_h_to_4h.weight", {64, 32}), Rows(n + "mlp.dense_h_to_4h.bias", {64}),
        Columns(n + "mlp.dense_4h_to_h.weight", {32, 64}), Same(n + "mlp.dense_4h_to_h.bias", {32}),
        Same("gpt_neox.final_layer_norm.weight", {32}), Head("lm_head.weight")}},
      {"hf_bloom",
       {Same("transformer.word_embeddings.weight", {61, 32}),
        Same("transformer.word_embeddings_layernorm.weight", {32}),
        Rows(h + "self_attention.query_key_value.weight", {96, 32}),
        Columns(h + "self_attention.dense.weight", {32, 32}),
        Rows(h + "mlp.dense_h_to_4h.bias", {128}),
        Columns(h + "mlp.dense_4h_to_h.weight", {32, 128}), Same("transformer.ln_f.bias", {32})}},
      {"hf_opt",
       {Same("model.decoder.embed_tokens.weight", {61, 32}),
        Same("model.decoder.embed_positions.weight", {18, 32}),
        Rows(o + "self_attn.k_proj.weight", {32, 32}), Rows(o + "self_attn.q_proj.bias", {32}),
        Columns(o + "self_attn.out_proj.weight", {32, 32}),
        Same(o + "self_attn.out_proj.bias", {32}), Rows(o + "fc1.weight", {64, 32}),
        Rows(o + "fc1.bias", {64}), Columns(o + "fc2.weight", {32, 64}), Same(o + "fc2.bias", {32}),
        Same(o + "self_attn_layer_norm.weight", {32}), Same(o + "final_layer_norm.bias", {32})}},
      {"hf_falcon",
       {Same("transformer.word_embeddings.weight", {61, 32}),
        Rows(h + "self_attention.query_key_value.weight", {64, 32}),
        Columns(h + "self_attention.dense.weight", {32, 32}),
        Rows(h + "mlp.dense_h_to_4h.weight", {128, 32}),
        Columns(h + "mlp.dense_4h_to_h.weight", {32, 128}), Same(h + "ln_attn.weight", {32}),
        Same(h + "ln_mlp.bias", {32}), Same("transformer.ln_f.weight", {32})}},
      // Not of AutoTP: by the storage order of the weights.
      {"hf_gpt2",
       {Same("transformer.wte.weight", {61, 32}), Same("transformer.wpe.weight", {16, 32}),
        Columns(h + "attn.c_attn.weight", {32, 96}), Rows(h + "attn.c_attn.bias", {96}),
        Rows(h + "attn.c_proj.weight", {32, 32}), Same(h + "attn.c_proj.bias", {32}),
        Columns(h + "mlp.c_fc.weight", {32, 128}), Rows(h + "mlp.c_fc.bias", {128}),
        Rows(h + "mlp.c_proj.weight", {128, 32}), Same(h + "ln_1.weight", {32}),
        Same("transformer.ln_f.bias", {32})}},
      {"megatron_gpt",
       {Rows("tied_modules.embed.word_embeddings.weight", {256, 32}),
        Same("tied_modules.embed.word_embeddings.norm.weight", {32}),
        Rows(m + "self_attention.query_key_value.weight", {96, 32}),
        Columns(m + "self_attention.dense.weight", {32, 32}),
        Same(m + "self_attention.dense.bias", {32}),
        Rows(m + "mlp.dense_h_to_4h.weight", {128, 32}),
        Columns(m + "mlp.dense_4h_to_h.weight", {32, 128}),
        Same(m + "input_layernorm.weight", {32}), Same("30.weight", {32})}},
  };
}

class EachFamily : public testing::TestWithParam<Family> {
 protected:
  // The built-in patterns for this model, by its whole shapes.
  Patterns Chosen() const {
    Patterns all;
    EXPECT_TRUE(all.AddBuiltIn().has_value());
    std::vector<std::string> names;
    std::vector<Shape> shapes;
    for (const Known& known : GetParam().params) {
      names.push_back(known.name);
      shapes.push_back(known.whole);
    }
    return all.ForModel(names, shapes);
  }
};

TEST_P(EachFamily, CutsEveryParameterAsItsTrainer) {
  const Patterns patterns = Chosen();
  for (const Known& known : GetParam().params) {
    const auto ruled = patterns.RuleFor(known.name, std::span(&known.whole, 1));
    ASSERT_TRUE(ruled.has_value()) << ruled.error().message;
    ASSERT_TRUE(ruled->has_value()) << known.name;
    EXPECT_NE((*ruled)->rule.origin.find("patterns/"), std::string::npos);
    for (std::uint64_t rank = 0; rank < 2; ++rank) {
      const auto shard = layout::ShardShape((*ruled)->rule, (*ruled)->whole, 2, rank);
      ASSERT_TRUE(shard.has_value()) << known.name << ": " << shard.error().message;
      EXPECT_EQ(*shard, known.shards[rank]) << known.name;
    }
    const auto back = patterns.RuleFor(known.name, known.shards);
    ASSERT_TRUE(back.has_value()) << back.error().message;
    EXPECT_EQ((*back)->whole, known.whole) << known.name;
  }
}

TEST_P(EachFamily, AppliesToItsOwnModelOnly) {
  const Patterns patterns = Chosen();
  for (const Family& other : Families()) {
    const bool akin = other.name == GetParam().name || other.name.substr(0, 3) != "hf_" ||
                      GetParam().name == "hf_bloom" || GetParam().name == "hf_falcon";
    if (akin) continue;
    std::size_t known = 0;
    for (const Known& param : other.params) {
      known += patterns.Find(param.name, param.whole).has_value() ? 1U : 0U;
    }
    EXPECT_LT(known, other.params.size()) << other.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Patterns, EachFamily, testing::ValuesIn(Families()),
                         [](const auto& test) { return test.param.name; });

Patterns Chosen(const std::vector<std::string>& names, const std::vector<Shape>& shapes) {
  Patterns all;
  EXPECT_TRUE(all.AddBuiltIn().has_value());
  return all.ForModel(names, shapes);
}

TEST(Patterns, Gpt2CutsQueryKeyAndValueOneByOne) {
  const Patterns patterns =
      Chosen({"h.0.attn.c_attn.weight", "h.0.mlp.c_fc.weight"}, {{2, 12}, {2, 8}});
  const auto rule = patterns.Find("h.0.attn.c_attn.weight", {2, 12});
  ASSERT_TRUE(rule.has_value());
  EXPECT_EQ(rule->split, Split::kSub);
  EXPECT_EQ(rule->dim, 1U);
  const layout::Cut cut = layout::MakeCut(*rule, {2, 12}, 2, 1).value();
  ASSERT_EQ(cut.boxes().size(), 3U);
  EXPECT_EQ(cut.boxes()[1].at_view, (Shape{0, 6}));
  EXPECT_EQ(cut.boxes()[1].at_shard, (Shape{0, 2}));
}

TEST(Patterns, SwiGluIsToldByTheShapes) {
  const std::vector<std::string> names{"3.self_attention.query_key_value.weight",
                                       "3.mlp.dense_h_to_4h.weight", "3.mlp.dense_4h_to_h.weight"};
  const auto plain = Chosen(names, {{24, 8}, {32, 8}, {8, 32}}).Find(names[1], {32, 8});
  const auto gated = Chosen(names, {{24, 8}, {32, 8}, {8, 16}}).Find(names[1], {32, 8});
  ASSERT_TRUE(plain && gated);
  EXPECT_EQ(plain->split, Split::kDim);
  EXPECT_EQ(gated->split, Split::kSub);
  EXPECT_EQ(gated->sub_sizes, (std::vector<std::uint64_t>{16, 16}));
  EXPECT_FALSE(Chosen(names, {{24, 8}, {32, 8}, {8, 24}}).Find(names[1], {32, 8}));
}

TEST(Patterns, TheUsersFilesComeFirst) {
  Patterns patterns;
  ASSERT_TRUE(patterns.AddBuiltIn().has_value());
  ASSERT_TRUE(patterns
                  .AddFile(R"({"family": "mine", "rules": [{"match": ".*k_proj\\.weight",
                               "split": "dim", "dim": 0, "granule": 8, "uneven": true}]})",
                           "mine.json")
                  .has_value());
  const Patterns chosen = patterns.ForModel(
      {"layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight"}, {{8, 8}, {8, 8}});
  const auto rule = chosen.Find("layers.0.self_attn.k_proj.weight", {16, 4});
  ASSERT_TRUE(rule.has_value());
  EXPECT_EQ(rule->origin, "mine.json rule 1");
  EXPECT_EQ(layout::ShardShape(*rule, {16, 4}, 4, 3).value(), (Shape{0, 4}));
  EXPECT_EQ(chosen.Find("layers.0.self_attn.v_proj.weight", {16, 4})->origin,
            "patterns/hf_llama.json rule 1");
  // The whole name has to match, and built-in families only for their model.
  EXPECT_FALSE(chosen.Find("layers.0.self_attn.k_proj.weight.more", {16, 4}));
  EXPECT_FALSE(patterns.Find("layers.0.self_attn.v_proj.weight", {16, 4}));
}

TEST(Patterns, SubTensorsByRatioSizeAndView) {
  Patterns patterns;
  ASSERT_TRUE(patterns
                  .AddFile(R"({"family": "mine", "rules": [
      {"match": "gqa", "split": "sub", "dim": 0, "ratio": [4, 1, 1], "granule": [4, 4, 4], "uneven": true},
      {"match": "sized", "split": "sub", "dim": 0, "sizes": [4, 2]},
      {"match": "viewed", "split": "sub", "dim": 1, "sizes": [4], "view": [2, 4, -1]},
      {"match": "fixed", "split": "sub", "dim": 0, "sizes": [2, 2], "view": [4, 4]},
      {"match": "vocab", "split": "dim", "dim": 0, "padded": true, "rows": 9, "granule": 4}]})",
                           "mine.json")
                  .has_value());
  const auto gqa = patterns.Find("gqa", {24, 3});
  ASSERT_TRUE(gqa.has_value());
  EXPECT_EQ(layout::RuleWidths(*gqa, {24, 3}, 2).value(),
            (std::vector<std::vector<std::uint64_t>>{{8, 8}, {4, 0}, {4, 0}}));
  const std::vector<Shape> sized{{3, 2}, {3, 2}};
  EXPECT_EQ((*patterns.RuleFor("sized", sized))->whole, (Shape{6, 2}));
  const std::vector<Shape> wrong{{4, 2}, {4, 2}};
  EXPECT_EQ(patterns.RuleFor("sized", wrong).error().code, Errc::kBadInput);
  const std::vector<Shape> uneven{{4, 2}, {2, 2}};
  EXPECT_EQ(patterns.RuleFor("sized", uneven).error().code, Errc::kBadInput);
  const std::vector<Shape> viewed{{4, 3}, {4, 3}};
  EXPECT_EQ((*patterns.RuleFor("viewed", viewed))->whole, (Shape{8, 3}));
  // A view without a rest has exactly the tensor's elements, one with a rest a multiple of them.
  const std::vector<Shape> halves{{2, 4}, {2, 4}};
  EXPECT_EQ((*patterns.RuleFor("fixed", halves))->whole, (Shape{4, 4}));
  for (const auto& [name, shape] : {std::pair("fixed", Shape{4, 4}), {"viewed", Shape{3, 3}}}) {
    const std::vector<Shape> other{shape, shape};
    const auto refused = patterns.RuleFor(name, other);
    ASSERT_FALSE(refused.has_value()) << name;
    EXPECT_NE(refused.error().message.find("elements"), std::string::npos)
        << refused.error().message;
  }
  const std::vector<Shape> vocab{{8, 3}, {8, 3}};
  EXPECT_EQ((*patterns.RuleFor("vocab", vocab))->whole, (Shape{9, 3}));
  const std::vector<Shape> small{{4, 3}, {4, 3}};
  EXPECT_EQ(patterns.RuleFor("vocab", small).error().code, Errc::kBadInput);
}

TEST(Patterns, MeshesSplitSeveralDimensions) {
  Patterns patterns;
  ASSERT_TRUE(patterns
                  .AddFile(R"({"family": "mine", "rules": [
      {"match": "w", "split": "mesh", "axes": [{"ranks": 2, "split": "dim", "dim": 0},
                                               {"split": "dim", "dim": 1, "granule": 2, "uneven": true}]},
      {"match": "stack", "note": "gate and up", "split": "mesh",
       "axes": [{"ranks": 2, "split": "sub", "dim": 0, "ratio": [2, 1]},
                {"ranks": 2, "split": "dim", "dim": 1}]},
      {"match": "bias", "split": "mesh", "axes": [{"ranks": 2, "split": "dim", "dim": 0},
                                                  {"split": "replicated"}]}]})",
                           "mine.json")
                  .has_value());
  // From a whole tensor, for numbers of ranks that the mesh allows.
  const auto rule = patterns.Find("w", {4, 10});
  ASSERT_TRUE(rule.has_value());
  EXPECT_EQ(layout::ShardShape(*rule, {4, 10}, 4, 0).value(), (Shape{2, 6}));
  EXPECT_EQ(layout::ShardShape(*rule, {4, 10}, 6, 5).value(), (Shape{2, 2}));
  EXPECT_EQ(layout::ShardShape(*rule, {4, 10}, 5, 0).error().code, Errc::kUnsupported);
  // From shards, which show the widths.
  const std::vector<Shape> shards{{3, 7}, {3, 2}, {1, 7}, {1, 2}};
  const auto ruled = patterns.RuleFor("w", shards);
  ASSERT_TRUE(ruled.has_value()) << ruled.error().message;
  EXPECT_EQ((*ruled)->whole, (Shape{4, 9}));
  EXPECT_EQ(layout::MakeCut((*ruled)->rule, {4, 9}, 4, 3).value().boxes()[0].at_view,
            (Shape{3, 7}));
  const std::vector<Shape> halves{{3, 2}, {3, 2}, {3, 2}, {3, 2}};
  const auto stack = patterns.RuleFor("stack", halves);
  ASSERT_TRUE(stack.has_value()) << stack.error().message;
  EXPECT_EQ((*stack)->whole, (Shape{6, 4}));
  const layout::Cut cut = layout::MakeCut((*stack)->rule, {6, 4}, 4, 3).value();
  ASSERT_EQ(cut.boxes().size(), 2U);
  EXPECT_EQ(cut.boxes()[0].at_view, (Shape{2, 2}));
  EXPECT_EQ(cut.boxes()[1].at_view, (Shape{5, 2}));
  const std::vector<Shape> copies(4, Shape{3});
  EXPECT_EQ((*patterns.RuleFor("bias", copies))->whole, (Shape{6}));
  struct Wrong {
    std::string name;
    std::vector<Shape> shards;
    std::vector<std::string> words;
  };
  for (const Wrong& wrong : std::vector<Wrong>{
           {"w", {{3, 7}, {3, 2}, {1, 7}, {1, 3}}, {"rank 3", "[1, 2]", "[1, 3]"}},
           {"w", {{3, 7}, {3, 2}, {1, 7}}, {"3 tensor-parallel ranks", "2 x any"}},
           {"stack", {{4, 2}, {4, 2}, {4, 2}, {4, 2}}, {"8", "3 parts"}},
           {"bias", {{3}, {2}, {3}, {3}}, {"rank 1", "[3]", "[2]"}},
       }) {
    const auto refused = patterns.RuleFor(wrong.name, wrong.shards);
    ASSERT_FALSE(refused.has_value()) << wrong.name;
    const std::string& said = refused.error().message;
    EXPECT_EQ(said.rfind("\"" + wrong.name + "\": mine.json rule ", 0), 0U) << said;
    for (const std::string& word : wrong.words) {
      EXPECT_NE(said.find(word), std::string::npos) << said;
    }
  }
}

TEST(Patterns, ErrorsNameFileRuleAndKey) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"{", "line 1, column 2: unexpected end of the text"},
      {"[]", "object expected"},
      {R"({"family": "f"})", "\"rules\""},
      {R"({"rules": []})", "\"family\""},
      {R"({"family": "f", "rules": [], "more": 1})", "\"more\""},
      {R"({"family": "f", "version": 2, "rules": []})", "\"version\""},
      {R"({"family": "f", "rules": [{"split": "dim", "dim": 0}]})", "rule 1: key \"match\""},
      {R"({"family": "f", "rules": [{"match": "(", "split": "replicated"}]})", "\"match\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "half"}]})", "\"half\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "dim"}]})", "\"dim\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "dim", "dim": -1}]})", "\"dim\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "dim", "dim": 64}]})", "\"dim\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "replicated", "dim": 0}]})", "\"dim\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "sub", "dim": 0}]})", "\"sizes\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "sub", "dim": 0, "sizes": [1], "ratio": [1]}]})",
       "\"ratio\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "sub", "dim": 0, "ratio": [0]}]})",
       "\"ratio\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "sub", "dim": 0, "ratio": [1, 1, 1], "granule": [1, 1]}]})",
       "\"granule\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "sub", "dim": 2, "ratio": [1, 1], "view": [2, -1]}]})",
       "view"},
      {R"({"family": "f", "rules": [{"match": "a", "split": "sub", "dim": 0, "ratio": [1, 1], "view": [-1, -1]}]})",
       "\"view\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "dim", "dim": 0, "rows": 5}]})",
       "\"rows\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "dim", "dim": 1, "padded": true}]})",
       "\"padded\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "dim", "dim": 0, "uneven": 1}]})",
       "\"uneven\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "mesh"}]})", "rule 1: key \"axes\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "mesh", "axes": 2}]})", "\"axes\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "mesh", "axes": [2]}]})", "axis 1"},
      {R"({"family": "f", "rules": [{"match": "a", "split": "mesh", "axes": [], "dim": 0}]})",
       "\"dim\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "mesh", "axes": [{"split": "dim", "dim": 0}]}]})",
       "2 axes"},
      {R"({"family": "f", "rules": [{"match": "a", "split": "mesh", "axes": [{"split": "dim", "dim": 0}, {"split": "average", "ranks": 2}]}]})",
       "rule 1: axis 2: key \"split\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "mesh", "axes": [{"split": "dim", "dim": 0}, {"split": "dim", "ranks": 2}]}]})",
       "rule 1: axis 2: key \"dim\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "mesh", "axes": [{"split": "dim", "dim": 0}, {"split": "dim", "dim": 0, "ranks": 2}]}]})",
       "dimension 0"},
      {R"({"family": "f", "rules": [{"match": "a", "split": "mesh", "axes": [{"split": "dim", "dim": 0, "ranks": 0}, {"split": "dim", "dim": 1}]}]})",
       "\"ranks\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "mesh", "axes": [{"split": "dim", "dim": 0}, {"split": "dim", "dim": 1}]}]})",
       "axis 2"},
      {R"({"family": "f", "rules": [{"match": "a", "split": "mesh", "axes": [{"split": "dim", "dim": 0, "padded": true}, {"split": "dim", "dim": 1, "ranks": 2}]}]})",
       "axis 1"},
      {R"({"family": "f", "rules": [{"match": "a", "split": "mesh", "axes": [{"split": "dim", "dim": 0}, {"split": "sub", "dim": 1, "ratio": [1], "view": [2, 2], "ranks": 2}]}]})",
       "axis 2: key \"view\""},
      {R"({"family": "f", "rules": [{"match": "a", "split": "dim", "dim": 0, "ranks": 2}]})",
       "\"ranks\""},
      {R"({"family": "f", "requires": [1], "rules": []})", "\"requires\""},
      {R"({"family": "f", "requires_shapes": [{"match": "a"}], "rules": []})", "\"of\""},
  };
  for (const auto& [text, words] : bad) {
    Patterns patterns;
    const Status added = patterns.AddFile(text, "mine.json");
    ASSERT_FALSE(added.has_value()) << text;
    EXPECT_EQ(added.error().code, Errc::kBadInput) << text;
    EXPECT_EQ(added.error().message.rfind("mine.json: ", 0), 0U) << added.error().message;
    EXPECT_NE(added.error().message.find(words), std::string::npos) << added.error().message;
  }
}

Result<Ruled> Decide(const UniversalInfo& info, const Patterns& patterns, const std::string& name,
                     std::span<const Shape> shards) {
  const RuleSource* const own = &info;
  return DecideRule(std::span(&own, 1), patterns, name, shards);
}

TEST(Patterns, ExpressionsMatchTheWholeNameOrItsBeginning) {
  const auto expression = CompileExpression("layers\\.([0-9]+)\\.(weight|bias)");
  ASSERT_TRUE(expression->ok());
  std::vector<re2::StringPiece> groups(3);
  ASSERT_TRUE(MatchExpression(*expression, "layers.12.bias", re2::RE2::ANCHOR_BOTH, groups));
  EXPECT_EQ(groups[1], "12");
  EXPECT_EQ(groups[2], "bias");
  EXPECT_FALSE(MatchExpression(*expression, "layers.12.bias.0"));
  EXPECT_FALSE(MatchExpression(*expression, "model.layers.12.bias"));
  EXPECT_TRUE(MatchExpression(*expression, "layers.12.bias.0", re2::RE2::ANCHOR_START));
  EXPECT_FALSE(MatchExpression(*expression, "model.layers.12.bias", re2::RE2::ANCHOR_START));
  EXPECT_FALSE(CompileExpression("layers.(")->ok());
}

TEST(DecideRule, AsksTheUserThenTheCheckpointThenTheFamily) {
  pickle::Arena arena;
  pickle::Node* dict = arena.Dict();
  Set(arena, dict, "tp_replicated_parameter_patterns", arena.List({arena.String("^lm_head")}));
  const auto info = UniversalInfo::Parse(dict);
  ASSERT_TRUE(info.has_value());
  Patterns patterns;
  ASSERT_TRUE(patterns.AddBuiltIn().has_value());
  const std::vector<std::string> names{"a.self_attn.q_proj.weight", "a.mlp.gate_proj.weight"};
  const std::vector<Shape> shapes{{4, 4}, {4, 4}};
  const std::vector<Shape> head{{3, 4}, {3, 4}};
  const Patterns chosen = patterns.ForModel(names, shapes);
  EXPECT_EQ(Decide(*info, chosen, "lm_head.weight", head)->rule.split, Split::kReplicated);
  EXPECT_EQ(Decide(UniversalInfo(), chosen, "lm_head.weight", head)->rule.split, Split::kDim);
  ASSERT_TRUE(patterns
                  .AddFile(R"({"family": "u", "rules": [{"match": "lm_head.weight", "split": "dim",
                               "dim": 1}]})",
                           "u.json")
                  .has_value());
  EXPECT_EQ(Decide(*info, patterns.ForModel(names, shapes), "lm_head.weight", head)->whole,
            (Shape{3, 8}));
  // One rank and no matching pattern: valid until a target has more ranks.
  const Shape alone{3, 4};
  EXPECT_EQ(Decide(UniversalInfo(), chosen, "odd.weight", std::span(&alone, 1))->rule.split,
            Split::kUnknown);
  const auto refused = Decide(UniversalInfo(), chosen, "odd.weight", head);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_NE(refused.error().message.find(R"("match": "odd\\.weight")"), std::string::npos)
      << refused.error().message;
  EXPECT_NE(refused.error().message.find("[3, 8]"), std::string::npos);
}

TEST(DecideRule, TheFamilyTellsHowOtherRanksAreMade) {
  Patterns patterns;
  ASSERT_TRUE(patterns.AddBuiltIn().has_value());
  const Patterns chosen =
      patterns.ForModel({"a.self_attn.q_proj.weight", "a.mlp.gate_proj.weight"}, {{4, 4}, {4, 4}});
  pickle::Arena arena;
  pickle::Node* dict = arena.Dict();
  Set(arena, dict, "tp_replicated_parameter_patterns", arena.List({arena.String("^norm")}));
  const auto info = UniversalInfo::Parse(dict);
  const std::vector<Shape> head{{31, 4}, {30, 4}};
  const auto ruled = Decide(*info, chosen, "lm_head.weight", head);
  ASSERT_TRUE(ruled.has_value());
  EXPECT_EQ(ruled->rule.origin, "universal_checkpoint_info");
  EXPECT_EQ(layout::ShardShape(ruled->rule, ruled->whole, 3, 0).value(), (Shape{21, 4}));
}

}  // namespace
}  // namespace shardwright::checkpoints
