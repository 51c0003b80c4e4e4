#include "exec/run.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "exec/manifest.h"
#include "memory_bytes.h"
#include "unit/os/scratch.h"

namespace shardwright::exec {
namespace {

namespace fs = std::filesystem;

/// Asks to stop after so many looks.
class Stopping final : public NullSink {
 public:
  explicit Stopping(int looks) : looks_(looks) {}
  bool stop_requested() const override { return looks_-- <= 0; }

 private:
  mutable std::atomic<int> looks_;
};

class Runs : public os::Scratch {
 protected:
  void SetUp() override {
    os::Scratch::SetUp();
    fs::create_directories(At("in"));
    options_.output = At("in/out");
    options_.manifest = R"({"command": "test"})";
    options_.threads = 2;
  }

  /// Writes one file of that path to the output.
  Result<RunReport> Write(const std::string& path) {
    source_ = {};
    target_ = {};
    target_.files.push_back(plan::TextFile(path, "text"));
    return Run();
  }

  /// A tensor of a few units, to be cut into two files.
  void MakeTensor() {
    const std::uint64_t elems = plan::kUnitBytes;  // 4 MiB
    plan::MapMaker source, wanted;
    source.Slices("w", "fp32", DType::kF32, {elems}, 0, 3);
    wanted.Slices("w", "fp32", DType::kF32, {elems}, 0, 2);
    members_ = plan::Numbered(source.map);
    SetChecksums(members_, &source.map);
    source_ = source.map;
    target_ = wanted.AsTarget();
  }

  Result<RunReport> Run(Sink* sink = nullptr) {
    const auto comm = comm::MakeSerialComm();
    SW_TRY_ASSIGN(const plan::Plan plan, plan::Plan::Make(source_, target_));
    MemoryBytes bytes(members_);
    NullSink none;
    return exec::Run(*comm, plan, bytes, options_, sink != nullptr ? *sink : none);
  }

  layout::ShardMap source_;
  plan::Target target_;
  std::vector<std::string> members_;
  RunOptions options_;
};

TEST_F(Runs, WriteNothingOutsideTheOutput) {
  for (const std::string path :
       {"../evil", "a/../../../evil", "/evil", "a//b", "", "a/", "./a", ".."}) {
    const auto done = Write(path);
    ASSERT_FALSE(done) << path;
    EXPECT_EQ(done.error().code, Errc::kBadInput) << done.error().message;
    EXPECT_TRUE(fs::is_empty(At("in"))) << path;
    EXPECT_FALSE(fs::exists(At("evil"))) << path;
  }
  const auto done = Write("a/..b");
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_TRUE(fs::exists(At("in/out/a/..b")));
}

TEST_F(Runs, WriteWhatThePlanSaysAndAManifest) {
  MakeTensor();
  const auto done = Run();
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(done->units, 4U);
  EXPECT_EQ(done->files_written, 2U);
  EXPECT_EQ(done->bytes_written, 4 * plan::kUnitBytes);
  EXPECT_EQ(done->members_verified, 3U);
  const auto values = plan::AsFloats(Get("in/out/out0") + Get("in/out/out1"));
  ASSERT_EQ(values.size(), plan::kUnitBytes);
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], static_cast<float>(i));
  const auto manifest = nlohmann::json::parse(Get("in/out/shardwright.json"));
  EXPECT_EQ(manifest["command"], "test");
  EXPECT_EQ(manifest["files"].size(), 2U);
  EXPECT_EQ(manifest["files"][0]["bytes"], 2 * plan::kUnitBytes);
  EXPECT_EQ(std::distance(fs::directory_iterator(At("in")), fs::directory_iterator()), 1)
      << "nothing is left beside the output";
}

TEST_F(Runs, DoNotDependOnTheNumberOfThreads) {
  MakeTensor();
  ASSERT_TRUE(Run());
  options_.output = At("in/one");
  options_.threads = 1;
  ASSERT_TRUE(Run());
  for (const char* name : {"out0", "out1", "shardwright.json"}) {
    EXPECT_TRUE(Get(std::string("in/out/") + name) == Get(std::string("in/one/") + name)) << name;
  }
}

TEST_F(Runs, LeaveNothingOfADamagedSource) {
  MakeTensor();
  members_[1][5] = static_cast<char>(members_[1][5] ^ 1);
  const auto done = Run();
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, Errc::kBadInput);
  EXPECT_NE(done.error().message.find("file1"), std::string::npos) << done.error().message;
  EXPECT_FALSE(fs::exists(At("in/out")));
  options_.verify = Verify::kNone;
  options_.force = true;
  EXPECT_TRUE(Run()) << "nobody looks";
}

TEST_F(Runs, KeepAnOutputUnlessTold) {
  MakeTensor();
  Put("in/out/mine", "precious");
  const auto refused = Run();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kBusy);
  EXPECT_EQ(Get("in/out/mine"), "precious");
  options_.force = true;
  const auto not_ours = Run();
  ASSERT_FALSE(not_ours);
  EXPECT_EQ(not_ours.error().code, Errc::kBusy);
  EXPECT_EQ(Get("in/out/mine"), "precious");
  Put(std::string("in/out/") + kManifestName, *MakeManifest("{}", {{"mine", 8, {}, ""}}));
  const auto forced = Run();
  ASSERT_TRUE(forced) << forced.error().message;
  EXPECT_FALSE(fs::exists(At("in/out/mine")));
  EXPECT_TRUE(fs::exists(At("in/out/out0")));
}

TEST_F(Runs, StopAndGoOn) {
  MakeTensor();
  options_.threads = 1;
  options_.fingerprint[0] = std::byte{3};
  Stopping stopping(2);
  const auto stopped = Run(&stopping);
  ASSERT_FALSE(stopped);
  EXPECT_EQ(stopped.error().code, Errc::kStopped);
  EXPECT_FALSE(fs::exists(At("in/out")));
  options_.resume = true;
  options_.fingerprint[0] = std::byte{4};
  const auto other = Run();
  EXPECT_FALSE(other) << "another run may not go on with it";
  options_.fingerprint[0] = std::byte{3};
  const auto resumed = Run();
  ASSERT_TRUE(resumed) << resumed.error().message;
  EXPECT_GT(resumed->units_resumed, 0U);
  EXPECT_LT(resumed->units_resumed, 4U);
  EXPECT_EQ(resumed->members_verified, 3U) << "those of the first part too";
  const auto values = plan::AsFloats(Get("in/out/out0") + Get("in/out/out1"));
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], static_cast<float>(i));
}

TEST_F(Runs, NeedMemoryForEachThread) {
  MakeTensor();
  options_.memory_bytes = 1000;
  const auto done = Run();
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, Errc::kLimit);
  EXPECT_FALSE(fs::exists(At("in/out")));
  options_.memory_bytes = std::uint64_t{64} << 20;
  EXPECT_LE(BufferBytes(options_), options_.memory_bytes);
  EXPECT_TRUE(Run());
}

TEST_F(Runs, ReadBackWhatTheyWrote) {
  MakeTensor();
  options_.verify = Verify::kReadback;
  const auto done = Run();
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(Get("in/out/out1").size(), 2 * plan::kUnitBytes);
}

}  // namespace
}  // namespace shardwright::exec
