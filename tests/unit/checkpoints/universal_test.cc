// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <functional>

#include "checkpoints/deepspeed/common/target.h"
#include "convert/convert.h"
#include "convert/input.h"
#include "fixtures.h"
#include "same_checkpoint.h"
#include "support/comm/comm.h"
#include "tiny_checkpoint.h"

// Atoms written by this project and by DeepSpeed's converter must read as the complete source.

namespace shardwright::checkpoints {
namespace {

/// The folder of a case.
class Atoms : public testing::TestWithParam<fs::path> {
 protected:
  fs::path Source() const { return GetParam() / "ckpt"; }

  /// Writes a source as atoms.
  Status Write(const fs::path& source, const fs::path& out, const TargetSpec& spec = {}) {
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    convert::InputOptions from;
    from.source_paths = {source.string()};
    SW_TRY_ASSIGN(const auto input, convert::OpenInput(*comm, from, sink));
    convert::ConvertOptions options;
    options.output = out.string();
    SW_TRY(convert::Convert(*comm, *input, spec, *FindFormat("universal"), "test", options, sink));
    return {};
  }

  Scratch scratch_;
};

TEST_P(Atoms, KeepEverything) {
  const Status written = Write(Source(), scratch_ / "atoms");
  ASSERT_TRUE(written.has_value()) << written.error().message;
  const auto before = Read(Source());
  const auto after = Read(scratch_ / "atoms");
  ASSERT_TRUE(before.has_value()) << before.error().message;
  ASSERT_TRUE(after.has_value()) << after.error().message;
  EXPECT_EQ(after->origin, "universal");
  EXPECT_EQ(after->tag, before->tag);
  EXPECT_TRUE(after->warnings.empty()) << after->warnings.front();
  const auto resolved = ResolveTopology({}, *before);
  ASSERT_TRUE(resolved.has_value());
  ExpectSameTopology(*resolved, TopologyOf(after->layout));
  ExpectSameParams(*before, *after);
  ExpectSameGroups(*before, *after);
  ExpectSameTensors(*before, *after);
  ExpectSameClient(*before, *after);
}

TEST_P(Atoms, OfAtomsAreTheSame) {
  ASSERT_TRUE(Write(Source(), scratch_ / "once").has_value());
  const Status again = Write(scratch_ / "once", scratch_ / "twice");
  ASSERT_TRUE(again.has_value()) << again.error().message;
  std::size_t files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(scratch_ / "once")) {
    if (!entry.is_regular_file() || entry.path().filename() == "shardwright.json") continue;
    const fs::path other = scratch_ / "twice" / fs::relative(entry.path(), scratch_ / "once");
    ASSERT_TRUE(fs::exists(other)) << other;
    EXPECT_EQ(ReadFileText(entry.path()), ReadFileText(other)) << other;
    ++files;
  }
  EXPECT_GT(files, 10U);
}

TEST_P(Atoms, HaveTheFilesThatEveryLoaderOpens) {
  ASSERT_TRUE(Write(Source(), scratch_ / "atoms").has_value());
  const auto before = Read(Source());
  ASSERT_TRUE(before.has_value());
  const std::string tag = ReadFileText(scratch_ / "atoms" / "latest_universal");
  EXPECT_EQ(tag, before->tag + "_universal");
  const fs::path folder = scratch_ / "atoms" / tag;
  for (std::uint64_t mp = 0; mp < TopologyOf(before->layout).mp(); ++mp) {
    const std::string rank = "mp_rank_0" + std::to_string(mp) + "_model_states.pt";
    EXPECT_TRUE(fs::exists(folder / rank));
    EXPECT_TRUE(fs::exists(folder / ("zero_pp_rank_0_" + rank)));
  }
  EXPECT_FALSE(fs::exists(folder / ("mp_rank_0" + std::to_string(TopologyOf(before->layout).mp()) +
                                    "_model_states.pt")));
  EXPECT_TRUE(fs::exists(folder / "zero" / "optimizer_state.pt"));
  for (const Param& param : before->params) {
    const fs::path atoms = folder / "zero" / param.name;
    EXPECT_EQ(fs::exists(atoms), param.alias_of.empty()) << param.name;
    if (!param.alias_of.empty()) continue;
    EXPECT_EQ(fs::exists(atoms / "fp32.pt"), param.kind == ParamKind::kTrainable) << param.name;
    EXPECT_EQ(fs::exists(atoms / "frozen.pt"), param.kind == ParamKind::kFrozen) << param.name;
    EXPECT_EQ(fs::exists(atoms / "buffer.pt"), param.kind == ParamKind::kBuffer) << param.name;
    EXPECT_EQ(fs::exists(atoms / "step.pt"), !param.scalars.empty()) << param.name;
  }
}

std::string CaseName(const testing::TestParamInfo<fs::path>& tested) {
  return TestName(tested.param.filename().string());
}

const std::vector<std::string>& CommonCases() {
  static const std::vector<std::string> kNames = {"zero1_w2",
                                                  "zero1_w2_sgd",
                                                  "zero2_w4_three_groups",
                                                  "zero2_w3_frozen_tied",
                                                  "zero2_w2_round_robin",
                                                  "bf16_zero2_w2",
                                                  "bf16opt_w4",
                                                  "zero3_w2_sub_groups",
                                                  "zero3_w4_frozen",
                                                  "bf16_zero3_w3",
                                                  "zero0_w1_fp32",
                                                  "zero0_w2_bf16",
                                                  "moe4_ep2_zero1_w2",
                                                  "moe4_ep2_zero2_w4",
                                                  "pp2_dp2_zero1",
                                                  "autotp2_dp2_zero1"};
  return kNames;
}

INSTANTIATE_TEST_SUITE_P(Own, Atoms, testing::ValuesIn(OwnCheckpoints(CommonCases())), CaseName);
INSTANTIATE_TEST_SUITE_P(OwnOnly, Atoms,
                         testing::ValuesIn(OwnCheckpoints({"fp16_zero2_w2", "0.14.5_zero3_w2",
                                                           "0.16.9_bf16opt_w2"})),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Shared, Atoms, testing::ValuesIn(SharedCheckpoints(CommonCases())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(SharedOnly, Atoms,
                         testing::ValuesIn(SharedCheckpoints({"llama_tp1_zero2_w2"})), CaseName);

/// Checkpoints written by DeepSpeed's own converter.
class UpstreamAtoms : public testing::TestWithParam<fs::path> {};

TEST_P(UpstreamAtoms, HoldEveryTensorOfTheTrainer) {
  const auto checkpoint = Read(GetParam() / "ckpt");
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  EXPECT_EQ(checkpoint->origin, "universal");
  EXPECT_EQ(checkpoint->tag, "global_step4");
  ExpectTensors(*checkpoint, Expected::Read(GetParam() / "expected.safetensors"));
}

INSTANTIATE_TEST_SUITE_P(Own, UpstreamAtoms,
                         testing::ValuesIn(OwnCheckpoints({"universal_zero2_w2",
                                                           "universal_bf16_zero3_w2",
                                                           "universal_autotp2"})),
                         CaseName);

// DeepSpeed's converter stores sub-parameters in the shape of the view in which they were cut.
TEST(ViewedAtoms, HaveTheShapeOfTheView) {
  const Scratch scratch;
  const fs::path folder = scratch / "ckpt";
  fs::copy(OwnCheckpoints() / "universal_autotp2" / "ckpt", folder, fs::copy_options::recursive);
  const auto read_with = [&](const Shape& shape) {
    PtFile file;
    const std::vector<float> values(Elems(shape), 1.0F);
    file.Write(folder / "global_step4_universal/zero/blocks.0.attend.weight/fp32.pt",
               file.Dict({{"param", file.Tensor(values, shape)}}));
    return Read(folder);
  };
  const auto read = read_with({3, 8, 8});
  ASSERT_TRUE(read.has_value()) << read.error().message;
  const auto param = std::find_if(read->params.begin(), read->params.end(), [](const Param& one) {
    return one.name == "blocks.0.attend.weight";
  });
  ASSERT_NE(param, read->params.end());
  EXPECT_EQ(param->shape, (Shape{24, 8}));
  EXPECT_TRUE(layout::Validate(read->map));
  const auto refused = read_with({6, 32});
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kBadInput);
}

class BrokenAtoms : public Atoms {
 protected:
  void SetUp() override {
    ASSERT_TRUE(Write(Source(), scratch_ / "atoms").has_value());
    folder_ = scratch_ / "atoms" / "global_step4_universal";
  }
  Error ReadError() {
    const auto read = Read(scratch_ / "atoms");
    EXPECT_FALSE(read.has_value());
    return read ? Error{} : read.error();
  }
  void Edit(const std::function<void(nlohmann::json&)>& change) {
    auto json = nlohmann::json::parse(ReadFileText(folder_ / "shardwright_atoms.json"));
    change(json);
    std::ofstream(folder_ / "shardwright_atoms.json") << json.dump();
  }
  fs::path folder_;
};

TEST_P(BrokenAtoms, NameWhatIsMissing) {
  fs::remove(folder_ / "zero" / "embed.emb.weight" / "exp_avg.pt");
  const Error error = ReadError();
  EXPECT_EQ(error.code, Errc::kNotFound);
  EXPECT_NE(error.message.find("zero/embed.emb.weight/exp_avg.pt"), std::string::npos)
      << error.message;
}

TEST_P(BrokenAtoms, NeedEveryModelFile) {
  fs::remove(folder_ / "mp_rank_00_model_states.pt");
  EXPECT_TRUE(Read(scratch_ / "atoms").has_value());  // the copy for stage 3 suffices
  fs::remove(folder_ / "zero_pp_rank_0_mp_rank_00_model_states.pt");
  const Error error = ReadError();
  EXPECT_EQ(error.code, Errc::kNotFound);
  EXPECT_NE(error.message.find("mp_rank_00_model_states.pt"), std::string::npos) << error.message;
}

TEST_P(BrokenAtoms, MustHaveTheirShapes) {
  Edit([](auto& json) { json["params"][0]["shape"] = {12, 8}; });
  const Error error = ReadError();
  EXPECT_EQ(error.code, Errc::kBadInput);
  EXPECT_NE(error.message.find("[12, 8]"), std::string::npos) << error.message;
  EXPECT_NE(error.message.find("[13, 8]"), std::string::npos) << error.message;
}

TEST_P(BrokenAtoms, MustBeDescribedWithoutContradiction) {
  const std::string good = ReadFileText(folder_ / "shardwright_atoms.json");
  const std::vector<std::function<void(nlohmann::json&)>> changes = {
      [](auto& json) { json["groups"][0]["params"].push_back(0); },
      [](auto& json) { json["groups"][0]["params"][0] = 9999; },
      [](auto& json) { json["groups"].erase(0); },
      [](auto& json) { json["params"][1]["name"] = json["params"][0]["name"]; },
      [](auto& json) { json["params"][0]["alias_of"] = "nobody"; },
      [](auto& json) { json["params"][0]["dtype"] = "float99"; },
      [](auto& json) {
        json["params"][0]["shape"] = {1ULL << 62, 1ULL << 62};
      },
      [](auto& json) { json["params"][0]["atoms"] = nlohmann::json::array(); },
      [](auto& json) { json["params"][0]["rule"]["split"] = "torn"; },
      [](auto& json) { json["params"][0]["scalars"][0]["bytes"] = "00"; },
      [](auto& json) { json["topology"]["zero"] = 4; },
      [](auto& json) { json["topology"]["tp"] = 0; },
      [](auto& json) { json["topology"].erase("dp"); },
      [](auto& json) { json["format"] = "other"; },
      [](auto& json) { json["params"] = 3; }};
  for (std::size_t i = 0; i < changes.size(); ++i) {
    std::ofstream(folder_ / "shardwright_atoms.json") << good;
    Edit(changes[i]);
    const Error error = ReadError();
    EXPECT_EQ(error.code, Errc::kBadInput) << "change " << i << ": " << error.message;
    EXPECT_NE(error.message.find("shardwright_atoms.json"), std::string::npos) << error.message;
  }
  std::ofstream(folder_ / "shardwright_atoms.json") << "{";
  EXPECT_EQ(ReadError().code, Errc::kBadInput);
}

TEST_P(BrokenAtoms, WarnOfFilesThatNobodyLists) {
  fs::copy_file(folder_ / "zero" / "embed.emb.weight" / "fp32.pt",
                folder_ / "zero" / "embed.emb.weight" / "momentum.pt");
  const auto read = Read(scratch_ / "atoms");
  ASSERT_TRUE(read.has_value()) << read.error().message;
  ASSERT_EQ(read->warnings.size(), 1U);
  EXPECT_NE(read->warnings[0].find("zero/embed.emb.weight/momentum.pt"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Own, BrokenAtoms, testing::ValuesIn(OwnCheckpoints({"zero1_w2"})),
                         CaseName);

class Converted : public Atoms {};

TEST_P(Converted, FrozenWeightsFollowTheTypeAskedFor) {
  TargetSpec spec;
  spec.settings = {{"dtype", "bf16"}};
  ASSERT_TRUE(Write(Source(), scratch_ / "atoms", spec).has_value());
  const auto before = Read(Source());
  const auto after = Read(scratch_ / "atoms");
  ASSERT_TRUE(before && after);
  EXPECT_EQ(TopologyOf(after->layout).dtype, DType::kBF16);
  const layout::TensorIndex index(after->map);
  for (const Param& param : before->params) {
    if (!param.alias_of.empty()) continue;
    const std::string state = param.kind == ParamKind::kTrainable ? "fp32"
                              : param.kind == ParamKind::kFrozen  ? "frozen"
                                                                  : "buffer";
    const auto found = index.Find(param.name, state);
    ASSERT_TRUE(found.has_value()) << param.name;
    const DType expected = param.kind == ParamKind::kFrozen ? DType::kBF16 : DType::kF32;
    EXPECT_EQ(after->map.tensors[*found].dtype, expected) << param.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Own, Converted,
                         testing::ValuesIn(OwnCheckpoints({"zero2_w3_frozen_tied"})), CaseName);

}  // namespace
}  // namespace shardwright::checkpoints
