// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/target.h"

#include <gtest/gtest.h>

#include "checkpoints/registry.h"
#include "write_model.h"

namespace shardwright::checkpoints::test {
namespace {

Result<ZeroSpec> Parse(std::string_view text) {
  SW_TRY_ASSIGN(const TargetSpec spec, ParseTarget(*FindFormat("deepspeed"), text));
  return ReadZeroSpec(spec);
}

Error ErrorOf(std::string_view text) {
  const auto spec = Parse(text);
  EXPECT_FALSE(spec.has_value()) << text;
  return spec ? Error{} : spec.error();
}

TEST(TargetSpecTest, ReadsEveryKey) {
  const auto spec =
      Parse("zero=3,dp=4,tp=2,pp=2,ep=8,dtype=bf16,sub_group=1000,round_robin=true,stages=0-3,4-7");
  ASSERT_TRUE(spec.has_value()) << spec.error().message;
  EXPECT_EQ(spec->zero, 3U);
  EXPECT_EQ(spec->dp, 4U);
  EXPECT_EQ(spec->tp, 2U);
  EXPECT_EQ(spec->pp, 2U);
  EXPECT_EQ(spec->ep, 8U);
  EXPECT_EQ(spec->dtype, DType::kBF16);
  EXPECT_EQ(spec->sub_group, 1000U);
  EXPECT_EQ(spec->round_robin, true);
  EXPECT_EQ(spec->stages, "0-3,4-7");
  EXPECT_EQ(Parse("stages=uniform,pp=2")->pp, 2U);
  EXPECT_FALSE(Parse("")->zero.has_value());
}

TEST(TargetSpecTest, NamesTheKeyAndWhatItAccepts) {
  EXPECT_EQ(ErrorOf("zero=4").message, "target zero=4: a number from 0 to 3 expected");
  EXPECT_EQ(ErrorOf("dp=0").message, "target dp=0: a number from 1 to 1000000 expected");
  EXPECT_EQ(ErrorOf("dp=2x").message, "target dp=2x: a number from 1 to 1000000 expected");
  EXPECT_EQ(ErrorOf("dtype=int8").message, "target dtype=int8: fp32, fp16 or bf16 expected");
  EXPECT_EQ(ErrorOf("round_robin=1").message, "target round_robin=1: true or false expected");
  EXPECT_EQ(ErrorOf("dp").message, "target \"dp\": key=value expected");
  EXPECT_EQ(ErrorOf("dp=2,dp=2").message, "target key \"dp\" is given twice");
  EXPECT_EQ(ErrorOf("dp=2,").message, "target \"dp=2,\" ends in a comma");
  EXPECT_EQ(ErrorOf("cp=2").code, Errc::kUsage);
  for (const char* bad : {"stages=4-3", "stages=0-3,5-7", "stages=0-", "stages=best", "stages="}) {
    EXPECT_EQ(ErrorOf(bad).code, Errc::kUsage) << bad;
  }
}

Result<Topology> Resolve(std::string_view text, const Checkpoint& source) {
  const auto spec = Parse(text);
  EXPECT_TRUE(spec.has_value()) << spec.error().message;
  return ResolveTopology(*spec, source);
}

TEST(TargetSpecTest, KeepsWhatIsUnset) {
  Model model;
  model.Add("a", {8});
  model.Change([](auto& topology) { topology.round_robin = true; });
  const auto to = Resolve("dp=4", model.source());
  ASSERT_TRUE(to.has_value()) << to.error().message;
  EXPECT_EQ(to->zero, 1U);
  EXPECT_EQ(to->dp, 4U);
  EXPECT_FALSE(to->round_robin);  // of the engine that resumes
}

template <class T>
void ExpectRefused(const Result<T>& to, Errc code, std::string_view part) {
  ASSERT_FALSE(to.has_value()) << part;
  EXPECT_EQ(to.error().code, code) << to.error().message;
  EXPECT_NE(to.error().message.find(part), std::string::npos) << to.error().message;
}

TEST(TargetSpecTest, RefusesWhatCannotBe) {
  Model model;
  model.Add("a", {8});
  const Checkpoint& source = model.source();
  ExpectRefused(Resolve("ep=2", source), Errc::kInfeasible, "ep=2: the model has no experts");
  ExpectRefused(Resolve("pp=2", source), Errc::kUnsupported, "not a pipeline module");
  ExpectRefused(Resolve("stages=uniform", source), Errc::kUsage, "not a pipeline module");
  ExpectRefused(Resolve("zero=3,round_robin=true", source), Errc::kUnsupported, "zero=3");
  ExpectRefused(Resolve("sub_group=5", source), Errc::kUnsupported, "zero=1");
  ExpectRefused(Resolve("dp=100000,tp=100000", source), Errc::kLimit, "1000000 ranks");
  model.source().params[0].rule.split = layout::Split::kDim;
  ExpectRefused(Resolve("tp=3", source), Errc::kUnsupported, "\"a\"");
}

TEST(TargetSpecTest, ExpertsMustDivide) {
  Model model;
  for (std::uint32_t expert = 0; expert < 4; ++expert) {
    model.AddExpert(0, expert, "weight", {2, 2}, 0);
  }
  const Checkpoint& source = model.source();
  ExpectRefused(Resolve("ep=3,dp=3", source), Errc::kInfeasible,
                "ep=3 does not divide the 4 experts");
  ExpectRefused(Resolve("ep=4,dp=2", source), Errc::kInfeasible, "dp=2");
  ExpectRefused(Resolve("zero=3", source), Errc::kUnsupported, "zero=3");
  EXPECT_TRUE(Resolve("ep=4,dp=4", source).has_value());
}

/// Layers 0 to 5 of equal size except the first, which is ten times as large.
Model Pipeline(std::vector<std::vector<std::uint32_t>> stages) {
  Model model;
  for (std::uint32_t layer = 0; layer < 6; ++layer) {
    const std::uint64_t rows = layer == 0 ? 80 : 8;
    model.Add(std::to_string(layer) + ".weight", {rows, 8}).layer = layer;
  }
  model.Change([&](auto& topology) {
    topology.pipeline = true;
    topology.pp = stages.size();
    topology.stages = std::move(stages);
  });
  return model;
}

using Stages = std::vector<std::vector<std::uint32_t>>;

TEST(TargetSpecTest, StagesFollowTheSourceOrTheUser) {
  Model uniform = Pipeline({{0, 1, 2}, {3, 4, 5}});
  EXPECT_EQ(Resolve("pp=3", uniform.source())->stages, (Stages{{0, 1}, {2, 3}, {4, 5}}));
  EXPECT_EQ(Resolve("pp=2", uniform.source())->stages, (Stages{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_EQ(Resolve("pp=1", uniform.source())->stages, (Stages{{0, 1, 2, 3, 4, 5}}));
  EXPECT_EQ(Resolve("pp=2,stages=parameters", uniform.source())->stages,
            (Stages{{0}, {1, 2, 3, 4, 5}}));
  // Parameters that are not trained have no states to balance.
  Model frozen = Pipeline({{0, 1, 2}, {3, 4, 5}});
  frozen.Add("5.frozen", {800, 8}, -1).layer = 5;
  EXPECT_EQ(Resolve("pp=2,stages=parameters", frozen.source())->stages,
            (Stages{{0}, {1, 2, 3, 4, 5}}));
  EXPECT_EQ(Resolve("pp=2,stages=0,1-7", uniform.source())->stages, (Stages{{0}, {1, 2, 3, 4, 5}}));
  Model balanced = Pipeline({{0}, {1, 2, 3, 4, 5}});
  const auto three = Resolve("pp=3", balanced.source());
  ASSERT_TRUE(three.has_value()) << three.error().message;
  EXPECT_EQ(three->stages.front(), (std::vector<std::uint32_t>{0}));
}

/// Megatron's layers: embedding, four blocks, and the last norm. Layer 0 has no state.
Model Megatron(std::vector<std::vector<std::uint32_t>> stages) {
  Model model;
  model.Add("1.word_embeddings.weight", {64, 8}).layer = 1;
  for (std::uint32_t layer = 2; layer < 6; ++layer) {
    model.Add(std::to_string(layer) + ".mlp.weight", {8, 8}).layer = layer;
    model.Add(std::to_string(layer) + ".mlp.bias", {8}).layer = layer;
  }
  model.Add("6.weight", {8}).layer = 6;
  model.Change([&](auto& topology) {
    topology.pipeline = true;
    topology.pp = stages.size();
    topology.stages = std::move(stages);
  });
  return model;
}

void AddMegatronArgs(Model& model) {
  pickle::Node* args = model.arena().Dict();
  Set(model.arena(), args, "tensor_model_parallel_size", model.arena().Int(1));
  Set(model.arena(), model.model(), "args", model.arena().Object("argparse.Namespace", args));
}

TEST(TargetSpecTest, StagesMayFollowTheBlocks) {
  const Stages four = {{1, 2}, {3}, {4}, {5, 6}};
  Model two = Megatron({{1, 2, 3}, {4, 5, 6}});
  EXPECT_EQ(Resolve("pp=4,stages=type", two.source())->stages, four);
  // The stages fit "uniform" too, and DeepSpeed cannot load stages of another method.
  ExpectRefused(Resolve("pp=4", two.source()), Errc::kUsage, "\"uniform\" and \"type\"");
  ExpectRefused(Resolve("pp=5,stages=type", two.source()), Errc::kInfeasible, "one block");
  AddMegatronArgs(two);
  EXPECT_EQ(Resolve("pp=4", two.source())->stages, four);
  // Layers with one parameter are not blocks.
  Model plain = Pipeline({{0, 1, 2}, {3, 4, 5}});
  ExpectRefused(Resolve("pp=4,stages=type", plain.source()), Errc::kInfeasible, "one block");
}

TEST(TargetSpecTest, StagesAreNeverGuessed) {
  Model one = Pipeline({{0, 1, 2, 3, 4, 5}});
  ExpectRefused(Resolve("pp=2", one.source()), Errc::kUsage, "stages=uniform");
  Model odd = Pipeline({{0, 1}, {2, 3, 4, 5}});
  ExpectRefused(Resolve("pp=3", odd.source()), Errc::kUsage, "no known partition method");
  ExpectRefused(Resolve("pp=2,stages=0-2", one.source()), Errc::kUsage, "1 ranges for pp=2");
  ExpectRefused(Resolve("pp=2,stages=0-2,3-4", one.source()), Errc::kUsage, "layers 0 to 5");
  ExpectRefused(Resolve("pp=7,stages=uniform", one.source()), Errc::kInfeasible, "stage 6");
  ExpectRefused(Resolve("pp=2,zero=2,stages=uniform", one.source()), Errc::kUnsupported, "zero=2");
}

TEST(TargetSpecTest, RoundRobinIsRefusedWhereDeepSpeedIgnoresIt) {
  Model model;
  model.Change([](Topology& from) { from.dtype = DType::kBF16; });
  model.Add("a.weight", {2, 3});
  pickle::Node* config = model.arena().Dict();
  pickle::Node* types = model.arena().Dict();
  Set(model.arena(), types, "grad_accum_dtype", model.arena().String("fp32"));
  Set(model.arena(), config, "data_types", types);
  Set(model.arena(), model.model(), "ds_config", config);
  const auto write = [&](const char* text) -> Result<Written> {
    SW_TRY_ASSIGN(const Topology to, Resolve(text, model.source()));
    return WriteDeepSpeed(model.source(), to);
  };
  ExpectRefused(write("zero=1,round_robin=true"), Errc::kUnsupported, "omit round_robin");
  for (const char* text :
       {"zero=1", "zero=2,round_robin=true", "zero=1,dtype=fp16,round_robin=true"}) {
    EXPECT_TRUE(write(text).has_value()) << text << ": " << write(text).error().message;
  }
  Set(model.arena(), types, "grad_accum_dtype", model.arena().String("bf16"));
  EXPECT_TRUE(write("zero=1,round_robin=true").has_value());
}

TEST(TargetSpecTest, TiedLayersMustBeKnown) {
  Model model = Pipeline({{0, 1, 2}, {3, 4, 5}});
  Param& tied = model.source().params[0];
  tied.name = "tied_modules.embed.weight";
  tied.tied_layers = {0};
  ExpectRefused(Resolve("pp=3", model.source()), Errc::kUnsupported, "tied_modules.embed.weight");
  EXPECT_TRUE(Resolve("pp=1", model.source()).has_value());
  tied.tied_layers = {0, 5};
  EXPECT_TRUE(Resolve("pp=3", model.source()).has_value());
}

}  // namespace
}  // namespace shardwright::checkpoints::test
