// SPDX-License-Identifier: Apache-2.0
#include "convert/input.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/os/fault.h"

namespace shardwright::convert {
namespace {

namespace fs = std::filesystem;

class PatternFiles : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / "pattern_files";
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string File(const std::string& name, const std::string& match) const {
    std::ofstream(folder_ / name) << R"({"family": "x", "rules": [{"match": ")" << match
                                  << R"(", "split": "replicated"}]})";
    return (folder_ / name).string();
  }

  static std::unique_ptr<Input> Open(const std::vector<std::string>& pattern_files) {
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    const fs::path demo = fs::path(SW_SOURCE_DIR) / "tests" / "data" / "demo";
    auto input = OpenInput(*comm, {{demo.string()}, pattern_files, false}, sink);
    EXPECT_TRUE(input) << input.error().message;
    return input ? *std::move(input) : nullptr;
  }

  fs::path folder_;
};

// The fingerprint covers the bytes that were used. A file that changes between two reads would
// otherwise pass for the earlier one.
TEST_F(PatternFiles, AreReadOnce) {
  const std::string one = File("one.json", "a");
  const std::string two = File("two.json", "b");
  std::uint64_t without = 0;
  {
    const os::ScopedFault counting;
    ASSERT_NE(Open({}), nullptr);
    without = counting.Count(os::Op::kOpen);
  }
  const os::ScopedFault counting;
  ASSERT_NE(Open({one, two}), nullptr);
  EXPECT_EQ(counting.Count(os::Op::kOpen), without + 2);
}

TEST_F(PatternFiles, AreInTheFingerprint) {
  const auto with_a = Open({File("rules.json", "a")});
  const auto with_b = Open({File("rules.json", "b")});
  const auto again = Open({File("rules.json", "a")});
  EXPECT_NE(with_a->fingerprint, with_b->fingerprint);
  EXPECT_EQ(with_a->fingerprint, again->fingerprint);
}

}  // namespace
}  // namespace shardwright::convert
