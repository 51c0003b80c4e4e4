// SPDX-License-Identifier: Apache-2.0
// Runs that are stopped or fail, and are resumed.

#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>

#include "engine/exec/run/run.h"
#include "runs.h"
#include "support/os/directory.h"
#include "support/os/fault.h"
#include "support/os/journal.h"

namespace shardwright::exec {
namespace {

namespace fs = std::filesystem;

TEST_F(Runs, StopAndGoOn) {
  MakeTensor();
  options_.threads = 1;
  const auto identity = [](const char* format, const char* files) {
    Identity made;
    made.Add("--format", format);
    made.AddDigest("the files of INPUT", files);
    return made;
  };
  options_.identity = identity("dcp", "f1");
  Stopping stopping(2);
  const auto stopped = Run(&stopping);
  ASSERT_FALSE(stopped);
  EXPECT_EQ(stopped.error().code, Errc::kStopped);
  EXPECT_FALSE(fs::exists(At("in/out")));
  const auto refused = [&](const Identity& other) {
    options_.identity = other;
    const auto done = Run();
    EXPECT_FALSE(done) << "another run may not continue it";
    EXPECT_EQ(done ? Errc::kInternal : done.error().code, Errc::kBusy);
    return done ? "" : done.error().message;
  };
  const std::string flag = refused(identity("megatron", "f2"));
  EXPECT_NE(flag.find("it differs in --format (dcp before, megatron now); "), std::string::npos)
      << flag;
  EXPECT_NE(flag.find("--no-resume"), std::string::npos) << flag;
  const std::string files = refused(identity("dcp", "f2"));
  EXPECT_NE(files.find("it differs in the files of INPUT; "), std::string::npos) << files;
  Identity less;
  less.AddDigest("the files of INPUT", "f1");
  const std::string gone = refused(less);
  EXPECT_NE(gone.find("--format (dcp before, none now)"), std::string::npos) << gone;
  // The journals decide where the identity of the stopped run cannot be read.
  const std::string stored = StagePath() + "/.journal/run.json";
  const std::string text = os::Scratch::Get("in/" + fs::relative(stored, At("in")).string());
  std::ofstream(stored) << "{\"--format\": ";
  const std::string torn = refused(identity("megatron", "f1"));
  EXPECT_NE(torn.find("other inputs, flags or version"), std::string::npos) << torn;
  std::string flipped = text;
  flipped[flipped.find("dcp")] = 'p';
  std::ofstream(stored) << flipped;
  options_.identity = identity("dcp", "f1");
  const auto resumed = Run();
  ASSERT_TRUE(resumed) << resumed.error().message;
  EXPECT_GT(resumed->units_resumed, 0U);
  EXPECT_LT(resumed->units_resumed, 4U);
  EXPECT_EQ(resumed->members_verified, 3U) << "those of the first part too";
  const auto values = plan::AsFloats(Get("in/out/out0") + Get("in/out/out1"));
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], static_cast<float>(i));
}

TEST_F(Runs, OfSeveralRanksGoOnWithWhatAllHaveNoted) {
  MakeTensor();
  options_.threads = 1;
  const Status stopped = RunOn(2, 1);
  ASSERT_FALSE(stopped);
  ASSERT_EQ(stopped.error().code, Errc::kStopped);
  options_.resume = Resume::kIfSameOrDone;
  const Status resumed = RunOn(2);
  ASSERT_TRUE(resumed) << resumed.error().message;
  EXPECT_EQ(report_.units_resumed, 2U) << "one of each rank";
  EXPECT_EQ(report_.members_verified, 3U);
  ExpectTensor();
}

TEST_F(Runs, WriteUnitsAgainThatAPowerFailureHasDamaged) {
  MakeTensor();
  Stop(2);
  {
    std::fstream file(StagePath() + "/out0", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(5);
    file.put('?');
    ASSERT_TRUE(file.flush());
  }
  const auto resumed = Run();
  ASSERT_TRUE(resumed) << resumed.error().message;
  EXPECT_EQ(resumed->units_resumed, 1U);
  ExpectTensor();
}

// After a failed write-back the kernel shows the pages as they were written, although they never
// reached the device. No bytes written before can be trusted.
TEST_F(Runs, WriteEverythingAgainAfterAFailedSync) {
  MakeTensor();
  options_.threads = 1;
  for (const char* const spec : {"sync:3:eio", "write:5:enospc", "close:4:edquot"}) {
    options_.resume = Resume::kNever;
    {
      const os::ScopedFault fault(*os::ParseFault(spec));
      const auto failed = Run();
      ASSERT_FALSE(failed) << spec;
      EXPECT_TRUE(fault.fired());
      EXPECT_EQ(failed.error().code, Errc::kIo) << spec;
      EXPECT_FALSE(fs::exists(At("in/out"))) << spec;
    }
    options_.resume = Resume::kIfSameOrDone;
    const auto resumed = Run();
    ASSERT_TRUE(resumed) << spec << ": " << resumed.error().message;
    EXPECT_EQ(resumed->units_resumed, 0U) << spec;
    ExpectTensor();
    fs::remove_all(At("in/out"));
  }
}

TEST_F(Runs, OfSeveralRanksWriteEverythingAgainAfterAFailedSync) {
  MakeTensor();
  options_.threads = 1;
  {
    const os::ScopedFault fault(*os::ParseFault("sync:6:eio"));
    const Status failed = RunOn(2);
    ASSERT_FALSE(failed);
    ASSERT_EQ(failed.error().code, Errc::kIo);
  }
  options_.resume = Resume::kIfSameOrDone;
  const Status resumed = RunOn(2);
  ASSERT_TRUE(resumed) << resumed.error().message;
  EXPECT_EQ(report_.units_resumed, 0U);
  ExpectTensor();
}

TEST_F(Runs, BeginAgainWhereTheFilesWereNotAllCreated) {
  MakeTensor();
  Stop(2);
  const std::string stage = StagePath();
  ASSERT_TRUE(fs::remove(stage + "/.journal/created"));
  target_.files[1].path = target_.files[0].path;
  const auto two = Run();
  ASSERT_FALSE(two);
  EXPECT_EQ(two.error().code, Errc::kUnsupported);
  MakeTensor();
  Stop(2);
  ASSERT_TRUE(fs::remove(StagePath() + "/.journal/created"));
  const auto resumed = Run();
  ASSERT_TRUE(resumed) << resumed.error().message;
  EXPECT_EQ(resumed->units_resumed, 0U);
  ExpectTensor();
}

TEST_F(Runs, ReadAgainWhatWasNotedWithoutChecksums) {
  MakeTensor();
  options_.verify = Verify::kNone;
  Stop(2);
  options_.verify = Verify::kChecksums;
  const auto resumed = Run();
  ASSERT_TRUE(resumed) << resumed.error().message;
  EXPECT_EQ(resumed->units_resumed, 0U);
  EXPECT_EQ(resumed->members_verified, 3U);
  ExpectTensor();
}

TEST_F(Runs, RefuseRecordsThatAreNotTheirs) {
  MakeTensor();
  Stop(2);
  const std::string stage = StagePath();
  auto journal = os::Journal::Open(*os::Directory::Open(stage + "/.journal"), "1",
                                   options_.identity.Fingerprint());
  ASSERT_TRUE(journal && journal->Append(os::AsBytes("short")));
  const auto resumed = Run();
  ASSERT_FALSE(resumed);
  EXPECT_EQ(resumed.error().code, Errc::kBusy);
  EXPECT_NE(resumed.error().message.find("contains a record of another run"), std::string::npos)
      << resumed.error().message;
}

// The journal, then its folder: before the first output file.
TEST_F(Runs, MakeTheirJournalDurableFirst) {
  MakeTensor();
  const auto failing = [&](const std::string& spec) {
    const os::ScopedFault fault(*os::ParseFault(spec));
    const auto done = Run();
    EXPECT_FALSE(done) << spec;
    EXPECT_EQ(fault.Count(os::Op::kCreate), 3U) << spec << ": lock, identity and journal";
    std::string said = done ? "" : done.error().message;
    fs::remove_all(At("in"));
    fs::create_directories(At("in"));
    return said;
  };
  for (const char* spec : {"sync:1:eio", "sync:2:eio"}) {
    EXPECT_NE(failing(spec).find("/.journal/0: cannot sync"), std::string::npos) << spec;
  }
  EXPECT_NE(failing("sync:3:eio").find("/.journal: cannot sync directory"), std::string::npos);
}

}  // namespace
}  // namespace shardwright::exec
