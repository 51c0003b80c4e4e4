// SPDX-License-Identifier: Apache-2.0
#include "support/os/directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "scratch.h"
#include "support/os/commit.h"
#include "support/os/fault.h"

namespace shardwright::os {
namespace {

using DirectoryTest = Scratch;
using Files = std::map<std::string, std::string>;

TEST_F(DirectoryTest, NamesAreLookedUpFromTheDirectoryWhateverItsPathLeadsToNow) {
  Put("a/sub/file", "ours");
  const Directory a = *Directory::Open(At("a"));
  ASSERT_EQ(::rename(At("a").c_str(), At("moved").c_str()), 0);
  Put("a/sub/file", "theirs");
  EXPECT_EQ(*a.ReadWholeText("sub/file", 10), "ours");
  ASSERT_TRUE(a.ReplaceFile("sub/file", "new"));
  EXPECT_EQ(Get("moved/sub/file"), "new");
  EXPECT_EQ(Get("a/sub/file"), "theirs");
  ASSERT_TRUE(a.RemoveTree("sub"));
  EXPECT_EQ(Contents("moved").size(), 0U);
}

TEST_F(DirectoryTest, NoLinkIsFollowedInAnyComponent) {
  Put("else/file", "precious");
  Put("work/sub/x", "");
  ASSERT_EQ(::symlink(At("else").c_str(), At("work/link").c_str()), 0);
  ASSERT_EQ(::symlink(At("else/file").c_str(), At("work/sub/file").c_str()), 0);
  const Directory work = *Directory::Open(At("work"));
  for (const std::string name : {"link/file", "sub/file"}) {
    EXPECT_EQ(work.OpenRead(name).error().code, Errc::kNotFound) << name;
    EXPECT_EQ(work.OpenWrite(name).error().code, Errc::kNotFound) << name;
    EXPECT_FALSE(work.Create(name)) << name;
    EXPECT_FALSE(work.SyncFile(name)) << name;
  }
  EXPECT_EQ(work.OpenDir("link").error().code, Errc::kNotFound);
  EXPECT_EQ(work.MakeDirs("link/new").error().code, Errc::kIo);
  EXPECT_EQ(work.RemoveFile("link/file").error().code, Errc::kIo);
  EXPECT_EQ(work.Rename("sub/x", "link/x").error().code, Errc::kIo);
  EXPECT_EQ((*work.Look("link"))->type, EntryType::kSymlink);
  EXPECT_EQ(work.Walk()->files, (std::vector<std::string>{"sub/x"}));
  ASSERT_TRUE(work.RemoveTree("link"));
  ASSERT_TRUE(work.RemoveTree("sub"));
  EXPECT_EQ(Contents("else"), (Files{{"else/file", "precious"}}));
}

TEST_F(DirectoryTest, ARealPathIsOpenedOnlyWhileItHasNoLinks) {
  Put("a/file", "1");
  Put("b/file", "2");
  const std::string real = At("a/file");
  EXPECT_TRUE(Directory::OpenReal(real, "shown"));
  ASSERT_EQ(::unlink(real.c_str()), 0);
  ASSERT_EQ(::symlink(At("b/file").c_str(), real.c_str()), 0);
  EXPECT_EQ(Directory::OpenReal(real, "shown").error().sys, ELOOP);
  std::filesystem::remove_all(At("a"));
  ASSERT_EQ(::symlink("b", At("a").c_str()), 0);
  const auto swapped = Directory::OpenReal(real, "shown");
  const int reason = swapped.error().sys;
  EXPECT_TRUE(reason == ELOOP || reason == ENOTDIR) << reason;
  EXPECT_EQ(swapped.error().message.rfind("shown: cannot open", 0), 0U);
}

TEST_F(DirectoryTest, TellsOwnFilesFromOthers) {
  Put("file", "");
  const Directory here = Here();
  const NameStatus own = **here.Look("file");
  EXPECT_EQ(here.WhyForeign(own), "");
  EXPECT_TRUE(here.IsOwnFile(own));
  NameStatus other = own;
  other.owner += 1;
  const std::string me = std::to_string(::geteuid());
  EXPECT_EQ(here.WhyForeign(other),
            "belongs to user " + std::to_string(other.owner) + ", not to you (user " + me + ")");
  EXPECT_FALSE(here.IsOwnFile(other));
  NameStatus linked = own;
  linked.links = 2;
  EXPECT_FALSE(here.IsOwnFile(linked));
  EXPECT_EQ(Contents(), (Files{{"file", ""}}));
}

TEST_F(DirectoryTest, TellsWhereOthersMayWrite) {
  const Directory here = Here();
  NameStatus stage;
  stage.mode = 0755;
  EXPECT_EQ(here.WhyExposed(stage), "");
  for (const std::uint32_t mode : {0775U, 0757U, 02775U}) {
    stage.mode = mode;
    EXPECT_NE(here.WhyExposed(stage), "") << mode;
  }
  for (const auto& [mode, shared] : std::map<mode_t, bool>{{0700, false},
                                                           {0755, false},
                                                           {0775, false},
                                                           {01777, false},
                                                           {0777, true},
                                                           {02777, true}}) {
    ASSERT_EQ(::chmod(root_.c_str(), mode), 0);
    EXPECT_EQ(*here.WhyShared() != "", shared) << mode;
  }
}

TEST_F(DirectoryTest, AStageThatOthersMayWriteToIsNotOpened) {
  ASSERT_TRUE(Here().MakeDir("stage", true));
  EXPECT_EQ((*Here().Look("stage"))->mode, 0700U);
  EXPECT_TRUE(OpenStage(At("stage")));
  ASSERT_EQ(::chmod(At("stage").c_str(), 0777), 0);
  EXPECT_EQ(OpenStage(At("stage")).error().code, Errc::kBusy);
}

TEST_F(DirectoryTest, ModesKeepTheirSpecialBits) {
  ASSERT_TRUE(Here().MakeDir("d"));
  ASSERT_EQ(::chmod(At("d").c_str(), 02755), 0);
  const Directory d = *Here().OpenDir("d");
  ASSERT_TRUE(d.SetMode(0700));
  EXPECT_EQ(d.Self()->mode, 02700U);
  const ScopedFault fault(*ParseFault("chmod:1:eio"));
  EXPECT_TRUE(d.SetMode(0700));
  EXPECT_FALSE(fault.fired());
  EXPECT_EQ(d.SetMode(0750).error().code, Errc::kIo);
}

TEST_F(DirectoryTest, MakesEachOfManyFoldersOnce) {
  const ScopedFault calls;
  ASSERT_TRUE(Here().MakeAllDirs({"a/b/c", "a/b/d", "a/e", "f"}));
  for (const char* name : {"a/b/c", "a/b/d", "a/e", "f"}) EXPECT_TRUE(*Here().Exists(name)) << name;
  EXPECT_EQ(calls.Count(Op::kMkdir), 6U);
  ASSERT_TRUE(Here().MakeAllDirs({"a/b/c", "a/g"})) << "existing folders are not an error";
  std::ofstream(At("file")) << "text";
  const Status blocked = Here().MakeAllDirs({"file/below"});
  ASSERT_FALSE(blocked);
  EXPECT_NE(blocked.error().message.find("file: exists and is not a directory"), std::string::npos)
      << blocked.error().message;
}

/// One operation after the other, until one fails.
Status UseDirectory(const std::string& path) {
  SW_TRY_ASSIGN(const Directory top, Directory::Open(path));
  SW_TRY(top.MakeDirs("a/b"));
  SW_TRY(top.MakeDir("own", true));
  SW_TRY_ASSIGN(File made, top.Create("a/made"));
  SW_TRY(made.WriteAt(0, AsBytes("text")));
  SW_TRY(made.Close());
  SW_TRY(top.WriteWholeFile("a/whole", "text"));
  SW_TRY(top.ReplaceFile("a/whole", "new"));
  SW_TRY(top.ReadWholeText("a/whole", 10));
  SW_TRY_ASSIGN(const File again, top.OpenWrite("a/made"));
  SW_TRY_ASSIGN(const std::optional<NameStatus> status, top.Look("a/made"));
  if (!status) return Fail(Errc::kInternal, "a/made is gone");
  top.WhyForeign(*status);
  top.WhyExposed(*status);
  top.IsOwnFile(*status);
  SW_TRY(top.WhyShared());
  SW_TRY(top.Exists("a/absent"));
  SW_TRY(top.HardLink(path + "/a/made", again, "a/second"));
  SW_TRY(top.Rename("a/second", "a/third"));
  SW_TRY(top.RenameNew("a/third", "a/fourth"));
  SW_TRY(top.Exchange("a/made", "a/whole"));
  SW_TRY_ASSIGN(const Directory own, top.OpenDir("own"));
  SW_TRY(top.MoveNew("a/fourth", own, "moved"));
  SW_TRY(own.SetMode(0700));
  SW_TRY(own.Self());
  SW_TRY(top.SyncFile("a/made"));
  SW_TRY(top.Walk());
  SW_TRY(top.List());
  SW_TRY(top.Sync());
  SW_TRY(Directory::OpenReal(path + "/a/made", "shown"));
  SW_TRY(top.RemoveFile("a/made"));
  SW_TRY(top.RemoveTree("a"));
  return top.RemoveTree("own");
}

TEST_F(DirectoryTest, EveryOperationReportsAFailingCall) {
  ASSERT_EQ(::mkdir(At("clean").c_str(), 0755), 0);
  ASSERT_TRUE(UseDirectory(At("clean")));
  EXPECT_TRUE(Contents("clean").empty());
  // Some operations have a fallback if the file system does not support the first call.
  for (const std::string error : {"eio", "einval"}) {
    int failed = 0;
    bool fired = true;
    for (int call = 1; fired; ++call) {
      const std::string folder = At(error + std::to_string(call));
      ASSERT_EQ(::mkdir(folder.c_str(), 0755), 0);
      const ScopedFault fault(*ParseFault("every:" + std::to_string(call) + ":" + error));
      const Status used = UseDirectory(folder);
      fired = fault.fired();
      failed += used ? 0 : 1;
      if (!used) {
        EXPECT_NE(used.error().code, Errc::kInternal) << used.error().message;
      }
      ASSERT_LT(call, 1000);
    }
    if (error == "eio") {
      EXPECT_GT(failed, 50);
    }
  }
}

TEST_F(DirectoryTest, LinksThatCannotBeMadeAreReported) {
  Put("file", "text");
  const Directory here = Here();
  const File file = *here.OpenRead("file");
  for (const auto& [error, code] : std::vector<std::pair<std::string, Errc>>{
           {"eacces", Errc::kUnsupported}, {"enospc", Errc::kIo}, {"estale", Errc::kIo}}) {
    const ScopedFault fault(*ParseFault("link:1:" + error));
    EXPECT_EQ(here.HardLink(At("file"), file, "second").error().code, code) << error;
  }
  Put("other", "text");
  EXPECT_EQ(here.HardLink(At("other"), file, "second").error().code, Errc::kNotFound);
  EXPECT_EQ(here.HardLink(At("file"), file, "other").error().code, Errc::kBusy);
  EXPECT_EQ(here.HardLink(At("absent"), file, "second").error().code, Errc::kNotFound);
  EXPECT_FALSE(*here.Exists("second"));
}

TEST_F(DirectoryTest, NamesThatAreAbsentAreReported) {
  const Directory here = Here();
  EXPECT_EQ(here.OpenDir("absent").error().code, Errc::kNotFound);
  EXPECT_EQ(here.OpenRead("absent/a").error().code, Errc::kNotFound);
  EXPECT_EQ(here.ReadWholeText("absent", 1).error().code, Errc::kNotFound);
  EXPECT_EQ(here.Create("absent/a").error().code, Errc::kIo);
  EXPECT_EQ(here.MakeDir("absent/a").error().code, Errc::kIo);
  EXPECT_EQ(here.Rename("absent", "b").error().code, Errc::kIo);
  EXPECT_EQ(here.RenameNew("absent", "b").error().code, Errc::kIo);
  EXPECT_EQ(here.Exchange("absent", "b").error().code, Errc::kIo);
  EXPECT_EQ(here.SyncFile("absent").error().code, Errc::kIo);
  EXPECT_EQ(here.RemoveFile("absent").error().code, Errc::kIo);
  EXPECT_FALSE(*here.Exists("absent/a"));
  EXPECT_TRUE(here.RemoveTree("absent"));
  EXPECT_EQ(Directory::OpenReal(At("absent"), "shown").error().code, Errc::kNotFound);
}

}  // namespace
}  // namespace shardwright::os
