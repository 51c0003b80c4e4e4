// SPDX-License-Identifier: Apache-2.0
#include "support/os/commit.h"

#include <unistd.h>

#include "scratch.h"
#include "support/os/dir.h"
#include "support/os/fault.h"

namespace shardwright::os {
namespace {

using CommitTest = Scratch;
using Files = std::map<std::string, std::string>;

CommitSteps Manifest() {
  CommitSteps steps;
  steps.write_manifest = [](const Directory& stage) { return stage.ReplaceFile("manifest", "m"); };
  return steps;
}

Status Fill(const Stage& stage, const std::string& text) {
  SW_TRY(MakeDirs(stage.path() + "/sub"));
  SW_TRY(ReplaceFile(stage.path() + "/a", text));
  return ReplaceFile(stage.path() + "/sub/b", text);
}

Files Output(const std::string& text) {
  return {
      {"out", "/"}, {"out/a", text}, {"out/manifest", "m"}, {"out/sub", "/"}, {"out/sub/b", text}};
}

TEST_F(CommitTest, MakesTheOutputAndLeavesNothingElse) {
  auto stage = Stage::Begin(At("out/"), {.force = false, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_TRUE(stage) << stage.error().message;
  EXPECT_EQ(stage->path(), At("out.partial-r1"));
  EXPECT_EQ(stage->output(), At("out"));
  EXPECT_FALSE(stage->resumed());
  EXPECT_TRUE(*IsDir(stage->journal_dir()));
  ASSERT_TRUE(Fill(*stage, "new"));
  EXPECT_FALSE(*Exists(At("out")));
  const Status status = stage->Commit(Manifest());
  ASSERT_TRUE(status) << status.error().message;
  EXPECT_TRUE(stage->committed());
  EXPECT_TRUE(stage->notes().empty());
  EXPECT_TRUE(stage->Abandon(false));  // too late to remove anything
  EXPECT_EQ(Contents(), Output("new"));
}

TEST_F(CommitTest, SyncsFilesThenDirectoriesThenManifestThenVerifiesThenRenames) {
  auto stage = Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_TRUE(stage && Fill(*stage, "new"));
  const ScopedFault calls;
  CommitSteps steps;
  std::uint64_t synced_before_manifest = 0;
  steps.write_manifest = [&](const Directory& folder) {
    synced_before_manifest = calls.Count(Op::kSync);
    EXPECT_EQ(folder.path(), stage->path());
    return folder.WriteWholeFile("manifest", "m");
  };
  bool verified = false;
  steps.verify = [&](const Directory& folder) -> Status {
    verified = true;
    EXPECT_EQ(Get("out.partial-r1/manifest"), "m");
    EXPECT_EQ(folder.path(), stage->path());
    EXPECT_EQ(calls.Count(Op::kRename), 0U);
    return {};
  };
  ASSERT_TRUE(stage->Commit(steps));
  EXPECT_TRUE(verified);
  EXPECT_EQ(synced_before_manifest, 4U);      // 2 files, 2 directories
  EXPECT_EQ(calls.Count(Op::kSync), 4U + 4);  // manifest, its directory, the stage, the parent
}

TEST_F(CommitTest, OthersEnterTheOutputButNotTheStage) {
  const auto mode = [&](const std::string& name) { return (*Here().Look(name))->mode; };
  ASSERT_TRUE(MakeDirs(At("folder")));
  auto stage = Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_TRUE(stage && Fill(*stage, "new"));
  EXPECT_EQ(mode("out.partial-r1"), 0700U);
  ASSERT_TRUE(stage->Commit(Manifest()));
  EXPECT_EQ(mode("out"), mode("folder"));
}

TEST_F(CommitTest, AStageThatOthersMayWriteToIsNotResumed) {
  {
    auto stage =
        Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r1"});
    ASSERT_TRUE(stage && Fill(*stage, "new"));
  }
  ASSERT_TRUE(Here().OpenDir("out.partial-r1")->SetMode(0777));
  const auto resumed =
      Stage::Begin(At("out"), {.force = false, .resume = Resume::kIfSameOrDone, .run_id = "r2"});
  ASSERT_FALSE(resumed);
  EXPECT_EQ(resumed.error().code, Errc::kBusy);
  EXPECT_NE(resumed.error().message.find("chmod go-w"), std::string::npos)
      << resumed.error().message;
}

TEST_F(CommitTest, FilesSyncedByTheCallerAreNotSyncedAgain) {
  auto stage = Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_TRUE(stage && Fill(*stage, "new"));
  CommitSteps steps = Manifest();
  steps.synced = Synced::kFiles;
  std::uint64_t syncs = 0;
  const ScopedFault calls;
  steps.verify = [&](const Directory&) -> Status {
    syncs = calls.Count(Op::kSync);
    return {};
  };
  ASSERT_TRUE(stage->Commit(steps));
  EXPECT_EQ(syncs, 2U + 3);  // 2 directories; the manifest, its name, its directory
}

TEST_F(CommitTest, RefusesAnExistingOutputUnlessForced) {
  Put("out/old", "1");
  const auto refused =
      Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kBusy);
  EXPECT_EQ(Contents(), (Files{{"out", "/"}, {"out/old", "1"}}));
  auto forced = Stage::Begin(At("out"), {.force = true, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_TRUE(forced && Fill(*forced, "new"));
  EXPECT_EQ(Get("out/old"), "1");
  ASSERT_TRUE(forced->Commit(Manifest()));
  EXPECT_EQ(Contents(), Output("new"));
}

TEST_F(CommitTest, NeverReplacesALinkOrAFile) {
  Put("target/x", "1");
  ASSERT_EQ(::symlink("target", At("out").c_str()), 0);
  Put("file", "2");
  for (const std::string name : {"out", "file"}) {
    const auto stage =
        Stage::Begin(At(name), {.force = true, .resume = Resume::kNever, .run_id = "r1"});
    ASSERT_FALSE(stage) << name;
    EXPECT_EQ(stage.error().code, Errc::kBusy) << name;
  }
  EXPECT_EQ(Contents(),
            (Files{{"target", "/"}, {"target/x", "1"}, {"out", "link"}, {"file", "2"}}));
}

TEST_F(CommitTest, SaysThatAnOutputIsALink) {
  ASSERT_EQ(::symlink("elsewhere", At("out").c_str()), 0);
  const auto stage =
      Stage::Begin(At("out"), {.force = true, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_FALSE(stage);
  EXPECT_NE(stage.error().message.find("a symbolic link"), std::string::npos);
}

TEST_F(CommitTest, SecondRunOfTheSameOutputIsRefusedWithItsOwner) {
  auto first = Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_TRUE(first);
  const auto second =
      Stage::Begin(At("out"), {.force = false, .resume = Resume::kIfSameOrDone, .run_id = "r2"});
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, Errc::kBusy);
  EXPECT_NE(second.error().message.find("(run r1)"), std::string::npos) << second.error().message;
  ASSERT_TRUE(first->Abandon(false));
  EXPECT_TRUE(Contents().empty());
}

TEST_F(CommitTest, ARunWhoseLockWasTakenOverCommitsAndRemovesNothing) {
  auto stage = Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_TRUE(stage && Fill(*stage, "new"));
  const std::string taken = "process 7 on elsewhere (run r2)\nboot b7 start 5\n";
  Put("out.lock", taken);
  const Status status = stage->Commit(Manifest());
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Errc::kBusy);
  ASSERT_TRUE(stage->Abandon(false));
  EXPECT_EQ(Get("out.partial-r1/a"), "new");
  EXPECT_EQ(Get("out.lock"), taken);
  EXPECT_FALSE(*Exists(At("out")));
}

TEST_F(CommitTest, AStageOfAnotherMachineIsNotTouchedUntilItIsTakenOver) {
  {
    auto stage =
        Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r1"});
    ASSERT_TRUE(stage && Fill(*stage, "old") && stage->Abandon(true));
  }
  Put("out.lock", "process 7 on elsewhere (run r1)\nboot b7 start 5\n");
  const Files before = Contents();
  for (const Resume resume : {Resume::kIfSame, Resume::kIfSameOrDone, Resume::kNever}) {
    const auto refused = Stage::Begin(At("out"), {.force = true, .resume = resume, .run_id = "r2"});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Errc::kBusy);
    EXPECT_EQ(Contents(), before);
  }
  std::filesystem::last_write_time(
      At("out.lock"), std::filesystem::file_time_type::clock::now() - 2 * kHeartbeatExpires);
  const auto stage = Stage::Begin(
      At("out"),
      {.force = false, .resume = Resume::kIfSameOrDone, .run_id = "r2", .take_over = true});
  ASSERT_TRUE(stage) << stage.error().message;
  EXPECT_TRUE(stage->resumed());
  EXPECT_EQ(stage->run_id(), "r1");
}

TEST_F(CommitTest, AnOutputThatAppearsMeanwhileIsNotReplaced) {
  auto stage = Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_TRUE(stage && Fill(*stage, "new"));
  Put("out/foreign", "1");
  const Status status = stage->Commit(Manifest());
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Errc::kBusy);
  EXPECT_EQ(Get("out/foreign"), "1");
  EXPECT_TRUE(*IsDir(stage->journal_dir()));  // still to be resumed
}

TEST_F(CommitTest, DroppedStageStaysAndIsResumed) {
  {
    auto stage =
        Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r1"});
    ASSERT_TRUE(stage && Fill(*stage, "half"));
  }
  EXPECT_FALSE(*Exists(At("out.lock")));
  auto stage =
      Stage::Begin(At("out"), {.force = false, .resume = Resume::kIfSameOrDone, .run_id = "r2"});
  ASSERT_TRUE(stage);
  EXPECT_TRUE(stage->resumed());
  EXPECT_EQ(stage->run_id(), "r1");
  EXPECT_EQ(Get("out.partial-r1/a"), "half");
  ASSERT_TRUE(Fill(*stage, "whole"));
  ASSERT_TRUE(stage->Commit(Manifest()));
  EXPECT_EQ(Contents(), Output("whole"));
}

TEST_F(CommitTest, FreshRunRemovesLeftoversOfItsOwnOutputOnlyAndSaysSo) {
  Put("out.partial-dead/.journal/j", "1");
  Put("out.partial-old/x", "1");
  Put("out2.partial-dead/x", "1");
  Put("out.partial-a.b/x", "not a run id");
  Put("out.partial-file", "not a directory");
  auto stage = Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_TRUE(stage);
  EXPECT_EQ(stage->notes(), (std::vector<std::string>{
                                "removed " + At("out.partial-dead") + ", left by a stopped run",
                                "removed " + At("out.partial-old") + ", left by a stopped run"}));
  ASSERT_TRUE(stage->Abandon(false));
  EXPECT_EQ(Contents(), (Files{{"out2.partial-dead", "/"},
                               {"out2.partial-dead/x", "1"},
                               {"out.partial-a.b", "/"},
                               {"out.partial-a.b/x", "not a run id"},
                               {"out.partial-file", "not a directory"}}));
}

TEST_F(CommitTest, ResumeNeverContinuesAReplacedOutput) {
  Put("out/a", "new");
  Put("out.partial-r1/a", "old");  // killed after the exchange
  Put("out.partial-r1.journal/j", "1");
  auto stage =
      Stage::Begin(At("out"), {.force = true, .resume = Resume::kIfSameOrDone, .run_id = "r2"});
  ASSERT_TRUE(stage) << stage.error().message;
  EXPECT_FALSE(stage->resumed());
  EXPECT_EQ(stage->notes().size(), 1U);
  ASSERT_TRUE(stage->Abandon(false));
  EXPECT_EQ(Contents(), (Files{{"out", "/"}, {"out/a", "new"}}));
}

TEST_F(CommitTest, FinishedStageWithoutItsNameIsResumed) {
  Put("out.partial-r1/a", "new");  // killed before the rename
  Put("out.partial-r1.journal/j", "1");
  auto stage =
      Stage::Begin(At("out"), {.force = false, .resume = Resume::kIfSameOrDone, .run_id = "r2"});
  ASSERT_TRUE(stage) << stage.error().message;
  EXPECT_TRUE(stage->resumed());
  EXPECT_EQ(Get("out.partial-r1/.journal/j"), "1");
}

TEST_F(CommitTest, OutputMovedAsideByAKilledRunIsPutBack) {
  Put("out.partial-r1.old/a", "old");
  Put("out.partial-r1/a", "new");
  Put("out.partial-r1.journal/j", "1");
  {
    const ScopedFault calls;
    const auto refused =
        Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r2"});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Errc::kBusy);
    EXPECT_EQ(calls.Count(Op::kSync), 1U);  // the folder that has the name again
  }
  EXPECT_EQ(Get("out/a"), "old");
  auto stage =
      Stage::Begin(At("out"), {.force = true, .resume = Resume::kIfSameOrDone, .run_id = "r2"});
  ASSERT_TRUE(stage);
  EXPECT_TRUE(stage->resumed());
  ASSERT_TRUE(stage->Commit(Manifest()));
  EXPECT_EQ(Contents(), (Files{{"out", "/"}, {"out/a", "new"}, {"out/manifest", "m"}}));
}

TEST_F(CommitTest, OutputMovedAsideByAKilledRunOutlivesAnotherProgramsOutput) {
  Put("out.partial-r1.old/a", "old");
  Put("out.partial-r1/a", "new");
  Put("out.partial-r1.journal/j", "1");
  Put("out/a", "of another program");
  const auto refused =
      Stage::Begin(At("out"), {.force = false, .resume = Resume::kNever, .run_id = "r2"});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kBusy);
  EXPECT_EQ(Get("out.partial-r1.old/a"), "old");
  auto stage =
      Stage::Begin(At("out"), {.force = true, .resume = Resume::kIfSameOrDone, .run_id = "r3"});
  ASSERT_TRUE(stage) << stage.error().message;
  EXPECT_TRUE(stage->resumed());
  ASSERT_EQ(stage->warnings().size(), 1U);
  EXPECT_TRUE(stage->warnings()[0].ends_with("to " + At("out.old-r1") + ", which stays"))
      << stage->warnings()[0];
  ASSERT_TRUE(stage->Commit(Manifest()));
  EXPECT_EQ(Contents(), (Files{{"out", "/"},
                               {"out/a", "new"},
                               {"out/manifest", "m"},
                               {"out.old-r1", "/"},
                               {"out.old-r1/a", "old"}}));
}

TEST_F(CommitTest, SeveralResumableRunsAreRefused) {
  Put("out.partial-r1/.journal/j", "1");
  Put("out.partial-r2/.journal/j", "1");
  const auto stage =
      Stage::Begin(At("out"), {.force = false, .resume = Resume::kIfSameOrDone, .run_id = "r3"});
  ASSERT_FALSE(stage);
  EXPECT_EQ(stage.error().code, Errc::kBusy);
  EXPECT_EQ(Contents().size(), 6U);
}

TEST_F(CommitTest, SaysWhenTheOldOutputHadToBeMovedAside) {
  Put("out/a", "old");
  auto stage = Stage::Begin(At("out"), {.force = true, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_TRUE(stage && Fill(*stage, "new"));
  {
    const ScopedFault fault(*ParseFault("exchange:1:einval"));
    ASSERT_TRUE(stage->Commit(Manifest()));
  }
  ASSERT_EQ(stage->notes().size(), 1U);
  EXPECT_NE(stage->notes()[0].find("cannot exchange names"), std::string::npos);
  EXPECT_EQ(Contents(), Output("new"));
}

TEST_F(CommitTest, EveryWayOfRefusingAnExchangeIsAnswered) {
  for (const char* const error : {"enotempty", "exdev", "ebusy", "eperm"}) {
    Put("out/a", "old");
    auto stage = Stage::Begin(At("out"), {.force = true, .resume = Resume::kNever, .run_id = "r1"});
    ASSERT_TRUE(stage && Fill(*stage, "new"));
    const ScopedFault fault(*ParseFault("exchange:1:" + std::string(error)));
    const Status status = stage->Commit(Manifest());
    EXPECT_TRUE(fault.fired());
    ASSERT_TRUE(status) << status.error().message;
    EXPECT_EQ(Contents(), Output("new"));
    std::filesystem::remove_all(At("out"));
  }
}

TEST_F(CommitTest, LeftoversThatCannotBeRemovedAreNoObstacle) {
  Put("out/a", "old");
  Put("out.partial-r8/sub/b", std::string(2048, 'x'));  // rmdir fails
  Put("out.partial-r8/c", "goes");
  Put("out.partial-r9.old/a", "older");
  Put("out.partial-r9.journal/j", "1");
  auto stage = [&] {
    const ScopedFault fault(*ParseFaults("unlink:1+:eperm,rmdir:1+:ebusy"));
    return Stage::Begin(At("out"), {.force = true, .resume = Resume::kNever, .run_id = "r1"});
  }();
  ASSERT_TRUE(stage) << stage.error().message;
  ASSERT_EQ(stage->warnings().size(), 3U);
  EXPECT_EQ(stage->warnings()[0], At("out.partial-r9.journal") +
                                      " was not removed, 1 B: " + At("out.partial-r9.journal/j") +
                                      ": cannot remove: operation not permitted");
  EXPECT_EQ(stage->warnings()[2].rfind(At("out.partial-r8") + " was not removed, 2.00 KiB: ", 0),
            0U)
      << stage->warnings()[2];
  ASSERT_TRUE(Fill(*stage, "new"));
  {
    const ScopedFault fault(*ParseFault("rmdir:1+:ebusy"));
    ASSERT_TRUE(stage->Commit(Manifest()));
    EXPECT_TRUE(fault.fired());
  }
  EXPECT_EQ(stage->warnings().size(), 5U);  // the old output, the journal
  EXPECT_EQ(Get("out/a"), "new");
  EXPECT_FALSE(*Exists(At("out.partial-r1/a")));  // all that could go is gone
  auto next = Stage::Begin(At("out"), {.force = true, .resume = Resume::kNever, .run_id = "r2"});
  ASSERT_TRUE(next && Fill(*next, "newer"));
  EXPECT_TRUE(next->warnings().empty());
  ASSERT_TRUE(next->Commit(Manifest()));
  EXPECT_EQ(Contents(), Output("newer"));
}

TEST_F(CommitTest, BadNamesAndParentsAreRefused) {
  const auto code = [&](const std::string& output, const std::string& run) {
    const auto stage =
        Stage::Begin(output, {.force = false, .resume = Resume::kNever, .run_id = run});
    return stage ? Errc::kInternal : stage.error().code;
  };
  EXPECT_EQ(code(At("out"), ""), Errc::kUsage);
  EXPECT_EQ(code(At("out"), "a/b"), Errc::kUsage);
  EXPECT_EQ(code(At("out"), std::string(65, 'a')), Errc::kUsage);
  EXPECT_EQ(code(At(std::string(240, 'a')), "r1"), Errc::kUsage);
  EXPECT_EQ(code("/", "r1"), Errc::kUsage);
  EXPECT_EQ(code(At("absent/out"), "r1"), Errc::kNotFound);
  const ScopedFault fault(*ParseFault("create:1:erofs"));
  EXPECT_EQ(code(At("out"), "r1"), Errc::kIo);
  EXPECT_TRUE(Contents().empty());
}

TEST_F(CommitTest, FailedManifestOrVerifyKeepsTheStage) {
  for (const bool in_manifest : {true, false}) {
    auto stage =
        Stage::Begin(At("out"), {.force = false, .resume = Resume::kIfSameOrDone, .run_id = "r1"});
    ASSERT_TRUE(stage && Fill(*stage, "new"));
    CommitSteps steps = Manifest();
    const auto fail = [](const Directory&) -> Status { return Fail(Errc::kMismatch, "no"); };
    (in_manifest ? steps.write_manifest : steps.verify) = fail;
    const Status status = stage->Commit(steps);
    EXPECT_EQ(status.error().code, Errc::kMismatch);
    ASSERT_TRUE(stage->Abandon(true));
    EXPECT_FALSE(*Exists(At("out")));
    EXPECT_TRUE(*IsDir(At("out.partial-r1/.journal")));
  }
}

TEST_F(CommitTest, AnOutputThatCannotBePutBackIsNamed) {
  Put("out/a", "old");
  auto stage = Stage::Begin(At("out"), {.force = true, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_TRUE(stage && Fill(*stage, "new"));
  // The renames: the manifest's, the journal's, the old output's; then the stage's, and both ways
  // back.
  const ScopedFault fault(*ParseFaults("exchange:1:einval,rename:4+:eio"));
  const Status status = stage->Commit(Manifest());
  ASSERT_FALSE(status);
  EXPECT_NE(status.error().message.find("; the old output is now " + At("out.partial-r1.old")),
            std::string::npos)
      << status.error().message;
  EXPECT_NE(status.error().message.find("; the run cannot be resumed: "), std::string::npos);
  EXPECT_EQ(Get("out.partial-r1.old/a"), "old");
  EXPECT_EQ(Get("out.partial-r1/a"), "new");
}

TEST_F(CommitTest, WhatCannotBeTidiedIsNotedAndAFailedAbandonTold) {
  Put("out/a", "old");
  auto stage = Stage::Begin(At("out"), {.force = true, .resume = Resume::kNever, .run_id = "r1"});
  ASSERT_TRUE(stage && Fill(*stage, "new"));
  {
    const ScopedFault fault(*ParseFault("commit.release:1:eio"));
    ASSERT_TRUE(stage->Commit(Manifest()));
  }
  EXPECT_EQ(stage->warnings().size(), 1U);
  auto next = Stage::Begin(At("out"), {.force = true, .resume = Resume::kNever, .run_id = "r2"});
  ASSERT_TRUE(next);
  {
    const ScopedFault fault(*ParseFault("rmdir:1:eio"));
    EXPECT_EQ(next->Abandon(false).error().code, Errc::kIo);
  }
  EXPECT_EQ(Get("out/a"), "new");
  EXPECT_TRUE(next->Abandon(false));  // the lock is free: nothing more to do
}

TEST_F(CommitTest, ANameThatMayBeLostIsAnErrorAndALockThatStaysIsNot) {
  for (const char* const what : {"commit.sync_parent:1:eio", "unlink:1:eio"}) {
    const std::string out = At(what);
    auto stage = Stage::Begin(out, {.force = false, .resume = Resume::kNever, .run_id = "r1"});
    ASSERT_TRUE(stage && MakeDirs(stage->path() + "/sub")) << what;
    const ScopedFault fault(*ParseFault(what));
    const Status status = stage->Commit(Manifest());
    EXPECT_TRUE(fault.fired()) << what;
    EXPECT_TRUE(*IsDir(out + "/sub")) << what;
    if (std::string_view(what).starts_with("commit")) {
      ASSERT_FALSE(status);
      EXPECT_EQ(status.error().code, Errc::kIo);
      EXPECT_NE(status.error().message.find("may not survive"), std::string::npos);
    } else {
      EXPECT_TRUE(status);
      ASSERT_EQ(stage->warnings().size(), 1U);
      EXPECT_NE(stage->warnings()[0].find("cannot remove the lock file"), std::string::npos);
    }
  }
}

TEST_F(CommitTest, RunIdsDiffer) {
  const auto a = MakeRunId();
  const auto b = MakeRunId();
  ASSERT_TRUE(a && b);
  EXPECT_EQ(a->size(), 16U);
  EXPECT_NE(*a, *b);
}

}  // namespace
}  // namespace shardwright::os
