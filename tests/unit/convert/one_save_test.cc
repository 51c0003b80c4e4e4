// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "opened.h"
#include "unit/checkpoints/tiny_checkpoint.h"

namespace shardwright::convert {
namespace {

using checkpoints::Node;
using checkpoints::PtFile;
using checkpoints::TinyZero;

/// Keeps warnings and notes.
class Heard : public NullSink {
 public:
  void Warn(std::string message) override { text += message + "\n"; }
  void Note(std::string message, int) override { text += message + "\n"; }
  bool Has(std::string_view words) const { return text.find(words) != std::string::npos; }

  std::string text;
};

/// Puts a batch size, which every engine has, and counters of the engine into the configuration.
void SetCounters(PtFile& file, Node* root, std::int64_t steps, std::int64_t skipped,
                 const Node* zero = nullptr) {
  Node* config = file.Dict({{"train_batch_size", file.arena.Int(2)}});
  if (zero != nullptr) pickle::Set(file.arena, config, "zero_optimization", zero);
  pickle::Set(file.arena, root, "ds_config", config);
  pickle::Set(file.arena, root, "global_steps", file.arena.Int(steps));
  pickle::Set(file.arena, root, "skipped_steps", file.arena.Int(skipped));
}

/// Changes one element of a weight in the model file by a factor.
void ScaleWeight(PtFile& file, Node* root, const std::string& name, const Shape& shape,
                 std::size_t param, float factor) {
  std::vector<float> values;
  for (std::uint64_t i = 0; i < Elems(shape); ++i) {
    values.push_back(checkpoints::TinyValue(param, "fp32", i));
  }
  values[1] *= factor;
  Node* module = const_cast<Node*>(root->Find("module"));
  pickle::Remove(module, name);
  pickle::Set(file.arena, module, name, file.Tensor(values, shape));
}

class OneSaveTest : public os::Scratch {
 protected:
  /// Opens At("ckpt"). \returns the result of the check
  Result<OneSave> Open(bool allow_mixed = false, bool payload = true) {
    const auto comm = comm::MakeSerialComm();
    InputOptions options;
    options.source_paths = {At("ckpt")};
    options.allow_mixed = allow_mixed;
    if (!payload) options.proof.reset();
    sink_ = std::make_unique<Heard>();
    SW_TRY_ASSIGN(input_, OpenInput(*comm, options, *sink_));
    return input_->one_save;
  }
  Result<OneSave> Written(const TinyZero& tiny, bool allow_mixed = false, bool payload = true) {
    tiny.Write(At("ckpt"));
    return Open(allow_mixed, payload);
  }
  Result<ConvertReport> Convert(const std::string& target, bool strict = false) {
    ConvertOptions options;
    options.output = At("out");
    options.strict = strict;
    return Converted(*input_, target, options);
  }

  std::unique_ptr<Heard> sink_;
  std::unique_ptr<Input> input_;
};

TEST_F(OneSaveTest, StepsThatAgreeSayNothing) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) { SetCounters(file, root, 6, 2); };
  const auto found = Written(tiny);
  ASSERT_TRUE(found.has_value()) << found.error().message;
  EXPECT_EQ(input_->checkpoint.save.steps, checkpoints::SaveEvidence::Steps::kAgree)
      << "skipped steps are no steps of the optimizer";
  EXPECT_EQ(sink_->text, "");
}

// Releases such as 0.12 step once to make the optimizer's state.
TEST_F(OneSaveTest, OneStepMoreThanCountedAgrees) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) { SetCounters(file, root, 3, 0); };
  const auto found = Written(tiny);
  ASSERT_TRUE(found.has_value()) << found.error().message;
  EXPECT_EQ(input_->checkpoint.save.steps, checkpoints::SaveEvidence::Steps::kAgree);
  EXPECT_EQ(sink_->text, "");
}

TEST_F(OneSaveTest, AnExistingOutputIsRefusedBeforeWeightsAreRead) {
  TinyZero tiny;
  tiny.change_model = [&](PtFile& file, Node* root) {
    ScaleWeight(file, root, "l1.weight", {7, 6}, 1, 1.5F);
  };
  tiny.Write(At("ckpt"));
  fs::create_directories(At("out"));
  const auto comm = comm::MakeSerialComm();
  NullSink sink;
  InputOptions options;
  options.source_paths = {At("ckpt")};
  options.output = At("out");
  for (const bool is_new : {true, false}) {
    options.new_output = is_new;
    const auto refused = OpenInput(*comm, options, sink);
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().code, is_new ? Errc::kBusy : Errc::kBadInput)
        << refused.error().message;
  }
}

TEST_F(OneSaveTest, ModelStatesOfALaterSaveAreAnError) {
  TinyZero tiny;
  tiny.change_model = [&](PtFile& file, Node* root) {
    SetCounters(file, root, 8, 0);
    ScaleWeight(file, root, "l1.weight", {7, 6}, 1, 1.5F);
  };
  const auto found = Written(tiny);
  ASSERT_FALSE(found.has_value());
  EXPECT_EQ(found.error().code, Errc::kBadInput);
  for (const char* words :
       {"two saves", "mp_rank_00_model_states.pt was saved at optimizer step 8 (global_steps 8",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt at step 4",
        "1 of 5 parameters have compute weights", "\"l1.weight\" element 1", "--allow-mixed"}) {
    EXPECT_NE(found.error().message.find(words), std::string::npos) << words << "\n"
                                                                    << found.error().message;
  }
}

TEST_F(OneSaveTest, AllowMixedReportsInstead) {
  TinyZero tiny;
  tiny.change_model = [&](PtFile& file, Node* root) {
    SetCounters(file, root, 8, 0);
    ScaleWeight(file, root, "l1.weight", {7, 6}, 1, 1.5F);
  };
  const auto found = Written(tiny, true);
  ASSERT_TRUE(found.has_value()) << found.error().message;
  EXPECT_TRUE(sink_->Has("the files come from two saves (--allow-mixed)")) << sink_->text;
  EXPECT_EQ(found->weights_apart, std::vector<std::string>{"l1.weight"});
  const auto at_three = Convert("zero=3");
  ASSERT_TRUE(at_three.has_value()) << at_three.error().message;
  ASSERT_FALSE(at_three->not_carried.empty());
  EXPECT_NE(at_three->not_carried.back().find("the compute weights of 1 parameters"),
            std::string::npos)
      << testing::PrintToString(at_three->not_carried);
}

// A change at a small learning rate is one unit in the last place in bfloat16.
TEST_F(OneSaveTest, WhereStepsDifferTheSmallestDifferenceCounts) {
  TinyZero tiny;
  tiny.change_model = [&](PtFile& file, Node* root) {
    SetCounters(file, root, 8, 0);
    ScaleWeight(file, root, "l2.bias", {6}, 4, 1.0F + 1.2e-7F);
  };
  EXPECT_FALSE(Written(tiny).has_value());
}

TEST_F(OneSaveTest, AResetOptimizerIsAccepted) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) { SetCounters(file, root, 1000, 0); };
  const auto found = Written(tiny);
  ASSERT_TRUE(found.has_value()) << found.error().message;
  EXPECT_TRUE(sink_->Has("the files come from one save")) << sink_->text;
  EXPECT_TRUE(found->weights_apart.empty());
  EXPECT_EQ(found->doubt, "");
}

TEST_F(OneSaveTest, AnOptimizerWithoutStepsIsJudgedByItsWeights) {
  TinyZero tiny;
  tiny.step = TinyZero::Step::kNone;
  tiny.change_model = [](PtFile& file, Node* root) { SetCounters(file, root, 9, 0); };
  ASSERT_TRUE(Written(tiny).has_value());
  EXPECT_EQ(sink_->text, "");
  fs::remove_all(At("ckpt"));
  tiny.change_model = [](PtFile& file, Node* root) {
    SetCounters(file, root, 9, 0);
    ScaleWeight(file, root, "emb.weight", {11, 6}, 0, -1.0F);
  };
  const auto found = Written(tiny);
  ASSERT_FALSE(found.has_value());
  EXPECT_NE(found.error().message.find("\"emb.weight\" element 1"), std::string::npos)
      << found.error().message;
}

// An expert's or a layer's file of another save: all counters agree.
TEST_F(OneSaveTest, WeightsOfAnotherSaveAreFoundWhereStepsAgree) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) {
    SetCounters(file, root, 4, 0);
    ScaleWeight(file, root, "l2.weight", {6, 7}, 2, 1.01F);
  };
  EXPECT_FALSE(Written(tiny).has_value());
}

TEST_F(OneSaveTest, ZenFlowsWeightsAreReported) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) {
    SetCounters(file, root, 4, 0,
                file.Dict({{"stage", file.arena.Int(2)}, {"zenflow", file.Dict({})}}));
    ScaleWeight(file, root, "l2.weight", {6, 7}, 2, 1.01F);
  };
  const auto found = Written(tiny);
  ASSERT_TRUE(found.has_value()) << found.error().message;
  EXPECT_TRUE(sink_->Has("ZenFlow")) << sink_->text;
  EXPECT_EQ(found->weights_apart, std::vector<std::string>{"l2.weight"});
  const auto kept = Convert("zero=2,dp=3");
  ASSERT_TRUE(kept.has_value()) << kept.error().message;
  EXPECT_TRUE(std::none_of(kept->not_carried.begin(), kept->not_carried.end(), [](const auto& one) {
    return one.find("the compute weights") != std::string::npos;
  })) << testing::PrintToString(kept->not_carried);
  fs::remove_all(At("out"));
  const auto strict = Convert("zero=3", true);
  ASSERT_FALSE(strict.has_value());
  EXPECT_EQ(strict.error().code, Errc::kMismatch);
  EXPECT_NE(strict.error().message.find("the compute weights of 1 parameters"), std::string::npos)
      << strict.error().message;
}

TEST_F(OneSaveTest, WithoutPayloadsDifferingStepsAreReported) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) { SetCounters(file, root, 8, 0); };
  ASSERT_TRUE(Written(tiny, false, false).has_value());
  EXPECT_TRUE(sink_->Has("may come from two saves")) << sink_->text;
}

// Stage 3 keeps no weights next to the masters: the check cannot decide, also with --strict.
TEST_F(OneSaveTest, AtStage3DifferingStepsAreADoubt) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) { SetCounters(file, root, 4, 0); };
  ASSERT_TRUE(Written(tiny).has_value());
  ASSERT_TRUE(Convert("zero=3").has_value());
  fs::remove_all(At("ckpt"));
  fs::rename(At("out"), At("ckpt"));
  auto found = Open();
  ASSERT_TRUE(found.has_value()) << found.error().message;
  EXPECT_EQ(found->doubt, "");
  const auto comm = comm::MakeSerialComm();
  input_->checkpoint.save.steps = checkpoints::SaveEvidence::Steps::kDiffer;
  input_->checkpoint.save.difference = "a was saved at step 8, b at step 4";
  found =
      CheckOneSave(*comm, input_->checkpoint, *input_->bytes, {}, CompareOptions{}, false, *sink_);
  ASSERT_TRUE(found.has_value()) << found.error().message;
  EXPECT_NE(found->doubt.find("b at step 4"), std::string::npos);
  input_->one_save = *found;
  fs::remove_all(At("out"));
  const auto strict = Convert("zero=3,dp=3", true);
  ASSERT_FALSE(strict.has_value());
  EXPECT_EQ(strict.error().code, Errc::kMismatch);
  EXPECT_TRUE(Convert("zero=3,dp=3").has_value());
}

// Damage is not another save: the reader first verifies the checksum of a file that looks like one.
TEST_F(OneSaveTest, DamageIsCalledDamage) {
  TinyZero tiny;
  tiny.change_model = [](PtFile& file, Node* root) { SetCounters(file, root, 4, 0); };
  tiny.Write(At("ckpt"));
  ASSERT_TRUE(Open().has_value());
  const layout::ShardMap& map = input_->checkpoint.map;
  const auto tensor = layout::TensorIndex(map).Find("emb.weight", "weight");
  ASSERT_TRUE(tensor.has_value());
  const auto& fragment = map.tensors[*tensor].fragments.front();
  const auto& member = map.members[map.arrays[fragment.at.array].regions.front().member];
  std::fstream file(At("ckpt/global_step4/mp_rank_00_model_states.pt"),
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(member.offset + 2));
  file.put('\x55');
  file.close();
  const auto found = Open();
  ASSERT_FALSE(found.has_value());
  EXPECT_EQ(found.error().message.find("two saves"), std::string::npos) << found.error().message;
  EXPECT_NE(found.error().message.find("CRC"), std::string::npos) << found.error().message;
}

TEST_F(OneSaveTest, CheckpointsOfTrainersAreAccepted) {
  std::size_t count = 0;
  for (const auto& one : fs::directory_iterator(fs::path(SW_SOURCE_DIR) / "tests/data/deepspeed")) {
    if (!fs::exists(one.path() / "ckpt")) continue;
    const auto comm = comm::MakeSerialComm();
    Heard sink;
    InputOptions options;
    options.source_paths = {(one.path() / "ckpt").string()};
    const auto input = OpenInput(*comm, options, sink);
    if (!input && input.error().code == Errc::kUnsupported) continue;  // rank-specific states
    ASSERT_TRUE(input.has_value()) << one.path() << ": " << input.error().message;
    EXPECT_FALSE(sink.Has(" save")) << one.path() << ": " << sink.text;
    EXPECT_TRUE((*input)->one_save.weights_apart.empty()) << one.path();
    ++count;
  }
  EXPECT_GT(count, 20U);
}

}  // namespace
}  // namespace shardwright::convert
