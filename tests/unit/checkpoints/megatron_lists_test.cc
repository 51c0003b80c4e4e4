// SPDX-License-Identifier: Apache-2.0
// Lists of layers other than decoder.layers, and checkpoints without the arguments of a run.

#include <string>
#include <vector>

#include "checkpoints/megatron/holdings.h"
#include "checkpoints/megatron/keys.h"
#include "checkpoints/megatron/megatron.h"
#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/run_config.h"
#include "checkpoints/registry.h"
#include "unit/checkpoints/tiny_megatron.h"
#include "unit/support/os/scratch.h"

namespace shardwright::checkpoints::megatron {
namespace {

using Words = std::vector<std::string>;

constexpr const char* kInnerWeight =
    "mtp.layers.0.mtp_model_layer.self_attention.linear_qkv.weight";

TEST(MegatronMtp, OldAndNewNamesAreOne) {
  for (const char* text :
       {kInnerWeight, "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight"}) {
    const ParamName name = ParseName(text);
    EXPECT_EQ(name.depth, 0U);
    EXPECT_FALSE(name.layer);
    EXPECT_EQ(name.rest, "self_attention.linear_qkv.weight");
    EXPECT_EQ(name.Text(), kInnerWeight);
    EXPECT_EQ(name.OldStack(), "mtp.layers.0.transformer_layer.");
    EXPECT_TRUE(IsOfLinear(name));
  }
  EXPECT_TRUE(IsOfLinear(ParseName("mtp.layers.1.eh_proj.weight")));
  EXPECT_FALSE(IsOfLinear(ParseName("mtp.layers.1.enorm.weight")));
  EXPECT_FALSE(ParseName("mtp.layers.x.enorm.weight").depth);
}

TEST(MegatronMtp, KeysAreNumberedAndHaveTheOldName) {
  Args args;
  const auto key = [&](const char* name) { return KeyText(KeyOf(name, args)); };
  EXPECT_EQ(key(kInnerWeight), "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight");
  const char* norm = "mtp.layers.1.mtp_model_layer.input_layernorm.weight";
  EXPECT_EQ(key(norm),
            "mtp.layers.1.transformer_layer.self_attention.linear_qkv.layer_norm_weight");
  EXPECT_EQ(ParseKey(key(norm), args).Text(0, 0), norm);
  const char* expert = "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.3.linear_fc1.weight";
  EXPECT_EQ(key(expert), "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight");
  EXPECT_EQ(ParseKey(key(expert), args).axes(), 1U);
  EXPECT_EQ(ParseKey(key(expert), args).Text(0, 3), expert);
  EXPECT_EQ(key("mtp.layers.0.eh_proj.weight"), "mtp.layers.0.eh_proj.weight");
  args.latent = true;
  EXPECT_EQ(key(norm), "mtp.layers.1.transformer_layer.input_layernorm.weight");
  args.hybrid = true;
  EXPECT_EQ(key(norm), norm);
}

TEST(MegatronMtp, ModulesComeBetweenTheLastNormAndTheOutput) {
  const Words order{"embedding.word_embeddings.weight",
                    "decoder.layers.0.input_layernorm.weight",
                    "decoder.layers.1.mlp.linear_fc2.weight",
                    "decoder.final_layernorm.weight",
                    "mtp.layers.0.enorm.weight",
                    "mtp.layers.0.hnorm.weight",
                    "mtp.layers.0.eh_proj.weight",
                    "mtp.layers.0.mtp_model_layer.input_layernorm.weight",
                    "mtp.layers.0.mtp_model_layer.self_attention.linear_proj.weight",
                    "mtp.layers.0.mtp_model_layer.self_attention.linear_qkv.weight",
                    "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.2.linear_fc1.weight",
                    "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.10.linear_fc1.weight",
                    "mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight",
                    "mtp.layers.0.final_layernorm.weight",
                    "mtp.layers.2.enorm.weight",
                    "mtp.layers.10.enorm.weight",
                    "output_layer.weight"};
  for (std::size_t i = 0; i < order.size(); ++i) {
    for (std::size_t j = 0; j < order.size(); ++j) {
      EXPECT_EQ(ModelOrderLess(order[i], order[j]), i < j) << order[i] << " and " << order[j];
    }
  }
}

Words HeldBy(const Args& args, const std::vector<Param>& params, std::uint64_t stage) {
  const std::vector<Stage> stages = *StagesOf(args);
  Words names;
  for (const Holding& held :
       HoldingsOf(args, stages, params, ModelOrder(params), {0, stage, 0}, 0)) {
    names.push_back(params[held.param].name + (held.shared ? " shared" : "") +
                    (held.copy ? " copy" : ""));
  }
  return names;
}

TEST(MegatronMtp, TheLastStageHasAnEmbeddingOfItsOwn) {
  std::vector<Param> params(5);
  params[0].name = kEmbedding;
  params[1].name = "decoder.layers.0.input_layernorm.weight";
  params[2].name = "decoder.layers.1.input_layernorm.weight";
  params[3].name = "mtp.layers.0.enorm.weight";
  params[4].name = kOutput;
  Args args;
  args.layers = 2;
  args.pp = 2;
  args.untied = true;
  args.mtp = 1;
  const std::string embedding(kEmbedding);
  EXPECT_EQ(HeldBy(args, params, 0), (Words{embedding + " shared", params[1].name}));
  EXPECT_EQ(HeldBy(args, params, 1),
            (Words{embedding + " shared copy", params[2].name, params[3].name, params[4].name}));
  EXPECT_TRUE(CheckMtpStages(args));
  args.untied = false;
  EXPECT_EQ(CheckMtpStages(args).error().code, Errc::kUnsupported);
  args.untied = true;
  args.positions = "learned_absolute";
  EXPECT_EQ(CheckMtpStages(args).error().code, Errc::kUnsupported);
  args.pp = 1;
  EXPECT_TRUE(CheckMtpStages(args));
  EXPECT_EQ(HeldBy(args, params, 0).front(), embedding);
}

TEST(MegatronLists, OthersAreNamed) {
  EXPECT_EQ(OtherListOf("vision_model.decoder.layers.mlp.linear_fc1.weight"),
            "vision_model.decoder.layers.");
  EXPECT_EQ(OtherListOf("language_model.decoder.layers.3.mlp.linear_fc1.weight"),
            "language_model.decoder.layers.");
  for (const char* name : {"decoder.layers.mlp.linear_fc1.weight", "encoder.layers.0.a.weight",
                           "mtp.layers.0.mtp_model_layer.layers.1.mixer.in_proj.weight",
                           "players.weight", "output_layer.weight", ""}) {
    EXPECT_EQ(OtherListOf(name), "") << name;
  }
}

class MegatronListsOfTiny : public os::Scratch {
 protected:
  /// The legacy checkpoint with a layer of multi-token prediction.
  static TinyMegatron WithMtp() {
    TinyMegatron tiny;
    tiny.args["mtp_num_layers"] = 1;
    tiny.args["mtp_use_repeated_layer"] = 0;
    const std::vector<std::pair<std::string, Shape>> more = {
        {"mtp.layers.0.enorm.weight", {4}},
        {"mtp.layers.0.hnorm.bias", {4}},
        {"mtp.layers.0.eh_proj.weight", {2, 8}},
        {"mtp.layers.0.mtp_model_layer.input_layernorm.weight", {4}},
        {"mtp.layers.0.mtp_model_layer.self_attention.linear_proj.weight", {4, 2}},
        {"mtp.layers.0.final_layernorm.weight", {4}}};
    for (const auto& [name, shape] : more) {
      tiny.names.push_back(name);
      tiny.shapes[name] = shape;
    }
    tiny.optimizer_ids = {0, 1, 2, 3, 4, 5, 6};
    tiny.vector_ids = {7, 8, 9, 10, 11};
    return tiny;
  }

  Result<Checkpoint> ReadTiny(const TinyMegatron& tiny) {
    const std::string at = At("ckpt" + std::to_string(++count_));
    tiny.Write(at);
    auto source = ScanSource({at});
    if (!source) return tl::unexpected<Error>(source.error());
    return ReadCheckpoint(*source, Patterns());
  }

  int count_ = 0;
};

TEST_F(MegatronListsOfTiny, AnEncoderIsRefused) {
  TinyMegatron tiny;
  tiny.rename = {
      {"decoder.layers.0.mlp.linear_fc1.weight", "encoder.layers.0.mlp.linear_fc1.weight"}};
  const auto read = ReadTiny(tiny);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, Errc::kUnsupported);
  EXPECT_NE(read.error().message.find("encoder.layers.0.mlp"), std::string::npos);
}

TEST_F(MegatronListsOfTiny, MtpGoesIntoBothForms) {
  const auto read = ReadTiny(WithMtp());
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->params[8].shape, (Shape{4, 8}));
  const Format* row = FindFormat("megatron");
  const auto texts = [&](const char* target) {
    const auto spec = ParseTarget(*row, target);
    const auto layout = row->resolve(*spec, *read);
    EXPECT_TRUE(layout) << layout.error().message;
    const auto written = row->write(*read, *layout);
    EXPECT_TRUE(written) << written.error().message;
    EXPECT_TRUE(layout::Validate(written->target.map));
    std::string all;
    for (const auto& file : written->target.files) all += file.path + "\n";
    return all;
  };
  EXPECT_NE(texts("tp=1").find("mp_rank_00/model_optim_rng.pt"), std::string::npos);
  EXPECT_NE(texts("files=torch_dist").find(".metadata"), std::string::npos);
}

TEST(MegatronRunConfig, ScalarsHavePaths) {
  const auto scalars = YamlScalars(
      "model:\n"
      "  _target_: a.b.C  # a comment\n"
      "  num_attention_heads: 32\n"
      "  kv_channels: null\n"
      "  normalization: \"RMSNorm\"\n"
      "  moe_layer_freq:\n"
      "  - 0\n"
      "  - deep: 7\n"
      "    num_query_groups: 9\n"
      "  flow: {num_query_groups: 5}\n"
      "  hidden_size: 64\r\n"
      "ddp:\n"
      "  overlap: true\n"
      "# done\n"
      "no value\n"
      "top: 1");
  EXPECT_EQ(scalars,
            (std::map<std::string, std::string>{{"model._target_", "a.b.C"},
                                                {"model.num_attention_heads", "32"},
                                                {"model.normalization", "RMSNorm"},
                                                {"model.moe_layer_freq.num_query_groups", "9"},
                                                {"model.hidden_size", "64"},
                                                {"ddp.overlap", "true"},
                                                {"top", "1"}}));
  for (const char* text : {"", "\n\n", ":", " :", "a", "- a", "a:\n b:\n  c:\n", "\t", "a: \"x"}) {
    EXPECT_TRUE(YamlScalars(text).empty()) << text;
  }
}

TEST(MegatronRunConfig, StatesTheModel) {
  pickle::Arena arena;
  const auto args = ArgsOfConfig(
      arena, YamlScalars("config:\n  num_attention_heads: 8\n  num_query_groups: 2\n"
                         "  hidden_size: 64\n  kv_channels: null\n  sequence_parallel: true\n"
                         "  num_moe_experts: 4\n  tensor_model_parallel_size: 2\n"));
  ASSERT_TRUE(args) << args.error().message;
  EXPECT_EQ(args->heads, 8U);
  EXPECT_EQ(args->groups, 2U);
  EXPECT_EQ(args->channels, 8U);
  EXPECT_EQ(args->experts, 4U);
  EXPECT_EQ(args->tp, 2U);
  EXPECT_TRUE(args->sequence_parallel);
  const auto empty = ArgsOfConfig(arena, {});
  ASSERT_TRUE(empty);
  EXPECT_EQ(empty->heads, 0U);
  EXPECT_EQ(ArgsOfConfig(arena, {{"model.tensor_model_parallel_size", "0"}}).error().code,
            Errc::kBadInput);
}

}  // namespace
}  // namespace shardwright::checkpoints::megatron
