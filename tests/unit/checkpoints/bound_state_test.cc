// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <gtest/gtest.h>

#include "checkpoints/deepspeed/common/target.h"
#include "convert/convert.h"
#include "convert/input.h"
#include "fixtures.h"
#include "same_checkpoint.h"
#include "support/comm/comm.h"
#include "tiny_checkpoint.h"

// Tests the operations allowed on a checkpoint with rank-specific optimizer state.

namespace shardwright::checkpoints {
namespace {

class BoundState : public testing::Test {
 protected:
  BoundState() : comm_(comm::MakeSerialComm()) {
    TinyZero tiny;
    tiny.change_group = [](const TinyZero::GroupDicts& group) {
      pickle::Set(group.file.arena, group.state, "absmax1", group.file.Flat({1, 2, 3}));
    };
    tiny.Write(scratch_ / "ckpt");
  }

  Result<std::unique_ptr<convert::Input>> Open(bool bound) {
    convert::InputOptions from;
    from.source_paths = {(scratch_ / "ckpt").string()};
    from.bound = bound;
    return convert::OpenInput(*comm_, from, sink_);
  }

  Result<convert::ConvertReport> Convert(const std::string& target, const std::string& name) {
    const Format& format = *FindFormat(name);
    SW_TRY_ASSIGN(const auto input, Open(true));
    SW_TRY_ASSIGN(const TargetSpec spec, ParseTarget(format, target));
    convert::ConvertOptions options;
    options.output = (scratch_ / "out").string();
    return convert::Convert(*comm_, *input, spec, format, "test", options, sink_);
  }

  void ExpectRefused(const Error& error) {
    EXPECT_EQ(error.code, Errc::kUnsupported);
    EXPECT_NE(error.message.find("\"absmax1\""), std::string::npos) << error.message;
    EXPECT_FALSE(fs::exists(scratch_ / "out"));
  }

  Scratch scratch_;
  std::unique_ptr<comm::Comm> comm_;
  NullSink sink_;
};

TEST_F(BoundState, IsRefusedUnlessTheCallerKnowsOfIt) {
  const auto refused = Open(false);
  ASSERT_FALSE(refused);
  ExpectRefused(refused.error());
  EXPECT_TRUE(Open(true));
}

TEST_F(BoundState, IsNotConverted) {
  for (const char* target : {"dp=3", "zero=3", "zero=1,dp=1"}) {
    const auto refused = Convert(target, "deepspeed");
    ASSERT_FALSE(refused) << target;
    ExpectRefused(refused.error());
  }
  const auto atoms = Convert("", "universal");
  ASSERT_FALSE(atoms);
  ExpectRefused(atoms.error());
}

TEST_F(BoundState, ItsWeightsAreExported) {
  const std::vector<TinyParam> params = TinyZero().params;
  for (const char* only : {"only=weight", "only=master"}) {
    const auto done = Convert(only, "safetensors");
    ASSERT_TRUE(done) << only << ": " << done.error().message;
    const auto named = std::count_if(
        done->not_carried.begin(), done->not_carried.end(),
        [](const std::string& one) { return one.find("\"absmax1\"") != std::string::npos; });
    EXPECT_EQ(named, 1) << only;
    const Expected found = Expected::Read(scratch_ / "out" / "model.safetensors");
    for (std::size_t i = 0; i < params.size(); ++i) {
      const TinyParam& param = params[i];
      ASSERT_TRUE(found.tensors.contains(param.name)) << param.name;
      std::vector<float> values(Elems(param.shape));
      ASSERT_EQ(found.tensors.at(param.name).bytes.size(), values.size() * sizeof(float));
      std::memcpy(values.data(), found.tensors.at(param.name).bytes.data(),
                  values.size() * sizeof(float));
      for (std::size_t k = 0; k < values.size(); ++k) {
        EXPECT_EQ(values[k], TinyValue(i, "fp32", k)) << param.name;
      }
    }
    fs::remove_all(scratch_ / "out");
  }
}

TEST_F(BoundState, ARefusalNamesTheExport) {
  const auto refused = Convert("dp=3", "deepspeed");
  ASSERT_FALSE(refused);
  const std::string command = "; the weights can be exported: ucp-load " +
                              (scratch_ / "ckpt").string() + " " + (scratch_ / "out").string() +
                              " --format safetensors";
  EXPECT_TRUE(refused.error().message.ends_with(command)) << refused.error().message;
}

TEST_F(BoundState, IsKeptInTheSameLayout) {
  const auto same = Convert("zero=2,dp=2", "deepspeed");
  ASSERT_TRUE(same) << same.error().message;
  for (const auto& entry : fs::directory_iterator(scratch_ / "ckpt" / "global_step4")) {
    const fs::path other = scratch_ / "out" / "global_step4" / entry.path().filename();
    EXPECT_EQ(ReadFileText(entry.path()), ReadFileText(other)) << other;
  }
}

}  // namespace
}  // namespace shardwright::checkpoints
