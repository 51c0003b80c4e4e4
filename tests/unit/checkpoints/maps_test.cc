// SPDX-License-Identifier: Apache-2.0
// Maps between model families: their effect on names, shapes, elements, groups and order.

#include "checkpoints/name_maps/maps.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "checkpoints/name_maps/map_internal.h"
#include "map_model.h"

namespace shardwright::checkpoints {
namespace {

std::vector<std::string> NamesOf(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const Param& param : checkpoint.params) names.push_back(param.name);
  return names;
}

/// A Llama of two layers: 2 key-value heads, 3 query heads each, heads of 4.
std::vector<std::pair<std::string, Shape>> TinyLlama() {
  std::vector<std::pair<std::string, Shape>> tensors = {{"model.embed_tokens.weight", {10, 5}}};
  for (const char* layer : {"0", "1"}) {
    const std::string prefix = std::string("model.layers.") + layer + ".";
    tensors.push_back({prefix + "self_attn.q_proj.weight", {24, 5}});
    tensors.push_back({prefix + "self_attn.k_proj.weight", {8, 5}});
    tensors.push_back({prefix + "self_attn.v_proj.weight", {8, 5}});
    tensors.push_back({prefix + "self_attn.o_proj.weight", {5, 24}});
    tensors.push_back({prefix + "mlp.gate_proj.weight", {7, 5}});
    tensors.push_back({prefix + "mlp.up_proj.weight", {7, 5}});
    tensors.push_back({prefix + "mlp.down_proj.weight", {5, 7}});
    tensors.push_back({prefix + "input_layernorm.weight", {5}});
    tensors.push_back({prefix + "post_attention_layernorm.weight", {5}});
  }
  tensors.push_back({"model.norm.weight", {5}});
  tensors.push_back({"lm_head.weight", {10, 5}});
  return tensors;
}

ModelMap Llama() { return *ModelMap::BuiltIn("llama"); }

const Spread kSpreads[] = {{1, false}, {1, true}, {3, false}, {3, true}};

TEST(Maps, QueriesKeysAndValuesLieGroupByGroup) {
  for (const Spread& spread : kSpreads) {
    const Checkpoint source = MadeUp(TinyLlama(), spread);
    const auto before = ElementsOf(source.map);
    const Mapped mapped = Map(Llama(), {"", "megatron", {{"kv_heads", 2}}}, source);
    EXPECT_EQ(mapped.from, "hf");
    EXPECT_EQ(mapped.sizes.at("head_dim"), 4u);
    EXPECT_EQ(mapped.sizes.at("heads"), 6u);
    const auto after = ElementsOf(mapped.checkpoint.map);
    const auto& qkv = after.at("decoder.layers.1.self_attention.linear_qkv.weight exp_avg");
    std::vector<ElementId> expected;
    const auto add_rows = [&](const char* name, std::size_t first, std::size_t count) {
      const auto& from =
          before.at(std::string("model.layers.1.self_attn.") + name + "_proj.weight exp_avg");
      expected.insert(expected.end(), from.begin() + static_cast<std::ptrdiff_t>(first * 5),
                      from.begin() + static_cast<std::ptrdiff_t>((first + count) * 5));
    };
    for (const std::size_t group : {0u, 1u}) {
      add_rows("q", group * 12, 12);
      add_rows("k", group * 4, 4);
      add_rows("v", group * 4, 4);
    }
    EXPECT_EQ(qkv, expected);
    std::vector<ElementId> gated = before.at("model.layers.0.mlp.gate_proj.weight fp32");
    const auto& up = before.at("model.layers.0.mlp.up_proj.weight fp32");
    gated.insert(gated.end(), up.begin(), up.end());
    EXPECT_EQ(after.at("decoder.layers.0.mlp.linear_fc1.weight fp32"), gated);
    EXPECT_EQ(mapped.checkpoint.params.size(), 3u + 2 * 6);
  }
}

TEST(Maps, RotaryPairsBecomeNeighbours) {
  const Checkpoint source = MadeUp(TinyLlama(), {3, true});
  const auto before = ElementsOf(source.map);
  const Mapped mapped = Map(Llama(), {"", "torchtitan", {{"head_dim", 4}}}, source);
  const auto after = ElementsOf(mapped.checkpoint.map);
  const auto& q = before.at("model.layers.0.self_attn.q_proj.weight fp32");
  const auto& wq = after.at("layers.0.attention.qkv_linear.wq.weight fp32");
  for (std::size_t head = 0; head < 6; ++head) {
    for (std::size_t pair = 0; pair < 2; ++pair) {
      for (std::size_t half = 0; half < 2; ++half) {
        for (std::size_t c = 0; c < 5; ++c) {
          ASSERT_EQ(wq[(head * 4 + pair * 2 + half) * 5 + c],
                    q[(head * 4 + half * 2 + pair) * 5 + c]);
        }
      }
    }
  }
  EXPECT_EQ(after.at("layers.0.attention.qkv_linear.wv.weight fp32"),
            before.at("model.layers.0.self_attn.v_proj.weight fp32"));
  const Mapped back = Map(Llama(), {"", "hf", {{"head_dim", 4}}}, mapped.checkpoint);
  EXPECT_EQ(ElementsOf(back.checkpoint.map), before);
  EXPECT_EQ(NamesOf(back.checkpoint), NamesOf(source));
}

TEST(Maps, OrderGroupsAndStepsAreCarried) {
  Checkpoint source = MadeUp(TinyLlama());
  // Norms are of a second group, as of those without weight decay.
  source.groups.resize(2);
  source.groups[0].params.clear();
  source.groups[1].hyper.weight_decay = 0;
  for (std::uint32_t i = 0; i < source.params.size(); ++i) {
    const int group = source.params[i].name.find("norm") == std::string::npos ? 0 : 1;
    source.params[i].group = group;
    source.groups[static_cast<std::size_t>(group)].params.push_back(i);
  }
  const Mapped mapped = Map(Llama(), {"", "torchtitan", {{"head_dim", 4}}}, source);
  const Checkpoint& out = mapped.checkpoint;
  const std::vector<std::string> names = NamesOf(out);
  EXPECT_EQ(names[0], "tok_embeddings.weight");
  EXPECT_EQ(names[6], "layers.0.feed_forward.w2.weight");
  EXPECT_EQ(names.back(), "lm_head.weight");
  EXPECT_TRUE(out.order_unknown.empty());
  ASSERT_EQ(out.groups.size(), 2u);
  EXPECT_EQ(out.groups[1].hyper.weight_decay, 0.0);
  EXPECT_EQ(out.groups[1].params.size(), 5u);
  for (const std::uint32_t i : out.groups[1].params) {
    EXPECT_NE(out.params[i].name.find("norm"), std::string::npos);
    EXPECT_EQ(out.params[i].group, 1);
  }
  EXPECT_TRUE(std::is_sorted(out.groups[0].params.begin(), out.groups[0].params.end()));
  EXPECT_EQ(out.params[1].scalars, source.params[1].scalars);
  // The order of Megatron with Transformer Engine is unknown.
  const Mapped other = Map(Llama(), {"", "megatron_te", {{"head_dim", 4}}}, source);
  EXPECT_NE(other.checkpoint.order_unknown.find("\"megatron_te\""), std::string::npos);
}

TEST(Maps, TiedNamesStayTied) {
  Checkpoint source = MadeUp(TinyLlama());
  source.params.back().alias_of = "model.embed_tokens.weight";
  source.groups[0].params.pop_back();
  std::erase_if(source.map.tensors,
                [](const auto& tensor) { return tensor.name == "lm_head.weight"; });
  const Mapped mapped = Map(Llama(), {"", "megatron_te", {{"head_dim", 4}}}, source);
  const auto tied = std::find_if(mapped.checkpoint.params.begin(), mapped.checkpoint.params.end(),
                                 [](const Param& param) { return !param.alias_of.empty(); });
  ASSERT_NE(tied, mapped.checkpoint.params.end());
  EXPECT_EQ(tied->name, "output_layer.weight");
  EXPECT_EQ(tied->alias_of, "embedding.word_embeddings.weight");
}

TEST(Maps, PaddedVocabularyIsCutToTheTrueOne) {
  Checkpoint source = MadeUp({{"embedding.word_embeddings.weight", {16, 5}},
                              {"decoder.final_layernorm.weight", {5}},
                              {"output_layer.weight", {16, 5}}},
                             {3, false});
  const auto before = ElementsOf(source.map);
  const Mapped cut = Map(Llama(), {"megatron", "hf", {{"vocab", 10}}}, source);
  const auto after = ElementsOf(cut.checkpoint.map);
  const auto& all = before.at("output_layer.weight fp32");
  EXPECT_EQ(after.at("lm_head.weight fp32"),
            (std::vector<ElementId>(all.begin(), all.begin() + 50)));
  const Mapped whole = Map(Llama(), {"megatron", "hf", {}}, source);
  EXPECT_EQ(whole.sizes.at("vocab"), 16u);
  const std::string more = MapError(Llama(), {"megatron", "hf", {{"vocab", 17}}}, source);
  EXPECT_EQ(more.substr(0, 2), "2 ");
  EXPECT_NE(more.find("vocab=17"), std::string::npos) << more;
}

/// A change to a checkpoint, and the words that the error message must contain.
struct Refusal {
  void (*change)(Checkpoint* source);
  const char* message;
};

TEST(Maps, WhatCannotBecomeOneIsRefusedByName) {
  const Refusal refusals[] = {
      {[](Checkpoint* c) { c->params[2].group = 1; }, "different parameter groups"},
      {[](Checkpoint* c) { c->params[2].scalars[0].bytes[3] = 'A'; }, "optimizer steps differ"},
      {[](Checkpoint* c) { c->params[2].scalars.clear(); }, "has stepped some and not others"},
      {[](Checkpoint* c) { c->params[2].kind = ParamKind::kFrozen; }, "trained, frozen or buffers"},
      {[](Checkpoint* c) { c->params[2].dtype = DType::kBF16; }, "dtypes differ"},
      {[](Checkpoint* c) { c->map.tensors.erase(c->map.tensors.begin() + 5); },
       "states that others lack"},
      {[](Checkpoint* c) { c->params[2].layer = 3; }, "different pipeline layers"},
  };
  for (const Refusal& refusal : refusals) {
    Checkpoint source = MadeUp(TinyLlama());
    source.groups.resize(2);
    refusal.change(&source);
    const std::string error = MapError(Llama(), {"", "megatron", {{"head_dim", 4}}}, source);
    EXPECT_EQ(error.substr(0, 2), "9 ") << error;
    EXPECT_NE(error.find(refusal.message), std::string::npos) << error;
    EXPECT_NE(error.find("model.layers.0.self_attn.k_proj.weight"), std::string::npos) << error;
  }
}

TEST(Maps, MissingPartsRulesAndSizesAreNamed) {
  Checkpoint source = MadeUp(TinyLlama());
  EXPECT_EQ(
      MapError(Llama(), {"", "megatron", {}}, source),
      "2 \"model.layers.0.self_attn.q_proj.weight\" [24, 5]: patterns/maps/llama.json rule 2 "
      "needs sizes that neither the shapes nor a config.json next to the checkpoint determine "
      "(kv_heads, query, rotary): pass --map-sizes kv_heads=N");
  EXPECT_EQ(MapError(Llama(), {"", "megatron", {{"kv_heads", 3}}}, source),
            "2 \"model.layers.0.self_attn.k_proj.weight\" [8, 5]: patterns/maps/llama.json rule 2 "
            "expects \"(kv_heads part.k half rotary) hidden\" with kv_heads=3, half=2, hidden=5");
  // A config that contradicts the shapes is bad input.
  EXPECT_EQ(MapError(Llama(), {"", "megatron", {}, {{"kv_heads", 3}}}, source).substr(0, 2), "4 ");
  EXPECT_EQ(MapError(Llama(), {"", "hf", {}}, source).substr(0, 58),
            "2 the checkpoint already has the names of naming scheme hf");
  EXPECT_EQ(MapError(Llama(), {"", "", {}}, source).substr(0, 40),
            "2 map llama has several naming schemes (");
  EXPECT_EQ(MapError(Llama(), {"", "jax", {}}, source).substr(0, 33),
            "2 map llama has no naming scheme ");
  Checkpoint more = MadeUp({{"model.norm.weight", {5}}, {"model.layers.3.adapter.1.weight", {5}}});
  const std::string uncovered = MapError(Llama(), {"", "megatron", {}}, more);
  EXPECT_EQ(uncovered.substr(0, 2), "9 ");
  EXPECT_NE(uncovered.find("{\"hf\": \"model.layers.{layer}.adapter.1.weight\", \"megatron\": "
                           "\"...{layer}...\"}"),
            std::string::npos)
      << uncovered;
  Checkpoint less = MadeUp({{"model.layers.0.self_attn.q_proj.weight", {24, 5}},
                            {"model.layers.0.self_attn.v_proj.weight", {8, 5}}});
  const std::string missing = MapError(Llama(), {"", "megatron", {{"kv_heads", 2}}}, less);
  EXPECT_EQ(missing.substr(0, 2), "4 ");
  EXPECT_NE(missing.find("lacks: model.layers.0.self_attn.k_proj.weight"), std::string::npos)
      << missing;
}

constexpr const char* kExperts = R"({
  "map": "experts",
  "sides": [{"name": "one"}, {"name": "stack"}],
  "rules": [
    {"stacks": {"gated": ["gate", "up"]},
     "one": {"{*to}.experts.{expert}.w1": "{expert} (gated.gate f) h",
             "{*to}.experts.{expert}.w3": "{expert} (gated.up f) h"},
     "stack": {"{*to}.experts.gate_up": "expert (gated f) h"}},
    {"one": {"{*to}.experts.{expert}.w2": "{expert} h f"},
     "stack": {"{*to}.experts.down": "expert f h"}},
    {"one": "{*rest}", "stack": "{*rest}"}
  ]
})";

TEST(Maps, ExpertsAreStackedAndTakenApart) {
  std::vector<std::pair<std::string, Shape>> tensors = {{"emb", {4, 3}}};
  for (int expert = 0; expert < 5; ++expert) {
    const std::string name = "layers.0.experts." + std::to_string(expert);
    tensors.push_back({name + ".w1", {2, 3}});
    tensors.push_back({name + ".w2", {3, 2}});
    tensors.push_back({name + ".w3", {2, 3}});
  }
  const ModelMap map = ParseMap(kExperts);
  for (const Spread& spread : kSpreads) {
    const Checkpoint source = MadeUp(tensors, spread);
    const auto before = ElementsOf(source.map);
    const Mapped stacked = Map(map, {}, source);
    const auto after = ElementsOf(stacked.checkpoint.map);
    const auto& gate_up = after.at("layers.0.experts.gate_up fp32");
    const auto& down = after.at("layers.0.experts.down fp32");
    ASSERT_EQ(gate_up.size(), 5u * 2 * 2 * 3);
    EXPECT_EQ(gate_up[4 * 12 + 6 + 5], before.at("layers.0.experts.4.w3 fp32")[5]);
    EXPECT_EQ(down[3 * 6 + 1 * 3 + 2], before.at("layers.0.experts.3.w2 fp32")[2 * 2 + 1]);
    EXPECT_EQ(after.at("emb fp32"), before.at("emb fp32"));
    const Mapped back = Map(map, {"stack", "one", {}}, stacked.checkpoint);
    EXPECT_EQ(ElementsOf(back.checkpoint.map), before);
  }
  Checkpoint hole = MadeUp({{"a.experts.0.w2", {3, 2}}, {"a.experts.2.w2", {3, 2}}});
  EXPECT_NE(MapError(map, {}, hole).find("lacks: a.experts.1.w2"), std::string::npos);
}

TEST(Maps, ExpertsOfAGroupOfTheirOwn) {
  Checkpoint source = MadeUp({{"a.experts.0.w2", {3, 2}}, {"a.experts.1.w2", {3, 2}}});
  source.groups[0].moe = true;
  for (std::uint32_t i : {0u, 1u})
    source.params[i].expert = {0, i, "a.experts." + std::to_string(i)};
  const ModelMap map = ParseMap(kExperts);
  const Mapped stacked = Map(map, {}, source);
  EXPECT_FALSE(stacked.checkpoint.params[0].expert);
  EXPECT_FALSE(stacked.checkpoint.groups[0].moe);
  const ModelMap rename = ParseMap(R"({"map": "m", "sides": [{"name": "x"}, {"name": "y"}],
    "rules": [{"x": "a.experts.{expert}.w2", "y": "b.{expert}.down"}]})");
  const Mapped renamed = Map(rename, {}, source);
  ASSERT_TRUE(renamed.checkpoint.params[1].expert);
  EXPECT_EQ(renamed.checkpoint.params[1].expert->module, "b.1");
  EXPECT_TRUE(renamed.checkpoint.groups[0].moe);
}

TEST(Maps, RefusesFilesThatAreNoMaps) {
  const std::string head =
      R"({"map": "m", "sizes": {"n": {}}, "sides": [{"name": "a"}, {"name": "b"}], "rules": [)";
  const std::pair<const char*, const char*> files[] = {
      {"[]", "object expected"},
      {"{", "unexpected end of the text"},
      {R"({"map": "m", "sides": [{"name": "a"}], "rules": []})", "2 to 16 naming schemes"},
      {R"({"map": "M", "sides": []})", "word of lower-case letters"},
      {R"({"map": "m", "sides": [{"name": "a"}, {"name": "a"}], "rules": []})",
       "two naming schemes are named \"a\""},
      {R"({"map": "m", "sides": [{"name": "a"}, {"name": "b"}], "rules": []})", "list of rules"},
      {R"({"map": "m", "sides": [{"name": "a"}, {"name": "b"}], "rules": [], "x": 1})",
       "not known"},
      {R"({"map": "m", "relations": ["n = k"], "sides": []})", "unknown size \"n\""},
      {R"({"a": "x"}]})", "at least two naming schemes"},
      {R"({"a": "x", "c": "y"}]})", "unknown naming scheme \"c\""},
      {R"({"a": "x.{i}", "b": "y"}]})", "captures differ"},
      {R"({"a": "x.{i", "b": "y.{i}"}]})", "braces do not match"},
      {R"({"a": "x.{i}.{i}", "b": "y.{i}"}]})", "a unique name"},
      {R"({"a": "x", "b": {"y": "n"}}]})", "some naming schemes specify shapes"},
      {R"({"a": {"x": "n m"}, "b": {"y": "n"}}]})", "lacks the axis \"m\""},
      {R"({"a": {"x": "n n"}, "b": {"y": "n"}}]})", "an axis appears twice"},
      {R"({"a": {"x": "(n m"}, "b": {"y": "n m"}}]})", "parentheses do not match"},
      {R"({"a": {"x": "n.k"}, "b": {"y": "n"}}]})", "no such segment"},
      {R"({"a": {"x": "{e} n"}, "b": {"y": "e n"}}]})", "does not capture the number"},
      {R"({"a": {"x.{*e}": "{e} n"}, "b": {"y": "e n"}}]})", "does not capture the number"},
      {R"({"stacks": {"s": ["k", "l"]}, "a": {"x": "s.k"}, "b": {"y": "s"}}]})", "hold 1 of 2"},
      {R"({"stacks": {"s": ["k", "l"]}, "a": {"x": "s.k", "z": "s"}, "b": {"y": "s"}}]})",
       "repeats"},
      {R"({"stacks": {"s": ["k"]}, "a": {"x": "s"}, "b": {"y": "s"}}]})", "at least 2 segments"},
      {R"({"stacks": {"s": ["k=0", "l"]}, "a": {"x": "s"}, "b": {"y": "s"}}]})", "at least 1"},
  };
  for (const auto& [text, message] : files) {
    const std::string rules =
        std::string(text).find("\"map\"") == std::string::npos && std::string(text).size() > 2
            ? head + text
            : text;
    const Result<ModelMap> map = ModelMap::Parse(rules, "map.json");
    ASSERT_FALSE(map.has_value()) << text;
    EXPECT_EQ(map.error().message.substr(0, 8), "map.json") << map.error().message;
    EXPECT_NE(map.error().message.find(message), std::string::npos) << text << "\n"
                                                                    << map.error().message;
  }
}

TEST(Maps, NamesThatDoNotLeadBackAreRefused) {
  const ModelMap map = ParseMap(R"({"map": "m", "sides": [{"name": "a"}, {"name": "b"}], "rules": [
    {"a": "x.{i}", "b": "y.{i}"}, {"a": "{*rest}", "b": "{*rest}"}]})");
  EXPECT_NE(MapError(map, {"a", "b", {}}, MadeUp({{"y.1", {2}}})).find("cannot be mapped back"),
            std::string::npos);
  EXPECT_NE(MapError(map, {"a", "b", {}}, MadeUp({{"x.1", {2}}, {"y.1", {2}}}))
                .find("two parameters would be named \"y.1\""),
            std::string::npos);
}

TEST(Maps, BuiltInSidesThatTellAnOrderTellItOfAllNames) {
  for (const std::string& name : ModelMap::BuiltInNames()) {
    const Result<ModelMap> map = ModelMap::BuiltIn(name);
    ASSERT_TRUE(map.has_value()) << map.error().message;
    EXPECT_EQ(map->name(), name);
    for (std::size_t side = 0; side < map->sides().size(); ++side) {
      std::set<std::string> order;
      for (const maps::NameForm& form : map->impl().sides[side].order) order.insert(form.text());
      if (order.empty()) continue;
      for (const maps::MapRule& rule : map->impl().rules) {
        if (!rule.sides[side]) continue;
        for (const maps::TensorForm& tensor : rule.sides[side]->tensors) {
          EXPECT_TRUE(order.erase(tensor.name.text()) == 1)
              << name << " " << map->sides()[side] << ": " << tensor.name.text();
        }
      }
      EXPECT_TRUE(order.empty()) << name << " " << map->sides()[side] << ": " << *order.begin();
    }
  }
}

TEST(Maps, ConfigTellsSizes) {
  const Result<ModelConfig> facts = FactsIn(
      R"({"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": null, "vocab_size": 9,
          "model_type": "llama", "eos": [1], "use_cache": true, "rms_norm_eps": 1e-6})",
      "config.json");
  ASSERT_TRUE(facts.has_value());
  EXPECT_EQ(facts->at("use_cache"), "true");
  EXPECT_EQ(facts->size(), 5U);
  EXPECT_EQ(Llama().SizesIn(*facts), (ModelSizes{{"heads", 32}, {"kv_heads", 8}, {"vocab", 9}}));
  EXPECT_EQ(Llama().SizesIn({{"head_dim", "0"}, {"vocab_size", "9x"}}), ModelSizes());
  EXPECT_FALSE(FactsIn("[]", "config.json").has_value());
  EXPECT_FALSE(FactsIn("{", "config.json").has_value());
}

TEST(Maps, FactsTellTheFamily) {
  const ModelConfig megatron = {{"swiglu", "true"},
                                {"moe", "false"},
                                {"normalization", "RMSNorm"},
                                {"position_embedding_type", "rope"}};
  const auto told = [](const ModelConfig& facts) {
    std::vector<std::string> names;
    for (const std::string& name : ModelMap::BuiltInNames()) {
      if (ModelMap::BuiltIn(name)->ToldBy(facts)) names.push_back(name);
    }
    return names;
  };
  EXPECT_EQ(told(megatron), std::vector<std::string>{"llama"});
  EXPECT_EQ(told({{"model_type", "qwen3"}}), (std::vector<std::string>{"llama", "qwen3"}));
  EXPECT_EQ(told({{"model_type", "qwen3_moe"}}), std::vector<std::string>{"qwen3_moe"});
  EXPECT_EQ(told({{"model_type", "t5"}}), std::vector<std::string>());
  EXPECT_EQ(told({}), std::vector<std::string>());
  EXPECT_EQ(Llama().ToldBy({{"model_type", "mistral"}}), "model_type=mistral");
}

TEST(Maps, SidesAreKnownByTheirNames) {
  EXPECT_EQ(SidesOf(Llama(), MadeUp(TinyLlama())), std::vector<std::string>{"hf"});
  EXPECT_EQ(SidesOf(Llama(), MadeUp({{"strange", {2}}})), std::vector<std::string>());
}

}  // namespace
}  // namespace shardwright::checkpoints
