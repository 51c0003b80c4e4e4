// SPDX-License-Identifier: Apache-2.0
#include "convert/check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "engine/layout/states.h"
#include "opened.h"

namespace shardwright::convert {
namespace {

class Checked : public os::Scratch {
 protected:
  static CheckReport Compare(const std::string& a, const std::string& b) {
    const auto left = Opened(a);
    const auto right = Opened(b);
    if (!left || !right) return {};
    return Compare(left, right);
  }

  static CheckReport Compare(const std::unique_ptr<Input>& left,
                             const std::unique_ptr<Input>& right) {
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    auto report = Check(*comm, *left, *right, {}, sink);
    EXPECT_TRUE(report.has_value()) << report.error().message;
    return report ? *report : CheckReport{};
  }

  static bool Says(const CheckReport& report, const std::string& words) {
    return std::any_of(report.differences.begin(), report.differences.end(),
                       [&](const auto& line) { return line.find(words) != std::string::npos; });
  }
};

TEST_F(Checked, ACheckpointIsItself) {
  const CheckReport report = Compare(Own("zero2_w3_frozen_tied"), Own("zero2_w3_frozen_tied"));
  EXPECT_EQ(report.difference_count, 0U) << testing::PrintToString(report.differences);
  EXPECT_EQ(report.tensors_different, 0U);
  EXPECT_GT(report.tensors_equal, 40U);
  EXPECT_GT(report.bytes_compared, 10000U);
}

TEST_F(Checked, ACheckpointOfAnotherLayoutIsTheSame) {
  ConvertOptions options;
  options.output = At("out");
  const auto input = Opened(Own("bf16_zero2_w2"));
  ASSERT_NE(input, nullptr);
  const auto converted = Converted(*input, "zero=3,dp=3", options);
  ASSERT_TRUE(converted.has_value()) << converted.error().message;
  const CheckReport report = Compare(Own("bf16_zero2_w2"), At("out"));
  EXPECT_EQ(report.difference_count, 0U) << testing::PrintToString(report.differences);
  EXPECT_GT(report.tensors_equal, 40U);
}

TEST_F(Checked, AnotherStepDiffersInEveryTrainedTensor) {
  const std::string series = Own("moe4_ep2_series");
  const CheckReport report = Compare(series + "/global_step4", series + "/global_step5");
  EXPECT_GT(report.tensors_different, 30U);
  EXPECT_GT(report.tensors_equal, 0U) << "the buffers";
  EXPECT_GE(report.difference_count, report.tensors_different);
  EXPECT_EQ(report.differences.size(), kShownDifferences);
  EXPECT_TRUE(Says(report, "embed.emb.weight")) << testing::PrintToString(report.differences);
}

TEST_F(Checked, ModelsThatAreNotTheSameDifferInWhatTheyHave) {
  const CheckReport report = Compare(Own("zero1_w2"), Own("zero1_w2_sgd"));
  EXPECT_TRUE(Says(report, "step: 4 (0x40800000) and nothing"))
      << testing::PrintToString(report.differences);
  EXPECT_EQ(report.difference_count, 130U) << "more than are shown";
}

// Units are compared by themselves, and elements are counted from the beginning of the tensor.
TEST_F(Checked, AnElementIsTheTensors) {
  constexpr std::size_t kElems = 400000;  // of 4 bytes: more than a unit
  const std::string header =
      R"({"w":{"dtype":"F32","shape":[400000],"data_offsets":[0,1600000]}} )";
  std::string file(8, '\0');
  file[0] = static_cast<char>(header.size());
  file += header + std::string(4 * kElems, '\0');
  fs::create_directories(At("a"));
  fs::create_directories(At("b"));
  Put("a/model.safetensors", file);
  file[8 + header.size() + std::size_t{4} * 300001] = 1;
  Put("b/model.safetensors", file);
  const CheckReport report = Compare(At("a"), At("b"));
  EXPECT_EQ(report.difference_count, 1U);
  EXPECT_TRUE(Says(report, ": element 300001: ")) << testing::PrintToString(report.differences);
}

/// Reads as another source, except that one member has other bits.
class Flipped final : public exec::ByteSource {
 public:
  Flipped(std::unique_ptr<exec::ByteSource> inner, std::uint32_t member)
      : inner_(std::move(inner)), member_(member) {}

  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    SW_TRY(inner_->Read(member, offset, out));
    if (member != member_) return {};
    for (std::byte& byte : out) byte ^= std::byte{1};
    return {};
  }
  std::uint64_t bytes_read() const override { return inner_->bytes_read(); }
  std::uint64_t files_read() const override { return inner_->files_read(); }

 private:
  std::unique_ptr<exec::ByteSource> inner_;
  std::uint32_t member_;
};

/// Reads as another source, except that some members are zeros.
class Zeroed final : public exec::ByteSource {
 public:
  Zeroed(std::unique_ptr<exec::ByteSource> inner, std::set<std::uint32_t> members)
      : inner_(std::move(inner)), members_(std::move(members)) {}

  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    SW_TRY(inner_->Read(member, offset, out));
    if (members_.contains(member)) std::ranges::fill(out, std::byte{0});
    return {};
  }
  std::uint64_t bytes_read() const override { return inner_->bytes_read(); }
  std::uint64_t files_read() const override { return inner_->files_read(); }

 private:
  std::unique_ptr<exec::ByteSource> inner_;
  std::set<std::uint32_t> members_;
};

/// Makes all optimizer states of a checkpoint zeros.
void ZeroStates(Input* input) {
  layout::ShardMap& map = input->checkpoint.map;
  for (layout::Member& member : map.members) member.crc32.reset();
  std::set<std::uint32_t> members;
  for (const layout::LogicalTensor& tensor : map.tensors) {
    if (layout::IsModelState(tensor.state)) continue;
    for (const layout::Fragment& fragment : tensor.fragments) {
      for (const layout::Region& region : map.arrays[fragment.at.array].regions) {
        members.insert(region.member);
      }
    }
  }
  input->bytes = std::make_unique<Zeroed>(std::move(input->bytes), std::move(members));
}

/// Removes the optimizer state of one parameter and returns its name.
std::string TakeState(checkpoints::Checkpoint* checkpoint) {
  for (checkpoints::Param& param : checkpoint->params) {
    if (param.scalars.empty()) continue;
    param.scalars.clear();
    std::erase_if(checkpoint->map.tensors, [&](const layout::LogicalTensor& tensor) {
      return tensor.name == param.name && !layout::IsModelState(tensor.state);
    });
    return param.name;
  }
  return "";
}

TEST_F(Checked, ZerosAreTheStateOfAParameterThatHasNone) {
  for (const bool turned : {false, true}) {
    const auto with = Opened(Own("zero1_w2"));
    const auto without = Opened(Own("zero1_w2"));
    ASSERT_TRUE(with != nullptr && without != nullptr);
    const std::string name = TakeState(&without->checkpoint);
    const auto compare = [&] { return turned ? Compare(without, with) : Compare(with, without); };
    const CheckReport before = compare();
    EXPECT_EQ(before.difference_count, 2U) << testing::PrintToString(before.differences);
    EXPECT_TRUE(Says(before, '"' + name + "\" exp_avg: only in the " +
                                 (turned ? "second" : "first") + ", and not zeros"))
        << testing::PrintToString(before.differences);
    ZeroStates(with.get());
    ZeroStates(without.get());
    const CheckReport after = compare();
    EXPECT_EQ(after.difference_count, 0U) << testing::PrintToString(after.differences);
    ASSERT_EQ(after.notes.size(), 1U);
    EXPECT_NE(after.notes[0].find(name), std::string::npos) << after.notes[0];
  }
}

// The check notes data that one of two formats does not record, and compares the elements.
class CheckedAgainstDcp : public Checked {
 protected:
  /// Opens a source and its conversion in a DCP folder.
  void Open(const std::string& name) {
    left_ = Opened(Own(name));
    ASSERT_NE(left_, nullptr);
    ConvertOptions options;
    options.output = At("dcp");
    const auto converted = Converted(*left_, "dp_shard=2", options, "dcp");
    ASSERT_TRUE(converted.has_value()) << converted.error().message;
    right_ = Opened(At("dcp"));
    ASSERT_NE(right_, nullptr);
  }
  static bool Notes(const CheckReport& report, const std::string& words) {
    return std::any_of(report.notes.begin(), report.notes.end(),
                       [&](const auto& line) { return line.find(words) != std::string::npos; });
  }

  std::unique_ptr<Input> left_;
  std::unique_ptr<Input> right_;
};

TEST_F(CheckedAgainstDcp, FrozenAndTiedTensorsAreTheSame) {
  Open("zero2_w3_frozen_tied");
  for (const bool turned : {false, true}) {
    const CheckReport report = turned ? Compare(right_, left_) : Compare(left_, right_);
    EXPECT_EQ(report.difference_count, 0U) << testing::PrintToString(report.differences);
    EXPECT_TRUE(Notes(report, "trained, frozen or buffers"))
        << testing::PrintToString(report.notes);
    EXPECT_TRUE(Notes(report, "stored twice in the other")) << testing::PrintToString(report.notes);
  }
}

TEST_F(CheckedAgainstDcp, TheElementsOfFrozenAndTiedTensorsAreCompared) {
  Open("zero2_w3_frozen_tied");
  std::size_t changed = 0;
  for (const checkpoints::Param& param : left_->checkpoint.params) {
    if (param.kind != checkpoints::ParamKind::kFrozen && param.alias_of.empty()) continue;
    const auto other = Opened(At("dcp"));
    layout::ShardMap& map = other->checkpoint.map;
    for (layout::Member& member : map.members) member.crc32.reset();
    const auto own = std::find_if(map.tensors.begin(), map.tensors.end(),
                                  [&](const auto& one) { return one.name == param.name; });
    if (own == map.tensors.end()) continue;
    other->bytes = std::make_unique<Flipped>(
        std::move(other->bytes),
        map.arrays[own->fragments.front().at.array].regions.front().member);
    const CheckReport report = Compare(left_, other);
    EXPECT_GT(report.difference_count, 0U) << param.name;
    EXPECT_TRUE(Says(report, param.name)) << testing::PrintToString(report.differences);
    ++changed;
  }
  EXPECT_GE(changed, 2U);
}

/// Expects exactly one difference between a checkpoint and itself in another format or layout.
class OneDifference : public Checked {
 protected:
  /// \param format  empty: the source itself
  void Differs(std::string_view format, const std::string& target,
               const std::function<void(checkpoints::Checkpoint*)>& change,
               const std::string& words) {
    const std::string source = Own("zero1_w2");
    const auto left = Opened(source);
    ASSERT_NE(left, nullptr);
    std::string other = source;
    if (!format.empty()) {
      ConvertOptions options;
      options.output = other = At("out" + std::to_string(outputs_++));
      const auto converted = Converted(*left, target, options, format);
      ASSERT_TRUE(converted.has_value()) << converted.error().message;
    }
    const auto right = Opened(other);
    ASSERT_NE(right, nullptr);
    const CheckReport before = Compare(left, right);
    EXPECT_EQ(before.difference_count, 0U) << testing::PrintToString(before.differences);
    change(&right->checkpoint);
    const CheckReport after = Compare(left, right);
    EXPECT_GT(after.difference_count, 0U) << words;
    EXPECT_TRUE(Says(after, words)) << testing::PrintToString(after.differences);
  }
  void DiffersInAll(const std::function<void(checkpoints::Checkpoint*)>& change,
                    const std::string& words) {
    Differs("", "", change, words);
    Differs("dcp", "dp_shard=2", change, words);
  }

 private:
  int outputs_ = 0;
};

TEST_F(OneDifference, InTheIteration) {
  DiffersInAll([](checkpoints::Checkpoint* one) { one->iteration = *one->iteration + 1; },
               "iteration: ");
}

TEST_F(OneDifference, InTheSamples) {
  Differs(
      "", "",
      [](checkpoints::Checkpoint* one) {
        one->consumed_samples = one->consumed_samples.value_or(0) + 1;
      },
      "consumed samples: ");
}

TEST_F(OneDifference, InOneStep) {
  DiffersInAll(
      [](checkpoints::Checkpoint* one) {
        for (checkpoints::Param& param : one->params) {
          if (param.scalars.empty()) continue;
          param.scalars.front().bytes.front() ^= 1;
          return;
        }
      },
      "step: ");
}

TEST_F(OneDifference, InAStepThatIsNotThere) {
  DiffersInAll(
      [](checkpoints::Checkpoint* one) {
        for (checkpoints::Param& param : one->params) {
          if (param.scalars.empty()) continue;
          param.scalars.clear();
          return;
        }
      },
      " and nothing");
}

TEST_F(OneDifference, InAStateThatOneSideHas) {
  DiffersInAll(
      [](checkpoints::Checkpoint* one) {
        std::erase_if(one->map.tensors, [&](const layout::LogicalTensor& tensor) {
          return tensor.state == "exp_avg_sq";
        });
      },
      "exp_avg_sq: only in the first");
}

TEST_F(OneDifference, InAParameterThatOneSideHas) {
  DiffersInAll(
      [](checkpoints::Checkpoint* one) {
        const std::string name = one->params.front().name;
        std::erase_if(one->map.tensors, [&](const auto& tensor) { return tensor.name == name; });
        one->params.front().name += "_other";
      },
      ": only in the second");
}

TEST_F(OneDifference, InWhatIsTrained) {
  DiffersInAll(
      [](checkpoints::Checkpoint* one) {
        for (checkpoints::Param& param : one->params) {
          if (param.kind == checkpoints::ParamKind::kTrainable) {
            param.kind = checkpoints::ParamKind::kFrozen;
            return;
          }
        }
      },
      "different kinds (trainable, frozen or buffer)");
}

TEST_F(OneDifference, InTheShapeOfAState) {
  Differs(
      "", "",
      [](checkpoints::Checkpoint* one) {
        for (layout::LogicalTensor& tensor : one->map.tensors) {
          if (tensor.state != "exp_avg" || tensor.shape.size() < 2) continue;
          tensor.shape = {Elems(tensor.shape)};
          return;
        }
      },
      ": shape [");
}

TEST_F(OneDifference, InTheTypeOfAState) {
  Differs(
      "", "",
      [](checkpoints::Checkpoint* one) {
        // All of an array are of its type.
        for (layout::Array& array : one->map.arrays) {
          if (array.dtype == DType::kF32) array.dtype = DType::kI32;
        }
        for (layout::LogicalTensor& tensor : one->map.tensors) {
          if (tensor.dtype == DType::kF32) tensor.dtype = DType::kI32;
        }
      },
      ": float32 and int32");
}

TEST_F(OneDifference, InWhatAParameterIsTiedTo) {
  Differs(
      "", "", [](checkpoints::Checkpoint* one) { one->params.front().alias_of = "another"; },
      ": tied to nothing and to \"another\"");
}

// Bytes damaged since the source was written are not a difference between two models.
TEST_F(Checked, DamageOfEitherSideIsToldAsDamage) {
  const std::string name = "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt";
  fs::copy(Own("zero1_w2"), At("in"), fs::copy_options::recursive);
  std::string bytes = Get("in/" + name);
  const auto whole = Opened(Own("zero1_w2"));
  ASSERT_NE(whole, nullptr);
  // The first elements of the first member of this file that holds payload.
  const layout::ShardMap& map = whole->checkpoint.map;
  const auto member = std::find_if(map.members.begin(), map.members.end(), [&](const auto& one) {
    return map.files[one.file].ends_with(name) && one.bytes > 1000;
  });
  ASSERT_NE(member, map.members.end());
  bytes[member->offset] ^= 1;
  Put("in/" + name, bytes);
  const auto damaged = Opened(At("in"));
  ASSERT_NE(damaged, nullptr);
  for (const bool first : {true, false}) {
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    const auto report =
        first ? Check(*comm, *damaged, *whole, {}, sink) : Check(*comm, *whole, *damaged, {}, sink);
    ASSERT_FALSE(report) << first;
    EXPECT_EQ(report.error().code, Errc::kBadInput);
    EXPECT_NE(report.error().message.find("CRC-32"), std::string::npos) << report.error().message;
  }
}

TEST_F(OneDifference, InAnOption) {
  DiffersInAll(
      [](checkpoints::Checkpoint* one) {
        pickle::Node* options = pickle::CopyDict(*one->arena, one->groups.front().options);
        pickle::Set(*one->arena, options, "weight_decay", one->arena->Float(0.375));
        one->groups.front().options = options;
      },
      "weight_decay: ");
}

TEST_F(OneDifference, InAnOptionThatOneSideHas) {
  DiffersInAll(
      [](checkpoints::Checkpoint* one) {
        pickle::Node* options = pickle::CopyDict(*one->arena, one->groups.front().options);
        pickle::Remove(options, "weight_decay");
        one->groups.front().options = options;
      },
      "weight_decay: ");
}

TEST_F(OneDifference, InTheGroupOfAParameter) {
  Differs(
      "", "",
      [](checkpoints::Checkpoint* one) {
        one->groups.push_back(one->groups.front());
        for (checkpoints::Param& param : one->params) {
          if (param.group == 0) param.group = 1;
        }
      },
      "parameter group");
}

TEST_F(OneDifference, InTheMembersOfEqualGroups) {
  const auto left = Opened(Own("zero2_w3_frozen_tied"));
  const auto right = Opened(Own("zero2_w3_frozen_tied"));
  ASSERT_TRUE(left && right);
  for (Input* input : {left.get(), right.get()}) {
    input->checkpoint.groups.push_back(input->checkpoint.groups.front());
  }
  EXPECT_EQ(Compare(left, right).difference_count, 0U);
  for (checkpoints::Param& param : right->checkpoint.params) {
    if (param.group != 0) continue;
    param.group = 1;
    break;
  }
  const CheckReport report = Compare(left, right);
  EXPECT_EQ(report.difference_count, 1U) << testing::PrintToString(report.differences);
  EXPECT_TRUE(Says(report, "in parameter group 0 and 1"));
}

}  // namespace
}  // namespace shardwright::convert
