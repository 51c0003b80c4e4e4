// SPDX-License-Identifier: Apache-2.0
// Commits of single files.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <string>

#include "scratch.h"
#include "support/os/commit.h"
#include "support/os/dir.h"
#include "support/os/fault.h"
#include "support/os/lock.h"

namespace shardwright::os {
namespace {

using CommitFileTest = Scratch;
using Files = std::map<std::string, std::string>;

TEST_F(CommitFileTest, AFileIsWholeOrNotThere) {
  ASSERT_TRUE(CommitFile(At("plan"), "one", false));
  EXPECT_EQ(Contents(), (Files{{"plan", "one"}}));
  const Status refused = CommitFile(At("plan"), "two", false);
  EXPECT_EQ(refused.error().code, Errc::kBusy);
  EXPECT_EQ(refused.error().message, At("plan") + ": already exists; pass --force to replace it");
  EXPECT_EQ(Get("plan"), "one");
  Put("plan.partial", "of a killed run");
  const ScopedFault calls;
  ASSERT_TRUE(CommitFile(At("plan"), "two", true));
  EXPECT_EQ(Contents(), (Files{{"plan", "two"}}));
  // The file, its folder; also the lock where other machines see only files that are synced.
  EXPECT_EQ(calls.Count(Op::kSync), Here().CanSyncFileSystem() ? 2U : 3U);
}

TEST_F(CommitFileTest, AFileIsNotWrittenOverSomethingElse) {
  ASSERT_TRUE(MakeDir(At("folder")));
  EXPECT_EQ(CommitFile(At("folder"), "x", true).error().code, Errc::kBusy);
  ASSERT_EQ(::symlink("elsewhere", At("link").c_str()), 0);
  EXPECT_EQ(CommitFile(At("link"), "x", true).error().code, Errc::kBusy);
  EXPECT_EQ(CommitFile(At("no/plan"), "x", true).error().code, Errc::kNotFound);
  const auto held = Lock::Take(At("plan.lock"), "other");
  ASSERT_TRUE(held);
  EXPECT_EQ(CommitFile(At("plan"), "x", true).error().code, Errc::kBusy);
  EXPECT_EQ(Contents().count("plan"), 0U);
  EXPECT_EQ(Contents().count("plan.partial"), 0U);
}

// Another process makes the file between the check of its name and the rename.
TEST_F(CommitFileTest, AFileThatCameUpMeanwhileIsNotReplaced) {
  const pid_t child = ::fork();
  if (child == 0) {
    const ScopedFault fault(*ParseFault("rename:1:hang"));
    const Status status = CommitFile(At("plan"), "mine", false);
    ::_exit(!status && status.error().code == Errc::kBusy ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  Put("plan", "theirs");
  ::kill(child, SIGCONT);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(Contents(), (Files{{"plan", "theirs"}}));
}

TEST_F(CommitFileTest, AFailedFileLeavesTheOldOne) {
  ASSERT_TRUE(CommitFile(At("plan"), "one", false));
  Put("plan.partial", "of a killed run");
  for (const char* const what :
       {"stat:1:eio", "stat:2:eio", "stat:3:eacces", "stat:4:eio", "stat:5:eio"}) {
    const ScopedFault fault(*ParseFault(what));
    EXPECT_FALSE(CommitFile(At("plan"), "two", true)) << what;
    EXPECT_TRUE(fault.fired()) << what;
    EXPECT_EQ(Contents(), (Files{{"plan", "one"}, {"plan.partial", "of a killed run"}})) << what;
  }
  for (const char* const what : {"create:2:eio", "write:2:enospc", "sync:1:eio", "rename:1:eio"}) {
    const ScopedFault fault(*ParseFault(what));
    EXPECT_EQ(CommitFile(At("plan"), "two", true).error().code, Errc::kIo) << what;
    EXPECT_EQ(Get("plan"), "one") << what;
    EXPECT_EQ(Contents().count("plan.partial"), 0U) << what;
  }
  const ScopedFault fault(*ParseFault("unlink:1:eio"));  // of the lock
  EXPECT_EQ(CommitFile(At("plan"), "two", true).error().code, Errc::kIo);
  EXPECT_EQ(Get("plan"), "two");
}

TEST_F(CommitFileTest, AFileOfAKilledRunThatCannotBeRemovedIsNoObstacle) {
  Put("plan.partial", "of a killed run");
  const ScopedFault fault(*ParseFault("unlink:1:eperm"));
  EXPECT_TRUE(CommitFile(At("plan"), "one", false));
  EXPECT_EQ(Contents(), (Files{{"plan", "one"}, {"plan.partial", "of a killed run"}}));
}

}  // namespace
}  // namespace shardwright::os
