// SPDX-License-Identifier: Apache-2.0
// Optimizer states that are not tensors of their parameter's shape: states that the reader omits,
// and states that make a checkpoint rank-specific.

#include <gtest/gtest.h>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/native/deepspeed.h"
#include "fixtures.h"
#include "tiny_checkpoint.h"
#include "unit/support/os/scratch.h"

namespace shardwright::checkpoints {
namespace {

using Group = TinyZero::GroupDicts;

class OddStates : public os::Scratch {
 protected:
  void SetUp() override {
    Scratch::SetUp();
    save_ = At("save");
    fs::create_directories(save_);
  }

  /// Reads a checkpoint of `ranks` ranks after `change` modified its groups. Expects no failure.
  Checkpoint Read(const std::function<void(const Group&)>& change, std::uint64_t ranks = 2) {
    fs::remove_all(save_);
    TinyZero tiny;
    tiny.ranks = ranks;
    tiny.change_group = change;
    tiny.Write(save_);
    auto source = ScanSource({save_.string()});
    EXPECT_TRUE(source) << source.error().message;
    auto checkpoint = ReadDeepSpeed(*source, Patterns());
    EXPECT_TRUE(checkpoint) << checkpoint.error().message;
    return checkpoint ? *std::move(checkpoint) : Checkpoint();
  }

  /// Expects that the checkpoint is rank-specific, for one reason that contains these words.
  static void ExpectBound(const Checkpoint& checkpoint, const std::vector<std::string>& words) {
    const Status unbound = CheckUnbound(checkpoint);
    ASSERT_FALSE(unbound);
    EXPECT_EQ(unbound.error().code, Errc::kUnsupported);
    EXPECT_EQ(checkpoint.bound.size(), 1U);
    for (const std::string& word : words) {
      EXPECT_NE(unbound.error().message.find(word), std::string::npos)
          << "\"" << word << "\" is not in: " << unbound.error().message;
    }
    EXPECT_TRUE(layout::TensorIndex(checkpoint.map).Find("l1.weight", "exp_avg"));
  }

  fs::path save_;
};

const Node* Number(const Group& group, double value) { return group.file.arena.Float(value); }

void SetState(const Group& group, const std::string& name, const Node* value) {
  pickle::Set(group.file.arena, group.state, name, value);
}

void SetOption(const Group& group, const std::string& name, const Node* value) {
  pickle::Set(group.file.arena, group.options, name, value);
}

std::vector<float> Zeros(std::uint64_t count) { return std::vector<float>(count); }

TEST_F(OddStates, AListOfTensorsBindsTheCheckpoint) {
  ExpectBound(
      Read([](const Group& group) {
        SetState(group, "preconditioners", group.file.arena.List({group.file.Flat({1, 2, 3})}));
      }),
      {"\"preconditioners\"", "tensor or number expected, found list"});
}

TEST_F(OddStates, AStateWithTheNameOfAWeightBindsTheCheckpoint) {
  ExpectBound(Read([](const Group& group) {
                SetState(group, "weight", group.file.Flat(Zeros(group.partition)));
              }),
              {"\"weight\"", "its name is reserved for tensors of the model"});
}

TEST_F(OddStates, TheRmsOfAdafactorIsLeftOutAndSaid) {
  const Checkpoint read = Read([](const Group& group) {
    SetOption(group, "clip_threshold", Number(group, 1.0));
    SetState(group, "RMS", group.file.Tensor({0.5F + static_cast<float>(group.rank)}, {}));
  });
  EXPECT_TRUE(CheckUnbound(read));
  ASSERT_EQ(read.left_out.size(), 1U);
  for (const char* word : {"\"RMS\"", "Adafactor", "each step", "rank_0"}) {
    EXPECT_NE(read.left_out[0].find(word), std::string::npos) << read.left_out[0];
  }
  ASSERT_EQ(read.params[0].scalars.size(), 1U);
  EXPECT_EQ(read.params[0].scalars[0].state, "step");
}

TEST_F(OddStates, AnRmsOfAnotherOptimizerThatDiffersBindsToTheRanks) {
  const Checkpoint read = Read([](const Group& group) {
    SetState(group, "RMS", Number(group, 0.5 + static_cast<double>(group.rank)));
  });
  ExpectBound(read, {"\"RMS\"", "0.5", "1.5", "rank_0", "rank_1"});
  EXPECT_EQ(read.params[0].scalars.size(), 1U);
}

TEST_F(OddStates, NumbersThatAllRanksShareAreKept) {
  const Checkpoint read =
      Read([](const Group& group) { SetState(group, "eta", Number(group, 0.5)); });
  EXPECT_TRUE(CheckUnbound(read));
  EXPECT_EQ(read.params[0].scalars.size(), 2U);
}

TEST_F(OddStates, EightBitScalesBindToTheRanksAlsoWhereTheirLengthWouldFit) {
  for (const std::uint64_t ranks : {1U, 2U, 3U}) {
    const Checkpoint read = Read(
        [](const Group& group) {
          SetState(group, "absmax1", group.file.Flat(Zeros(group.partition)));
        },
        ranks);
    ExpectBound(read, {"\"absmax1\"", "bitsandbytes", "block"});
  }
  const Checkpoint one =
      Read([](const Group& group) { SetState(group, "absmax1", group.file.Flat(Zeros(1))); }, 1);
  ExpectBound(one, {"\"absmax1\"", "[1]"});
}

TEST_F(OddStates, ATableLongerThanThePartitionDoesNotChangeThePartition) {
  // All of a group fits into the table, so its length must not be used as the partition's length.
  const Checkpoint read =
      Read([](const Group& group) { SetState(group, "table", group.file.Flat(Zeros(256))); });
  ExpectBound(read, {"\"table\"", "[256]", "[76]"});
}

TEST_F(OddStates, StackedMomentsBindToTheRanks) {
  for (const std::uint64_t ranks : {1U, 2U}) {
    const Checkpoint read = Read(
        [](const Group& group) {
          SetState(group, "state1",
                   group.file.Tensor(Zeros(2 * group.partition), {2, group.partition}));
        },
        ranks);
    ExpectBound(read, {"\"state1\"", "[2, " + std::string(ranks == 1 ? "150" : "76") + "]"});
  }
}

TEST_F(OddStates, SlicesOfProdigyBindToTheRanks) {
  const auto slice = [](const Group& group) {
    SetOption(group, "slice_p", group.file.arena.Int(11));
    SetState(group, "p0", group.file.Flat(Zeros((group.partition + 10) / 11)));
  };
  ExpectBound(Read(slice), {"\"p0\"", "Prodigy", "slice_p", "[7]", "[76]"});
  ExpectBound(Read(slice, 1), {"\"p0\"", "Prodigy"});
  const Checkpoint whole = Read([](const Group& group) {
    SetOption(group, "slice_p", group.file.arena.Int(1));
    SetState(group, "p0", group.file.Flat(Zeros(group.partition)));
  });
  EXPECT_TRUE(CheckUnbound(whole));
  EXPECT_TRUE(layout::TensorIndex(whole.map).Find("l1.weight", "p0"));
}

TEST_F(OddStates, AStateThatOneRankHasAsANumberBindsToTheRanks) {
  for (const std::uint64_t odd : {0U, 1U, 2U}) {
    const Checkpoint read = Read(
        [&](const Group& group) {
          SetState(group, "p0",
                   group.rank == odd ? group.file.Tensor({0}, {})
                                     : group.file.Flat(Zeros(group.partition)));
        },
        3);
    ExpectBound(read, {"\"p0\"", "each rank has its own", "a partition"});
  }
}

TEST_F(OddStates, OptionsThatRanksDoNotShareBindToTheRanks) {
  const Checkpoint read = Read([](const Group& group) {
    SetOption(group, "d", Number(group, 1.0 + static_cast<double>(group.rank)));
  });
  ExpectBound(read, {"option \"d\"", "group 0", "1 and 2", "rank_0", "rank_1"});
}

TEST_F(OddStates, TheStepSizesOfProdigyAreNamed) {
  const Checkpoint read = Read([](const Group& group) {
    SetOption(group, "growth_rate", Number(group, 2.0));
    SetOption(group, "d", Number(group, 1e-6 * static_cast<double>(1 + group.rank)));
  });
  ExpectBound(read, {"option \"d\"", "Prodigy", "1e-06 and 2e-06"});
}

TEST_F(OddStates, TheMomentumOfMuonBindsToTheRanksAlsoWhereItsLengthFits) {
  const Checkpoint read = Read([](const Group& group) {
    SetOption(group, "use_muon", group.file.arena.Bool(true));
    SetState(group, "momentum_buffer", group.file.Flat(Zeros(group.partition)));
  });
  ExpectBound(read, {"\"momentum_buffer\"", "Muon", "whole parameters"});
}

TEST_F(OddStates, StatesThatBitsandbytesWrapsAreReadAsIfItDidNot) {
  const auto wrap = [](const Group& group, const std::string& name, const Node* value) {
    SetState(group, "__bnb_optimizer_quant_state__", group.file.Dict({{name, value}}));
  };
  const Checkpoint read = Read(
      [&](const Group& group) { wrap(group, "state1", group.file.Flat(Zeros(group.partition))); });
  EXPECT_TRUE(CheckUnbound(read));
  EXPECT_TRUE(layout::TensorIndex(read.map).Find("l1.weight", "state1"));
  const Checkpoint eight_bits =
      Read([&](const Group& group) { wrap(group, "absmax1", group.file.Flat(Zeros(3))); });
  ExpectBound(eight_bits, {"\"absmax1\"", "bitsandbytes"});
}

TEST_F(OddStates, TheOptimizerThatTheConfigurationNamesIsNamed) {
  TinyZero tiny;
  tiny.change_group = [](const Group& group) { SetState(group, "odd", group.file.Flat(Zeros(3))); };
  tiny.change_model = [](PtFile& file, Node* root) {
    pickle::Set(file.arena, root, "ds_config",
                file.Dict({{"optimizer", file.Dict({{"type", file.arena.String("Shampoo")}})}}));
  };
  tiny.Write(save_);
  const auto source = ScanSource({save_.string()});
  const auto checkpoint = ReadDeepSpeed(*source, Patterns());
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  ExpectBound(*checkpoint, {"\"odd\"", "Shampoo"});
}

TEST_F(OddStates, APartitionThatOneRankHasLongerIsCorrupt) {
  TinyZero tiny;
  tiny.change_group = [](const Group& group) {
    const std::uint64_t more = group.rank == 1 ? 2 : 0;
    SetState(group, "exp_avg", group.file.Flat(Zeros(group.partition + more)));
  };
  tiny.Write(save_);
  const auto source = ScanSource({save_.string()});
  const auto checkpoint = ReadDeepSpeed(*source, Patterns());
  ASSERT_FALSE(checkpoint);
  EXPECT_EQ(checkpoint.error().code, Errc::kBadInput);
  for (const char* word : {"rank_1", "exp_avg", "76", "78"}) {
    EXPECT_NE(checkpoint.error().message.find(word), std::string::npos)
        << checkpoint.error().message;
  }
}

}  // namespace
}  // namespace shardwright::checkpoints
