// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a format other than DeepSpeed's, written as DeepSpeed's.

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "checkpoints/deepspeed/common/import_foreign.h"
#include "checkpoints/deepspeed/universal/universal.h"
#include "write_model.h"

namespace shardwright::checkpoints::test {
namespace {

using pickle::Node;

/// State that only this format has and DeepSpeed does not.
struct Strange : OwnState {
  std::vector<std::uint32_t> Members() const override { return {}; }
  std::vector<std::string> Contents() const override { return {"a random state", "\"args\""}; }
};

/// Two parameters and a buffer of another format, with masters and moments.
Model Foreign() {
  Model model;
  model.Add("emb.weight", {5, 4});
  model.Add("head.bias", {7});
  model.Add("table", {3}, -2);
  Checkpoint& source = model.source();
  source.origin = "strange";
  source.own = std::make_shared<const Strange>();
  source.iteration = 12;
  source.consumed_samples = 96;
  source.layout = Layout{};
  source.layout.mesh.dp_shard = 2;
  source.groups[0].options = nullptr;
  source.groups[0].hyper.lr = 0.25;
  source.groups[0].hyper.betas = {0.5, 0.75};
  return model;
}

/// The same with weights only.
Model WeightsOnly() {
  Model model = Foreign();
  Checkpoint& source = model.source();
  source.groups.clear();
  source.states.clear();
  source.own = nullptr;
  source.iteration = Fail(Errc::kBadInput, "no file records the iteration");
  source.consumed_samples.reset();
  std::erase_if(source.map.tensors, [](const layout::LogicalTensor& tensor) {
    return tensor.state != "weight" && tensor.state != "buffer";
  });
  for (Param& param : source.params) {
    param.scalars.clear();
    param.group = -1;
  }
  return model;
}

Topology Zero(std::uint64_t stage) {
  Topology to;
  to.zero = stage;
  to.dp = 2;
  return to;
}

bool Mentions(const std::vector<std::string>& texts, const std::string& word) {
  return std::any_of(texts.begin(), texts.end(),
                     [&](const std::string& text) { return text.find(word) != std::string::npos; });
}

TEST(ForeignSource, KeepsStateIterationAndHyperParameters) {
  Model model = Foreign();
  const auto written = WriteDeepSpeed(model.source(), Zero(2));
  ASSERT_TRUE(written.has_value()) << written.error().message;
  const Rendered out(model, written->target);
  const auto states = out.Parse("global_step12/mp_rank_00_model_states.pt");
  EXPECT_EQ(states.root->Find("global_steps")->integer, 12);
  EXPECT_EQ(states.root->Find("global_samples")->integer, 96);
  EXPECT_EQ(states.root->Find("lr_scheduler")->Find("last_epoch")->integer, 12);
  const std::string path = "global_step12/zero_pp_rank_0_mp_rank_00_optim_states.pt";
  const auto shard = out.Parse(path);
  const Node* inner = shard.root->Find("optimizer_state_dict");
  const Node* base = inner->Find("base_optimizer_state");
  const Node* group = base->Find("param_groups")->items.at(0);
  EXPECT_EQ(group->Find("lr")->real, 0.25);
  EXPECT_EQ(group->Find("betas")->items.at(1)->real, 0.75);
  EXPECT_EQ(group->Find("eps")->real, 1e-8);
  const Node* moment = base->Find("state")->value(0)->Find("exp_avg");
  ASSERT_NE(moment, nullptr);
  EXPECT_EQ(out.Floats(path, shard, moment).at(3),
            Model::ValueOf(model.TensorOf("emb.weight", "exp_avg"), 3));
  // The report names the state that only the other format supports, and nothing else is lost.
  ASSERT_EQ(written->not_carried.size(), 1U);
  EXPECT_TRUE(Mentions(written->not_carried, "strange"));
  EXPECT_TRUE(Mentions(written->not_carried, "a random state, \"args\""));
}

TEST(ForeignSource, OfRoundedWeightsAloneHasNoMasters) {
  Model model = WeightsOnly();
  for (layout::LogicalTensor& tensor : model.source().map.tensors) tensor.dtype = DType::kBF16;
  for (Param& param : model.source().params) param.dtype = DType::kBF16;
  const auto written = WriteDeepSpeed(model.source(), Zero(1));
  ASSERT_TRUE(written.has_value()) << written.error().message;
  EXPECT_EQ(written->not_carried.size(), 4U);
  EXPECT_TRUE(Mentions(written->not_carried, "master weights, which the source lacks"));
}

TEST(ForeignSource, OfWeightsAloneBeginsItsOptimizerAnew) {
  for (const std::uint64_t stage : {0U, 1U, 2U, 3U}) {
    Model model = WeightsOnly();
    const auto written = WriteDeepSpeed(model.source(), Zero(stage));
    ASSERT_TRUE(written.has_value()) << written.error().message;
    const Rendered out(model, written->target);
    EXPECT_EQ(written->not_carried.size(), 3U) << "weights of float32 are their own masters";
    EXPECT_FALSE(Mentions(written->not_carried, "master weights, which the source lacks"));
    EXPECT_TRUE(Mentions(written->not_carried, "moments and steps start at zero"));
    EXPECT_TRUE(Mentions(written->not_carried, "lr=0.001"));
    EXPECT_TRUE(Mentions(written->not_carried, "counted from 0"));
    if (stage == 0 || stage == 3) continue;
    const std::string path = "global_step0/zero_pp_rank_0_mp_rank_00_optim_states.pt";
    const auto shard = out.Parse(path);
    const Node* inner = shard.root->Find("optimizer_state_dict");
    EXPECT_TRUE(inner->Find("base_optimizer_state")->Find("state")->items.empty());
    const Node* master = inner->Find("single_partition_of_fp32_groups")->items.at(0);
    EXPECT_EQ(out.Floats(path, shard, master).at(3),
              Model::ValueOf(model.TensorOf("emb.weight", "weight"), 3));
  }
}

TEST(ForeignSource, BecomesAtoms) {
  Model model = WeightsOnly();
  const auto written = WriteUniversal(model.source(), Zero(1));
  ASSERT_TRUE(written.has_value()) << written.error().message;
  const Rendered out(model, written->target);
  const std::string folder = "global_step0_universal/";
  EXPECT_TRUE(out.has(folder + "zero/emb.weight/fp32.pt"));
  EXPECT_FALSE(out.has(folder + "zero/emb.weight/exp_avg.pt"));
  EXPECT_TRUE(out.has(folder + "shardwright_atoms.json"));
  EXPECT_FALSE(written->not_carried.empty());
}

TEST(ForeignSource, NeedsEveryTrainedParameterInAGroup) {
  Model model = Foreign();
  model.source().params[1].group = -1;
  const auto written = WriteDeepSpeed(model.source(), Zero(1));
  ASSERT_FALSE(written.has_value());
  EXPECT_EQ(written.error().code, Errc::kUnsupported);
  EXPECT_NE(written.error().message.find("head.bias"), std::string::npos);
}

TEST(ForeignSource, HasExpertsThatAreParametersLikeOthers) {
  Model plain = Foreign();
  const auto wanted = WriteDeepSpeed(plain.source(), Zero(1));
  ASSERT_TRUE(wanted.has_value()) << wanted.error().message;
  Model model = Foreign();
  Checkpoint& source = model.source();
  Group experts = source.groups[0];
  experts.moe = true;
  experts.params = {source.groups[0].params.back()};
  source.groups[0].params.pop_back();
  Param& expert = source.params[experts.params[0]];
  expert.expert = ExpertId{.layer = 0, .expert = 0};
  expert.group = static_cast<std::int32_t>(source.groups.size());
  source.groups.push_back(experts);
  const Format& deepspeed = *FindFormat("deepspeed");
  const auto refused = deepspeed.resolve(*ParseTarget(deepspeed, "ep=2"), source);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_NE(refused.error().message.find(expert.name), std::string::npos);
  const auto written = WriteDeepSpeed(source, Zero(1));
  ASSERT_TRUE(written.has_value()) << written.error().message;
  ASSERT_EQ(written->target.files.size(), wanted->target.files.size());
  for (std::size_t i = 0; i < wanted->target.files.size(); ++i) {
    EXPECT_EQ(written->target.files[i].bytes, wanted->target.files[i].bytes)
        << written->target.files[i].path;
  }
}

TEST(ForeignSource, GivesItsMeshToTheTarget) {
  Model model = Foreign();
  const Format& deepspeed = *FindFormat("deepspeed");
  const auto layout = deepspeed.resolve({}, model.source());
  ASSERT_TRUE(layout.has_value()) << layout.error().message;
  EXPECT_EQ(layout->mesh.dp(), 2U);
  EXPECT_EQ(layout->ranks, 2U);
  EXPECT_EQ(TopologyOf(*layout).zero, 1U);
}

TEST(Table, NamesAndPointersAreUnlike) {
  std::set<std::string_view> names;
  std::set<std::string_view> pointers;
  for (const Format& format : Formats()) {
    EXPECT_TRUE(names.insert(format.name).second) << format.name;
    EXPECT_TRUE(format.pointer.empty() || pointers.insert(format.pointer).second);
    EXPECT_EQ(format.resolve == nullptr, format.write == nullptr) << format.name;
    EXPECT_EQ(FindFormat(format.name), &format);
    for (const TargetKey& key : format.keys) {
      EXPECT_TRUE(key.is_flag || key.words.empty()) << format.name << " " << key.name;
      for (const std::string_view word : key.words) {
        EXPECT_TRUE(key.check(key.name, word)) << key.name << "=" << word;
      }
    }
  }
  EXPECT_EQ(RequireFormat("none such").error().code, Errc::kUsage);
}

TEST(ClientState, WhatRanksHaveOfTheirOwnIsTold) {
  pickle::Arena arena;
  const auto root = [&](const char* note, std::int64_t epoch, bool random) {
    Node* scheduler = arena.Dict();
    Set(arena, scheduler, "last_epoch", arena.Int(epoch));
    Node* dict = arena.Dict();
    Set(arena, dict, "module", arena.String(note));  // the engine's own
    Set(arena, dict, "global_steps", arena.Int(epoch));
    Set(arena, dict, "lr_scheduler", scheduler);
    Set(arena, dict, "note", arena.String(note));
    if (random) Set(arena, dict, "rng", arena.TensorOf({}));
    return dict;
  };
  const Node* first = root("a", 1, true);
  using Keys = std::vector<std::string>;
  EXPECT_EQ(OwnClientState(first, first), Keys{"\"rng\""});
  EXPECT_EQ(OwnClientState(first, root("b", 1, true)), (Keys{"\"note\"", "\"rng\""}));
  EXPECT_EQ(OwnClientState(root("a", 1, false), root("a", 2, false)), Keys{"\"lr_scheduler\""});
  EXPECT_EQ(OwnClientState(root("a", 1, false), first), Keys{"\"rng\""});
  EXPECT_EQ(OwnClientState(root("a", 1, false), root("a", 1, false)), Keys());

  EngineState state;
  for (const char* note : {"a", "b"}) {
    state.model_states.emplace_back().document.root = root(note, 1, false);
  }
  Topology two;
  two.tp = 2;
  EXPECT_EQ(LostClientState(state, two, two), Keys());
  const Keys lost = LostClientState(state, two, Topology());
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_TRUE(Mentions(lost, "\"note\""));
  EXPECT_FALSE(Mentions(lost, "lr_scheduler"));
}

TEST(Table, SidesAreThoseOfTheProgram) {
  const auto first = [](const char* name, const TargetSpec& spec) {
    const Format& format = *FindFormat(name);
    if (format.sides == nullptr || format.sides(spec).empty()) return std::string();
    return std::string(format.sides(spec).front());
  };
  EXPECT_EQ(first("megatron", {}), "megatron_te_saved");
  EXPECT_EQ(first("safetensors", {}), "hf");
  EXPECT_EQ(first("dcp", {{{"flavour", "torchtitan"}}}), "torchtitan");
  EXPECT_EQ(first("dcp", {{{"flavour", "transformers"}}}), "hf");
  EXPECT_EQ(first("dcp", {{{"flavour", "plain"}}}), "");
  EXPECT_EQ(first("dcp", {}), "");
  EXPECT_EQ(first("dtensor", {{{"trainer", "verl"}}}), "hf");
  EXPECT_EQ(first("dtensor", {{{"trainer", "torch_checkpointing"}}}), "");
  EXPECT_EQ(first("deepspeed", {}), "");
}

TEST(Table, KeysAreThoseOfTheFormat) {
  EXPECT_TRUE(ParseTarget(*FindFormat("universal"), "zero=1,loader=any"));
  const auto refused = ParseTarget(*FindFormat("deepspeed"), "loader=any");
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().message.find("is not one of dp, tp"), std::string::npos);
  EXPECT_EQ(ParseTarget(*FindFormat("universal"), "loader=none").error().code, Errc::kUsage);
}

}  // namespace
}  // namespace shardwright::checkpoints::test
