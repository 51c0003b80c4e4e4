// SPDX-License-Identifier: Apache-2.0
#include "convert/ds_to_universal.h"

#include <gtest/gtest.h>

#include "checkpoints/registry.h"
#include "unit/support/os/scratch.h"

namespace shardwright::convert {
namespace {

class DsToUniversalFlags : public os::Scratch {};

TEST_F(DsToUniversalFlags, NameTheOutput) {
  DsToUniversal flags;
  std::string positional = "out";
  ASSERT_TRUE(flags.Apply(&positional).has_value());
  EXPECT_EQ(positional, "out") << "none of them was given";
  flags.output = "folder";
  const Status both = flags.Apply(&positional);
  ASSERT_FALSE(both.has_value());
  EXPECT_EQ(both.error().code, Errc::kUsage);
  EXPECT_NE(both.error().message.find("\"out\""), std::string::npos) << both.error().message;
  positional.clear();
  ASSERT_TRUE(flags.Apply(&positional).has_value());
  EXPECT_EQ(positional, "folder");
}

TEST_F(DsToUniversalFlags, AskForItsFolderAndItsWorkers) {
  DsToUniversal flags;
  ConvertOptions options;
  options.threads = 2;
  flags.Adjust(&options);
  EXPECT_FALSE(options.flat);
  EXPECT_EQ(options.threads, 2U);
  flags.output = "folder";
  flags.extract_workers = 1;
  flags.merge_workers = 5;
  flags.Adjust(&options);
  EXPECT_TRUE(options.flat);
  EXPECT_EQ(options.threads, 5U);
  options.threads = 9;
  flags.Adjust(&options);
  EXPECT_EQ(options.threads, 9U) << "never fewer than --threads says";
}

TEST_F(DsToUniversalFlags, PutTheTagFolderInPlaceOfTheSaveFolder) {
  plan::Target target;
  for (const char* path :
       {"latest_universal", "step4_universal/zero/w/fp32.pt", "step4_universal/a.pt"}) {
    target.files.push_back(plan::TextFile(path, ""));
  }
  Flatten(*checkpoints::FindFormat("universal"), &target);
  ASSERT_EQ(target.files.size(), 2U);
  EXPECT_EQ(target.files[0].path, "zero/w/fp32.pt");
  EXPECT_EQ(target.files[1].path, "a.pt");
}

TEST_F(DsToUniversalFlags, PointToTheFolder) {
  Put("save/step4_universal/a.pt", "");
  Put("save/latest_universal", "step3_universal");
  ASSERT_TRUE(
      PointLatest(*checkpoints::FindFormat("universal"), At("save/step4_universal")).has_value());
  EXPECT_EQ(Get("save/latest_universal"), "step4_universal");
  EXPECT_FALSE(
      PointLatest(*checkpoints::FindFormat("universal"), At("none/step4_universal")).has_value());
}

}  // namespace
}  // namespace shardwright::convert
