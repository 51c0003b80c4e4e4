// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "checkpoints/megatron/megatron.h"
#include "checkpoints/megatron/read/read_internal.h"
#include "checkpoints/registry.h"
#include "unit/checkpoints/tiny_megatron.h"
#include "unit/support/os/scratch.h"

// Small made-up checkpoints, read and written.

namespace shardwright::checkpoints::megatron {
namespace {

class TinyLegacy : public os::Scratch {
 protected:
  /// The error code of reading a checkpoint, 0 if it can be read.
  int CodeOf(const TinyMegatron& tiny) {
    const std::string at = At("ckpt" + std::to_string(++count_));
    tiny.Write(at);
    const auto source = ScanSource({at});
    if (!source) return Code(source.error());
    const auto read = ReadCheckpoint(*source, Patterns());
    return read ? 0 : Code(read.error());
  }
  int Code(const Error& error) {
    message_ = error.message;
    return static_cast<int>(error.code);
  }
  int count_ = 0;
  std::string message_;
};

constexpr int kBad = static_cast<int>(Errc::kBadInput);
constexpr int kMissing = static_cast<int>(Errc::kNotFound);
constexpr int kOther = static_cast<int>(Errc::kUnsupported);

TEST_F(TinyLegacy, TellsOfItsModel) {
  TinyMegatron tiny;
  const auto facts = [&](const char* folder) {
    tiny.Write(At(folder));
    return ReadCheckpoint(*ScanSource({At(folder)}), Patterns())->facts;
  };
  const ModelConfig sizes = {{"num_attention_heads", "2"},
                             {"num_key_value_heads", "1"},
                             {"head_dim", "2"},
                             {"vocab_size", "5"}};
  EXPECT_EQ(facts("silent"), sizes);
  tiny.words = {
      {"swiglu", "true"}, {"normalization", "RMSNorm"}, {"position_embedding_type", "rope"}};
  ModelConfig all = sizes;
  all.insert({{"swiglu", "true"},
              {"moe", "false"},
              {"qk_layernorm", "false"},
              {"normalization", "RMSNorm"},
              {"position_embedding_type", "rope"}});
  EXPECT_EQ(facts("told"), all);
}

TEST_F(TinyLegacy, IsRead) {
  TinyMegatron tiny;
  tiny.Write(At("ckpt"));
  const auto source = ScanSource({At("ckpt")});
  ASSERT_TRUE(source) << source.error().message;
  EXPECT_EQ(source->format, "megatron");
  EXPECT_EQ(source->tag, "iter_0000004");
  const auto read = ReadCheckpoint(*source, Patterns());
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read->iteration, 4U);
  EXPECT_EQ(read->consumed_samples, 48U);
  EXPECT_EQ(read->layout.mesh.tp, 2U);
  EXPECT_EQ(read->states, (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
  ASSERT_EQ(read->groups.size(), 2U);
  EXPECT_EQ(read->groups[0].hyper.weight_decay, 0.1);
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (const Param& param : read->params) {
    names.push_back(param.name);
    shapes.push_back(param.shape);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"embedding.word_embeddings.weight",
                                             "decoder.layers.0.input_layernorm.weight",
                                             "decoder.layers.0.self_attention.linear_proj.weight",
                                             "decoder.layers.0.self_attention.linear_qkv.weight",
                                             "decoder.layers.0.mlp.linear_fc1.weight",
                                             "decoder.layers.0.mlp.linear_fc2.weight"}));
  EXPECT_EQ(shapes, (std::vector<Shape>{{5, 4}, {4}, {4, 4}, {8, 4}, {8, 4}, {4, 4}}));
}

TEST_F(TinyLegacy, RanksMustBeThere) {
  TinyMegatron tiny;
  tiny.leave_out = 1;
  EXPECT_EQ(CodeOf(tiny), kMissing);
  EXPECT_NE(message_.find("mp_rank_01"), std::string::npos) << message_;
  tiny = {};
  tiny.args["tensor_model_parallel_size"] = 1;
  EXPECT_EQ(CodeOf(tiny), kBad);
  tiny = {};
  tiny.args["pipeline_model_parallel_size"] = 2;
  EXPECT_EQ(CodeOf(tiny), kBad);
}

TEST_F(TinyLegacy, ShapesMustFit) {
  TinyMegatron tiny;
  tiny.shapes["decoder.layers.0.self_attention.linear_qkv.weight"] = {3, 4};
  EXPECT_EQ(CodeOf(tiny), kBad) << "heads";
  tiny = {};
  tiny.shapes["decoder.layers.0.mlp.linear_fc1.weight"] = {3, 4};
  EXPECT_EQ(CodeOf(tiny), kBad) << "gate";
  tiny = {};
  tiny.odd_rank_shapes["embedding.word_embeddings.weight"] = {2, 4};
  EXPECT_EQ(CodeOf(tiny), kBad) << "vocabulary";
  tiny = {};
  tiny.odd_rank_shapes["decoder.layers.0.input_layernorm.weight"] = {3};
  EXPECT_EQ(CodeOf(tiny), kBad) << "replicated";
  tiny = {};
  tiny.args["num_query_groups"] = 3;
  EXPECT_EQ(CodeOf(tiny), kBad) << "groups";
}

TEST_F(TinyLegacy, LayersMustBeThoseOfTheStage) {
  TinyMegatron tiny;
  tiny.args["num_layers"] = 2;
  EXPECT_EQ(CodeOf(tiny), kBad);
  tiny = {};
  tiny.rename["decoder.layers.0.mlp.linear_fc2.weight"] = "decoder.layers.1.mlp.linear_fc2.weight";
  EXPECT_EQ(CodeOf(tiny), kBad);
}

TEST_F(TinyLegacy, WhatIsNotUnderstoodIsRefused) {
  TinyMegatron tiny;
  tiny.version = 1.0;
  EXPECT_EQ(CodeOf(tiny), kOther) << "order of attention weights";
  tiny = {};
  tiny.model_twice = true;
  EXPECT_EQ(CodeOf(tiny), kBad);
  tiny = {};
  tiny.optimizer_ids = {0, 1, 2, 3};
  EXPECT_EQ(CodeOf(tiny), kOther) << "parameters of a group";
  tiny = {};
  tiny.rename["decoder.layers.0.mlp.linear_fc2.weight"] = "decoder.layers.0.mlp.experts.weight2";
  EXPECT_EQ(CodeOf(tiny), kOther);
}

/// Transformer Engine's optimizer keeps of a master weight what the bfloat16 weight lacks.
TEST(MasterWeights, MayBeRemainders) {
  const auto args = [](const std::map<std::string, bool>& flags) {
    pickle::Arena arena;
    Node* dict = arena.Dict();
    for (const auto& [key, on] : flags) Set(arena, dict, key, arena.Bool(on));
    return *ReadArgs(dict);
  };
  const Args with = args({{"use_precision_aware_optimizer", true}, {"bf16", true}});
  EXPECT_TRUE(with.remainders);
  EXPECT_FALSE(args({{"bf16", true}}).remainders);
  EXPECT_FALSE(args({{"use_precision_aware_optimizer", true}, {"fp16", true}}).remainders);
  EXPECT_FALSE(args({{"use_precision_aware_optimizer", true},
                     {"bf16", true},
                     {"store_param_remainders", false}})
                   .remainders);
  EXPECT_TRUE(CheckMasters(with, DType::kF32, false, "param"));
  EXPECT_EQ(CheckMasters(with, DType::kF32, true, "param").error().code, Errc::kUnsupported);
  EXPECT_EQ(CheckMasters({}, DType::kI16, false, "param").error().code, Errc::kUnsupported);
}

/// Exceptions to the rule that matrices have weight decay and vectors do not.
class TinyGroups : public TinyLegacy {
 protected:
  /// The groups' members, by name; empty if the checkpoint cannot be read.
  std::vector<std::vector<std::string>> Members(const TinyMegatron& tiny) {
    const std::string at = At("ckpt" + std::to_string(++count_));
    tiny.Write(at);
    const auto read = ReadCheckpoint(*ScanSource({at}), Patterns());
    std::vector<std::vector<std::string>> members;
    if (!read) {
      message_ = read.error().message;
      return members;
    }
    for (const Group& group : read->groups) {
      std::vector<std::string>& names = members.emplace_back();
      for (const std::uint32_t param : group.params) names.push_back(read->params[param].name);
      std::sort(names.begin(), names.end());
    }
    return members;
  }
  const std::string embedding_ = "embedding.word_embeddings.weight";
  const std::string norm_ = "decoder.layers.0.input_layernorm.weight";
};

TEST_F(TinyGroups, EmbeddingsOfReleasesBefore016MayHaveNoDecay) {
  TinyMegatron tiny;
  tiny.args["embedding_init_method_std"] = 1;
  EXPECT_TRUE(Members(tiny).empty()) << "the groups have other sizes";
  EXPECT_NE(message_.find("parameter group 0 has 5 parameters, but 4"), std::string::npos)
      << message_;
  tiny.group_of = [&](const std::string& name) {
    return name != embedding_ && tiny.shapes.at(name).size() > 1 ? 0 : 1;
  };
  tiny.optimizer_ids = {0, 1, 2, 3};
  tiny.vector_ids = {4, 5};
  ASSERT_EQ(Members(tiny).size(), 2U) << message_;
  EXPECT_EQ(Members(tiny)[1], (std::vector<std::string>{norm_, embedding_}));
  TinyMegatron later;
  later.args["embedding_init_method_std"] = 1;
  later.words["apply_wd_to_qk_layernorm"] = "false";
  EXPECT_EQ(Members(later).size(), 2U) << message_;
}

TEST_F(TinyGroups, NormsOfQueriesAndKeysMayHaveDecay) {
  const std::string norm = "decoder.layers.0.self_attention.q_layernorm.weight";
  TinyMegatron tiny;
  tiny.names.insert(tiny.names.begin() + 2, norm);
  tiny.shapes[norm] = {2};
  tiny.words["qk_layernorm"] = "true";
  tiny.group_of = [&](const std::string& name) {
    return name == norm || tiny.shapes.at(name).size() > 1 ? 0 : 1;
  };
  tiny.optimizer_ids = {0, 1, 2, 3, 4, 5};
  tiny.vector_ids = {6};
  EXPECT_TRUE(Members(tiny).empty());
  for (const auto& [key, word] : {std::pair("apply_wd_to_qk_layernorm", "true"),
                                  std::pair("no_weight_decay_cond_type", "qwen3_next")}) {
    TinyMegatron with = tiny;
    with.words[key] = word;
    ASSERT_EQ(Members(with).size(), 2U) << message_;
    EXPECT_EQ(Members(with)[1], std::vector<std::string>{norm_});
  }
}

TEST_F(TinyGroups, EmbeddingAndOutputLayerMayHaveTheirOwnRate) {
  TinyMegatron tiny;
  tiny.args["decoupled_lr"] = 2;
  tiny.group_of = [&](const std::string& name) {
    if (name == embedding_) return 2;
    return tiny.shapes.at(name).size() > 1 ? 0 : 1;
  };
  tiny.optimizer_ids = {0, 1, 2, 3};
  tiny.vector_ids = {4};
  tiny.own_rate_ids = {5};
  ASSERT_EQ(Members(tiny).size(), 3U) << message_;
  EXPECT_EQ(Members(tiny)[2], std::vector<std::string>{embedding_});
  tiny.args["decoupled_lr"] = 3;
  EXPECT_TRUE(Members(tiny).empty());
  EXPECT_NE(message_.find("two parameter groups of the same kind"), std::string::npos) << message_;
}

TEST_F(TinyLegacy, TrackersMustLeadSomewhere) {
  TinyMegatron tiny;
  tiny.Write(At("ckpt"));
  Put("ckpt/latest_checkpointed_iteration.txt", "seven");
  EXPECT_EQ(ScanSource({At("ckpt")}).error().code, Errc::kBadInput);
  Put("ckpt/latest_checkpointed_iteration.txt", "7");
  EXPECT_EQ(ScanSource({At("ckpt")}).error().code, Errc::kNotFound);
  Put("ckpt/latest_checkpointed_iteration.txt", " 4\n");
  EXPECT_TRUE(ScanSource({At("ckpt")}));
  Put("ckpt/iter_0000004/metadata.json", "{}");
  EXPECT_EQ(ScanSource({At("ckpt")}).error().code, Errc::kUnsupported);
}

class TinyTarget : public os::Scratch {
 protected:
  void SetUp() override {
    os::Scratch::SetUp();
    TinyMegatron().Write(At("ckpt"));
    auto source = ScanSource({At("ckpt")});
    ASSERT_TRUE(source);
    auto read = ReadCheckpoint(*source, Patterns());
    ASSERT_TRUE(read) << read.error().message;
    source_ = *std::move(read);
  }

  /// Returns the names of a target's files, or the error of an invalid target.
  std::vector<std::string> FilesOf(const std::string& target) {
    const Format* row = FindFormat("megatron");
    const auto spec = ParseTarget(*row, target);
    if (!spec) return {spec.error().message};
    const auto layout = row->resolve(*spec, source_);
    if (!layout) return {layout.error().message};
    const auto written = row->write(source_, *layout);
    if (!written) return {written.error().message};
    const Status valid = layout::Validate(written->target.map);
    if (!valid) return {valid.error().message};
    return written->target.map.files;
  }

  Checkpoint source_;
};

TEST_F(TinyTarget, FilesAreThoseOfTheRanks) {
  using Files = std::vector<std::string>;
  EXPECT_EQ(FilesOf("tp=1"), (Files{"iter_0000004/mp_rank_00/model_optim_rng.pt",
                                    "latest_checkpointed_iteration.txt"}));
  EXPECT_EQ(
      FilesOf("optimizer=dp_reshardable,bucket=20"),
      (Files{"iter_0000004/mp_rank_00/model_optim_rng.pt",
             "iter_0000004/mp_rank_00/distrib_optim.pt",
             "iter_0000004/mp_rank_01/model_optim_rng.pt",
             "iter_0000004/mp_rank_01/distrib_optim.pt", "latest_checkpointed_iteration.txt"}));
  EXPECT_EQ(FilesOf("files=torch_dist"),
            (Files{"iter_0000004/__0_0.distcp", "iter_0000004/__1_0.distcp",
                   "iter_0000004/common.pt", "iter_0000004/.metadata", "iter_0000004/metadata.json",
                   "latest_checkpointed_iteration.txt"}));
}

TEST_F(TinyTarget, WhatCannotBeIsRefused) {
  const auto says = [&](const std::string& target, const std::string& what) {
    const std::vector<std::string> found = FilesOf(target);
    EXPECT_NE(found.front().find(what), std::string::npos) << target << ": " << found.front();
  };
  says("pp=2", "do not divide");
  says("tp=4", "do not divide");
  says("tp=0", "a number from 1");
  says("files=zarr", "torch_dist or torch expected");
  says("files=torch,optimizer=fully_reshardable", "dp_reshardable or none");
  says("files=torch_dist,bucket=500", "bucket");
  says("files=torch_dist,optimizer=dp_reshardable", "is float32");
  says("optimizer=none,bucket=500", "bucket");
}

// A shard of such a tensor has no shape of two dimensions, which Megatron's layer could load.
TEST_F(TinyTarget, AViewThatMixesDimensionsIsRefused) {
  const auto at = std::find_if(
      source_.params.begin(), source_.params.end(),
      [](const Param& param) { return param.name == "decoder.layers.0.mlp.linear_fc2.weight"; });
  ASSERT_NE(at, source_.params.end());
  ASSERT_EQ(at->shape, (Shape{4, 4}));
  at->rule = {};
  at->rule.split = layout::Split::kSub;
  at->rule.view = {2, 8};
  at->rule.sub_sizes = {2};
  const std::vector<std::string> found = FilesOf("tp=2,files=torch");
  EXPECT_NE(found.front().find("mixes dimensions"), std::string::npos) << found.front();
  at->rule.view = {2, 2, 4};
  EXPECT_EQ(FilesOf("tp=2,files=torch").size(), 3U);
}

TEST_F(TinyTarget, StepsMustBeOneNumber) {
  source_.params.front().scalars.front().bytes = std::string("\0\0\x80\x3f", 4);
  EXPECT_NE(FilesOf("files=torch_dist").front().find("steps"), std::string::npos);
}

class TinyDist : public os::Scratch {
 protected:
  Errc ScanOf() {
    const auto source = ScanSource({At("iter_0000004")});
    return source ? static_cast<Errc>(0) : source.error().code;
  }
};

TEST_F(TinyDist, TheFolderSaysWhatItIs) {
  const std::string good = R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1})";
  Put("iter_0000004/metadata.json", good);
  Put("iter_0000004/common.pt", "");
  EXPECT_EQ(ScanOf(), Errc::kNotFound) << "no index: an incomplete save";
  Put("iter_0000004/.metadata", "x");
  for (const char* text : {R"({"sharded_backend": "zarr", "sharded_backend_version": 1})",
                           R"({"sharded_backend": "torch_dist", "sharded_backend_version": 2})",
                           R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1,
            "common_backend": "msgpack", "common_backend_version": 1})",
                           R"({"sharded_backend": 4})", "{}", "[", ""}) {
    Put("iter_0000004/metadata.json", text);
    const Errc code = ScanOf();
    EXPECT_TRUE(code == Errc::kBadInput || code == Errc::kUnsupported) << text;
  }
  Put("iter_0000004/metadata.json", good);
  EXPECT_EQ(ScanOf(), Errc::kBadInput) << "an index that is none";
}

}  // namespace
}  // namespace shardwright::checkpoints::megatron
