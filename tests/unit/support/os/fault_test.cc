// SPDX-License-Identifier: Apache-2.0
#include "support/os/fault.h"

#include <sys/wait.h>

#include <cerrno>
#include <csignal>

#include "scratch.h"
#include "support/os/dir.h"
#include "support/os/file.h"

namespace shardwright::os {
namespace {

using FaultTest = Scratch;

TEST_F(FaultTest, ParsesEveryPart) {
  const auto rule = ParseFault("write:17:kill");
  ASSERT_TRUE(rule);
  EXPECT_EQ(rule->target, "write");
  EXPECT_EQ(rule->first, 17U);
  EXPECT_FALSE(rule->onward);
  EXPECT_EQ(rule->action, FaultAction::kKill);
  const auto onward = ParseFault("any:2+:enospc");
  ASSERT_TRUE(onward);
  EXPECT_TRUE(onward->onward);
  EXPECT_EQ(onward->error, ENOSPC);
  EXPECT_EQ(ParseFault("commit.rename:1:term")->target, "commit.rename");
  EXPECT_EQ(ParseFault("write:1:torn")->action, FaultAction::kTorn);
  EXPECT_EQ(ParseFault("write:1:lose")->action, FaultAction::kLose);
  EXPECT_EQ(ParseFault("write:1:flip")->action, FaultAction::kFlip);
  EXPECT_EQ(ParseFault("every:1:enomem")->error, ENOMEM);
  EXPECT_EQ(ParseFault("open:1:emfile")->error, EMFILE);
  EXPECT_EQ(ParseFault("open:1:estale")->error, ESTALE);
}

TEST_F(FaultTest, RefusesWhatWouldDoNothing) {
  for (const std::string spec :
       {"", "write", "write:1", "writ:1:kill", "write:0:kill", "write:x:kill", "write:1:explode",
        "write::kill", "sync:1:short", "any:1:torn", "read:1:lose", "any:1:flip", "write:1+:eintr",
        "write:-1:kill", "write:1:kill:2"}) {
    const auto rule = ParseFault(spec);
    ASSERT_FALSE(rule) << spec;
    EXPECT_EQ(rule.error().code, Errc::kUsage) << spec;
  }
}

TEST_F(FaultTest, HitsTheNthCallOnce) {
  const ScopedFault fault(*ParseFault("mkdir:2:eacces"));
  EXPECT_TRUE(MakeDir(At("a")));
  EXPECT_FALSE(fault.fired());
  EXPECT_EQ(MakeDir(At("b")).error().sys, EACCES);
  EXPECT_TRUE(fault.fired());
  EXPECT_TRUE(MakeDir(At("b")));
  EXPECT_EQ(fault.Count(Op::kMkdir), 3U);
}

TEST_F(FaultTest, AnyCountsChangesOnly) {
  const ScopedFault fault(*ParseFault("any:3+:erofs"));
  ASSERT_TRUE(Exists(At("a")));  // not counted
  ASSERT_TRUE(ListDir(root_));   // not counted
  EXPECT_TRUE(MakeDir(At("a")));
  EXPECT_TRUE(MakeDir(At("b")));
  EXPECT_EQ(Rename(At("a"), At("c")).error().sys, EROFS);
  EXPECT_EQ(SyncDir(root_).error().sys, EROFS);
  EXPECT_EQ(fault.CountMutating(), 4U);
}

TEST_F(FaultTest, EveryCountsLooksToo) {
  const ScopedFault fault(*ParseFault("every:3:estale"));
  ASSERT_TRUE(Exists(At("a")));
  ASSERT_TRUE(MakeDir(At("a")));
  EXPECT_EQ(Exists(At("a")).error().sys, ESTALE);
  EXPECT_TRUE(Exists(At("a")));
}

TEST_F(FaultTest, WritesThatLieSayThatTheyHaveWritten) {
  const auto write = [&](const std::string& spec) {
    const ScopedFault fault(*ParseFault(spec));
    const auto file = File::Create(At(spec));
    EXPECT_TRUE(file->WriteAt(0, AsBytes("0123456789"))) << spec;
    EXPECT_TRUE(file->WriteAt(10, AsBytes("ab"))) << spec;
    EXPECT_TRUE(fault.fired()) << spec;
    return Get(spec);
  };
  EXPECT_EQ(write("write:1:lose"), std::string(10, '\0') + "ab");
  EXPECT_EQ(write("write:2:lose"), "0123456789");
  EXPECT_EQ(write("write:1:flip"), "01234%6789ab");  // one bit of the byte in the middle
}

TEST_F(FaultTest, ScopesNestAndRestore) {
  const ScopedFault outer(*ParseFault("mkdir:1+:eio"));
  {
    const ScopedFault inner;
    EXPECT_TRUE(MakeDir(At("a")));
    EXPECT_EQ(inner.CountMutating(), 1U);
  }
  EXPECT_FALSE(MakeDir(At("b")));
  EXPECT_EQ(outer.CountMutating(), 1U);
}

TEST_F(FaultTest, NamedPointsFail) {
  EXPECT_TRUE(FaultPoint("unit.point"));
  const ScopedFault fault(*ParseFault("unit.point:2:eio"));
  EXPECT_TRUE(FaultPoint("unit.point"));
  EXPECT_TRUE(FaultPoint("unit.other"));
  const Status status = FaultPoint("unit.point");
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Errc::kIo);
}

TEST_F(FaultTest, KillActsBeforeTheCallAndTornAfterHalfOfIt) {
  const auto run = [&](const std::string& spec) {
    return InChild([&] {
      const ScopedFault fault(*ParseFault(spec));
      const auto file = File::Create(At(spec));
      static_cast<void>(file->WriteAt(0, AsBytes("0123456789")).has_value());
      return 0;
    });
  };
  for (const std::string spec : {"write:1:kill", "write:1:torn"}) {
    const int status = run(spec);
    ASSERT_TRUE(WIFSIGNALED(status)) << spec;
    EXPECT_EQ(WTERMSIG(status), SIGKILL) << spec;
  }
  EXPECT_EQ(Get("write:1:kill"), "");
  EXPECT_EQ(Get("write:1:torn"), "01234");
  const int status = run("write:1:term");
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

// Not a case of its own: the environment is read once per process, so Child starts this program
// again with this test only. It is disabled so that no other run executes it as a case.
TEST(FaultProgram, DISABLED_ChildMakesTwoDirectories) {
  const char* where = std::getenv("SW_TEST_WHERE");
  ASSERT_NE(where, nullptr);
  EXPECT_TRUE(MakeDir(std::string(where) + "/one"));
  EXPECT_TRUE(MakeDir(std::string(where) + "/two"));
}

int Child(const std::string& fault, const std::string& where) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string command = "SHARDWRIGHT_FAULT='" + fault + "' SW_TEST_WHERE='" + where + "' " +
                              self +
                              " --gtest_also_run_disabled_tests "
                              "--gtest_filter=FaultProgram.DISABLED_Child* >/dev/null 2>&1";
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST_F(FaultTest, EnvironmentSetsTheRule) {
  EXPECT_EQ(Child("mkdir:2:kill", root_), 128 + SIGKILL);
  EXPECT_EQ(Contents(), (std::map<std::string, std::string>{{"one", "/"}}));
}

TEST_F(FaultTest, OnlyWhatChangesSomethingIsAny) {
  for (const Op op : {Op::kOpen, Op::kRead, Op::kStat, Op::kList}) EXPECT_FALSE(IsMutating(op));
  for (const Op op : {Op::kCreate, Op::kWrite, Op::kSync, Op::kRename}) EXPECT_TRUE(IsMutating(op));
}

TEST_F(FaultTest, MalformedEnvironmentFailsEveryCall) {
  EXPECT_EQ(Child("mkdir:two:kill", root_), 1);
  EXPECT_TRUE(Contents().empty());
}

TEST_F(FaultTest, CountModeAppendsOneLinePerProcess) {
  ASSERT_TRUE(MakeDirs(At("first")) && MakeDirs(At("second")));
  ASSERT_EQ(Child("count:" + At("counts"), At("first")), 0);
  ASSERT_EQ(Child("count:" + At("counts"), At("second")), 0);
  const std::string counts = Get("counts");
  EXPECT_EQ(std::count(counts.begin(), counts.end(), '\n'), 2);
  EXPECT_EQ(counts.rfind("any=2 every=", 0), 0U) << counts;
  EXPECT_NE(counts.find(" mkdir=2 "), std::string::npos) << counts;
}

}  // namespace
}  // namespace shardwright::os
