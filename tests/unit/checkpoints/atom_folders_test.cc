// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "convert/convert.h"
#include "convert/input.h"
#include "fixtures.h"
#include "same_checkpoint.h"
#include "support/comm/comm.h"
#include "tiny_checkpoint.h"

// Names of parameters as folders below `zero`.

namespace shardwright::checkpoints {
namespace {

class AtomFolders : public testing::Test {
 protected:
  /// Writes a checkpoint with parameters of these names as atoms.
  Status Write(const std::vector<std::string>& names) {
    TinyZero tiny;
    tiny.params.clear();
    for (const std::string& name : names) tiny.params.push_back({name, {4, 3}, 0});
    tiny.groups = 1;
    tiny.Write(scratch_ / "ckpt");
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    convert::InputOptions from;
    from.source_paths = {(scratch_ / "ckpt").string()};
    SW_TRY_ASSIGN(const auto input, convert::OpenInput(*comm, from, sink));
    convert::ConvertOptions options;
    options.output = (scratch_ / "atoms").string();
    SW_TRY(convert::Convert(*comm, *input, {}, *FindFormat("universal"), "test", options, sink));
    return {};
  }

  Scratch scratch_;
};

// As DeepSpeed's loaders join paths: os.path.join(folder, "zero", name).
TEST_F(AtomFolders, ASlashMakesAFolderInAFolder) {
  const Status written = Write({"enc/layer.weight", "enc/layer.bias", "a/b/c.weight", "a/b"});
  ASSERT_TRUE(written.has_value()) << written.error().message;
  const fs::path zero = scratch_ / "atoms/global_step4_universal/zero";
  EXPECT_TRUE(fs::exists(zero / "enc/layer.weight/fp32.pt"));
  EXPECT_TRUE(fs::exists(zero / "a/b/c.weight/exp_avg.pt"));
  const auto before = Read(scratch_ / "ckpt");
  const auto after = Read(scratch_ / "atoms");
  ASSERT_TRUE(before.has_value()) << before.error().message;
  ASSERT_TRUE(after.has_value()) << after.error().message;
  EXPECT_TRUE(after->warnings.empty()) << after->warnings.front();
  ExpectSameParams(*before, *after);
  ExpectSameGroups(*before, *after);
  ExpectSameTensors(*before, *after);
}

TEST_F(AtomFolders, NamesThatAreNoPathAreUnsupported) {
  for (const char* name : {"/etc/passwd", "a/../b", "a//b", "a/", "a/./b", "optimizer_state.pt",
                           "optimizer_state.pt/w"}) {
    const Status written = Write({"x.weight", name});
    ASSERT_FALSE(written.has_value()) << name;
    EXPECT_EQ(written.error().code, Errc::kUnsupported) << written.error().message;
    EXPECT_NE(written.error().message.find(name), std::string::npos) << written.error().message;
    EXPECT_FALSE(fs::exists(scratch_ / "atoms")) << name;
  }
}

// The loader searches file names of a parameter's folder for "(.+).pt".
TEST_F(AtomFolders, AFolderThatTheLoaderTakesForAStateIsUnsupported) {
  const Status written = Write({"a", "a/script.weight"});
  ASSERT_FALSE(written.has_value());
  EXPECT_EQ(written.error().code, Errc::kUnsupported) << written.error().message;
  EXPECT_NE(written.error().message.find("\"script.weight\" for a state"), std::string::npos)
      << written.error().message;
}

}  // namespace
}  // namespace shardwright::checkpoints
