#include "exec/run.h"

#include <gtest/gtest.h>

#include <filesystem>

namespace shardwright::exec {
namespace {

namespace fs = std::filesystem;

class Runs : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / (std::string("runs_") + test->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_ / "in");
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// Writes one file of that path to the output `in/out`.
  Result<RunReport> Write(const std::string& path) const {
    const auto comm = comm::MakeSerialComm();
    const layout::ShardMap source;
    plan::Target target;
    target.files.push_back(plan::TextFile(path, "text"));
    SW_TRY_ASSIGN(const plan::Plan plan, plan::Plan::Make(source, target));
    FileBytes bytes(source, {});
    RunOptions options;
    options.output = (folder_ / "in" / "out").string();
    options.manifest = "{}";
    NullSink sink;
    return exec::Run(*comm, plan, bytes, options, sink);
  }

  fs::path folder_;
};

TEST_F(Runs, WriteNothingOutsideTheOutput) {
  for (const std::string path :
       {"../evil", "a/../../../evil", "/evil", "a//b", "", "a/", "./a", ".."}) {
    const auto done = Write(path);
    ASSERT_FALSE(done) << path;
    EXPECT_EQ(done.error().code, Errc::kBadInput) << done.error().message;
    EXPECT_TRUE(fs::is_empty(folder_ / "in")) << path;
    EXPECT_FALSE(fs::exists(folder_ / "evil")) << path;
  }
  const auto done = Write("a/..b");
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_TRUE(fs::exists(folder_ / "in" / "out" / "a" / "..b"));
}

}  // namespace
}  // namespace shardwright::exec
