// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/run/run.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/exec/manifest.h"
#include "memory_bytes.h"
#include "runs.h"
#include "support/comm/threads.h"
#include "support/os/directory.h"
#include "support/os/fault.h"

namespace shardwright::exec {
namespace {

namespace fs = std::filesystem;

class Notes final : public NullSink {
 public:
  void Note(std::string message, int /*level*/) override { texts.push_back(std::move(message)); }
  std::vector<std::string> texts;
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

plan::Payload Inline(std::uint64_t offset, std::string bytes) {
  plan::Payload payload;
  payload.kind = plan::Payload::Kind::kInline;
  payload.offset = offset;
  payload.bytes = bytes.size();
  payload.bytes_inline = std::move(bytes);
  return payload;
}

// Payloads of no bytes have no units: an empty tensor before or after the only one with elements.
TEST_F(Runs, PutTheUnitOfASmallFileInItsPlace) {
  source_ = {};
  target_ = {};
  for (const bool first : {true, false}) {
    plan::OutputFile file;
    file.path = first ? "a" : "b";
    file.bytes = 20;
    file.payloads = {Inline(4, first ? "" : "payload"),
                     Inline(first ? 10 : 17, first ? "payload" : "")};
    file.frame = [first](std::span<const std::uint32_t> crcs, const plan::PutFrame& put) -> Status {
      EXPECT_EQ(crcs.size(), 2U);
      SW_TRY(put(0, "head"));
      if (first) SW_TRY(put(4, "middle"));
      if (first) return put(17, "end");
      SW_TRY(put(11, "middle"));
      return put(17, "end");
    };
    target_.files.push_back(std::move(file));
  }
  options_.verify = Verify::kReadback;
  const auto done = Run();
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(Get("in/out/a"), "headmiddlepayloadend");
  EXPECT_EQ(Get("in/out/b"), "headpayloadmiddleend");
}

// On a network file system each call may be a message to a server.
TEST_F(Runs, MakeSmallFilesWithFewCalls) {
  constexpr std::uint64_t kFiles = 100;
  constexpr std::uint64_t kOthers = 32;  // journal, manifest, lock, folders
  MakeTensor(plan::kUnitBytes / 4, kFiles);
  for (int i = 0; i < 100; ++i) {
    auto& path = target_.files[static_cast<std::size_t>(i)].path;
    path.insert(0, "a/b/" + std::to_string(i) + "/");
  }
  const os::ScopedFault calls;
  const auto done = Run();
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(done->files_written, kFiles);
  const auto made = [&](os::Op op) { return calls.Count(op); };
  EXPECT_LE(made(os::Op::kCreate), kFiles + kOthers);
  EXPECT_LE(made(os::Op::kMkdir), kFiles + kOthers);
  EXPECT_LE(made(os::Op::kWrite), 2 * kFiles + kOthers) << "one to the file, one to the journal";
  EXPECT_LE(made(os::Op::kOpen), kFiles + kOthers) << "the folder of each file";
  EXPECT_LE(made(os::Op::kStat), kOthers);
  EXPECT_LE(made(os::Op::kAllocate), 0U);
  EXPECT_LE(made(os::Op::kTruncate), kOthers);
  EXPECT_LE(made(os::Op::kClose), kFiles + kOthers);
  const auto folder = os::Directory::Open(At("in"));
  if (folder && folder->CanSyncFileSystem()) {
    EXPECT_LE(made(os::Op::kSync), kOthers) << "one sync of the file system";
  }
}

// Some file systems cannot reserve space, and write zeros to make a file longer.
TEST_F(Runs, SetSizesByWritesWhereSpaceCannotBeReserved) {
  MakeTensor();
  ASSERT_TRUE(Run());
  options_.output = At("in/other");
  const os::ScopedFault fault(*os::ParseFault("allocate:1+:einval"));
  const auto done = Run();
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_LE(fault.Count(os::Op::kTruncate), 1U) << "of the lock file";
  for (const char* name : {"out0", "out1", "shardwright.json"}) {
    EXPECT_TRUE(Get(std::string("in/out/") + name) == Get(std::string("in/other/") + name)) << name;
  }
}

TEST_F(Runs, MakeTheSameSmallFilesWithAnyRanksThreadsAndStops) {
  constexpr std::uint32_t kFiles = 70;
  MakeTensor(plan::kUnitBytes / 4, kFiles);
  ASSERT_TRUE(Run());
  const auto same = [&] {
    for (std::uint32_t i = 0; i < kFiles; ++i) {
      const std::string name = target_.files[i].path;
      ASSERT_TRUE(Get("in/out/" + name) == Get("in/other/" + name)) << name;
    }
    EXPECT_TRUE(Get("in/out/shardwright.json") == Get("in/other/shardwright.json"));
    fs::remove_all(At("in/other"));
  };
  options_.output = At("in/other");
  options_.threads = options_.io_threads = 1;
  ASSERT_TRUE(Run());
  same();
  options_.io_threads = 8;
  ASSERT_TRUE(RunOn(3));
  same();
  options_.threads = options_.io_threads = 1;
  ASSERT_FALSE(RunOn(3, 9));
  const Status resumed = RunOn(3);
  ASSERT_TRUE(resumed) << resumed.error().message;
  EXPECT_GT(report_.units_resumed, 0U);
  same();
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

TEST_F(Runs, DoNotDependOnTheNumberOfRanks) {
  MakeTensor();
  ASSERT_TRUE(Run());
  for (const int ranks : {2, 3}) {
    options_.output = At("in/ranks" + std::to_string(ranks));
    const Status done = RunOn(ranks);
    ASSERT_TRUE(done) << done.error().message;
    EXPECT_EQ(report_.members_verified, 3U);
    for (const char* name : {"out0", "out1", "shardwright.json"}) {
      EXPECT_TRUE(Get(std::string("in/out/") + name) ==
                  Get("in/ranks" + std::to_string(ranks) + "/" + name))
          << name;
    }
  }
}

// As on a file system that ignores case.
TEST_F(Runs, RefuseTwoOutputsOfOneName) {
  MakeTensor();
  target_.files[1].path = target_.files[0].path;
  const auto done = Run();
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, Errc::kUnsupported);
  EXPECT_NE(done.error().message.find("two output files have the same name on this file system"),
            std::string::npos)
      << done.error().message;
  EXPECT_FALSE(fs::exists(At("in/out")));
}

TEST_F(Runs, AreRefusedWhereARankDoesNotSeeTheStage) {
  fs::create_directories(At("in/stage"));
  const auto answers = comm::RunThreads(2, [&](comm::Comm& comm) -> Status {
    SW_TRY(OpenShared(comm, At(comm.rank() == 0 ? "in/stage" : "in/elsewhere"), "OUTPUT"));
    return {};
  });
  for (const Status& answer : answers) {
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code, Errc::kIo);
    EXPECT_NE(answer.error().message.find("OUTPUT: " + At("in/elsewhere")), std::string::npos)
        << answer.error().message;
  }
}

/// Members of files that the run checks again.
class Changing final : public ByteSource {
 public:
  Changing(std::vector<std::string> members, Result<bool> answer)
      : bytes_(std::move(members)), answer_(std::move(answer)) {}
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    return bytes_.Read(member, offset, out);
  }
  Result<bool> Recheck(std::uint32_t /*file*/) override { return answer_; }
  std::uint64_t bytes_read() const override { return bytes_.bytes_read(); }
  std::uint64_t files_read() const override { return bytes_.files_read(); }

 private:
  MemoryBytes bytes_;
  Result<bool> answer_;
};

TEST_F(Runs, LookAgainAtFilesThatTheyCopyWithoutAChecksum) {
  members_ = {"what it was"};
  target_.files.push_back(plan::WholeFile("copy", At("original"), members_[0].size(),
                                          plan::CloneMode::kCopy, &source_));
  const auto run = [&](Result<bool> answer) -> Result<RunReport> {
    const auto comm = comm::MakeSerialComm();
    SW_TRY_ASSIGN(const plan::Plan plan, plan::Plan::Make(source_, target_));
    Changing bytes(members_, std::move(answer));
    NullSink none;
    return exec::Run(*comm, plan, bytes, options_, none);
  };
  const auto changed = run(Fail(Errc::kNotFound, "it has changed"));
  ASSERT_FALSE(changed);
  EXPECT_NE(changed.error().message.find("it has changed"), std::string::npos);
  EXPECT_FALSE(fs::exists(At("in/out")));
  options_.force = true;
  const auto grown = run(true);
  ASSERT_TRUE(grown) << grown.error().message;
  EXPECT_EQ(Get("in/out/copy"), "what it was");
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
  Notes notes;
  const auto done = Run(&notes);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(Get("in/out/out1").size(), 2 * plan::kUnitBytes);
  if (At("in").starts_with("/dev/shm")) {
    ASSERT_EQ(notes.texts.size(), 1U) << "all that this file system has is memory";
    EXPECT_EQ(notes.texts[0].rfind("readback: 2 of 2 files were read from memory", 0), 0U);
  }
  // Only the output and the lock are read from files: the source is in memory.
  const auto failing = [&](int reads) {
    const os::ScopedFault fault(*os::ParseFault("read:" + std::to_string(reads) + "+:eio"));
    return Run();
  };
  options_.verify = Verify::kChecksums;
  int of_lock = 0;
  for (bool through = false; !through; ++of_lock) {
    options_.output = At("in/written" + std::to_string(of_lock));
    through = failing(of_lock + 1).has_value();
    ASSERT_LE(of_lock, 8) << "files are read back";
  }
  options_.verify = Verify::kReadback;
  options_.output = At("in/unread");
  const auto unread = failing(of_lock + 1);
  ASSERT_FALSE(unread);
  EXPECT_EQ(unread.error().sys, EIO);
  EXPECT_FALSE(fs::exists(At("in/unread")));
}

TEST_F(Runs, ReadBackFindsABitThatWasWrittenWrong) {
  MakeTensor();
  ASSERT_TRUE(Run());
  const auto content = [&] { return std::pair(Get("in/out/out0"), Get("in/out/out1")); };
  const auto wanted = content();
  options_.verify = Verify::kReadback;
  options_.resume = Resume::kNever;
  int refused = 0;
  for (int write = 1;; ++write) {
    fs::remove_all(options_.output);
    fs::remove(options_.output + ".lock");  // a changed text may name another machine
    const os::ScopedFault fault(*os::ParseFault("write:" + std::to_string(write) + ":flip"));
    const auto done = Run();
    if (!fault.fired()) break;
    if (done) {
      EXPECT_EQ(content(), wanted) << "write " << write;
    } else {
      ++refused;
    }
  }
  EXPECT_GE(refused, 4) << "units of the two files";
}

}  // namespace
}  // namespace shardwright::exec
