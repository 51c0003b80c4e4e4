// SPDX-License-Identifier: Apache-2.0
#include "support/os/dir.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>

#include "scratch.h"
#include "support/os/fault.h"
#include "support/os/real_path.h"

namespace shardwright::os {
namespace {

using DirTest = Scratch;
using Files = std::map<std::string, std::string>;

TEST_F(DirTest, SafeNameRefusesEveryWayOut) {
  for (const std::string& name :
       std::vector<std::string>{"", ".", "..", "a/b", "/", "/etc", "../x", std::string("a\0b", 3),
                                std::string(256, 'a')}) {
    const Status status = SafeName(name);
    ASSERT_FALSE(status) << name;
    EXPECT_EQ(status.error().code, Errc::kBadInput);
  }
  for (const std::string& name :
       std::vector<std::string>{"a", "...", "..a", "layer 1.pt", std::string(255, 'a')}) {
    EXPECT_TRUE(SafeName(name)) << name;
  }
  EXPECT_EQ(*JoinSafe("/d", "n"), "/d/n");
  EXPECT_FALSE(JoinSafe("/d", ".."));
}

TEST_F(DirTest, MessagesEscapeControlCharacters) {
  const Status status = SafeName("\x1b[2J/");
  EXPECT_NE(status.error().message.find("\"\\x1b[2J/\""), std::string::npos)
      << status.error().message;
}

TEST_F(DirTest, SplitOutputResolvesTheParentOnly) {
  ASSERT_TRUE(MakeDirs(At("real")));
  ASSERT_EQ(::symlink(At("real").c_str(), At("link").c_str()), 0);
  const auto split = SplitOutput(At("link") + "/./../real/out///");
  ASSERT_TRUE(split);
  EXPECT_EQ(split->parent, At("real"));
  EXPECT_EQ(split->name, "out");
  EXPECT_EQ(split->Path(), At("real/out"));
  EXPECT_EQ(SplitOutput("/out")->Path(), "/out");
  for (const std::string path : {"", "/", "..", "a/..", "."}) {
    EXPECT_EQ(SplitOutput(path).error().code, Errc::kUsage) << path;
  }
  Put("file", "");
  EXPECT_EQ(SplitOutput(At("absent/out")).error().code, Errc::kNotFound);
  EXPECT_EQ(SplitOutput(At("file/out")).error().code, Errc::kNotFound);
}

TEST_F(DirTest, MakeDirsMakesParentsAndAcceptsExisting) {
  EXPECT_TRUE(MakeDirs(At("a//b/c/")));
  EXPECT_TRUE(MakeDirs(At("a/b/c")));
  EXPECT_TRUE(*IsDir(At("a/b/c")));
  Put("file", "");
  const Status status = MakeDirs(At("file/x"));
  EXPECT_EQ(status.error().code, Errc::kIo);
  EXPECT_EQ(MakeDir(At("a")).error().code, Errc::kBusy);
}

TEST_F(DirTest, ListsSortedWithTypes) {
  Put("b", "");
  Put("a/x", "");
  ASSERT_EQ(::symlink("nowhere", At("c").c_str()), 0);
  ASSERT_EQ(::mkfifo(At("d").c_str(), 0600), 0);
  EXPECT_EQ(*ListDir(root_), (std::vector<Entry>{{"a", EntryType::kDir},
                                                 {"b", EntryType::kFile},
                                                 {"c", EntryType::kSymlink},
                                                 {"d", EntryType::kOther}}));
  EXPECT_EQ(ListDir(At("b")).error().code, Errc::kNotFound);
  EXPECT_TRUE(*Exists(At("c")));  // a dangling link takes the name
  EXPECT_FALSE(*IsDir(At("c")));
  EXPECT_EQ(*ReadLink(At("c")), "nowhere");
  EXPECT_EQ(ReadLink(At("b")).error().code, Errc::kNotFound);
}

TEST_F(DirTest, ListFailureInTheMiddleIsAnError) {
  Put("a", "");
  const ScopedFault fault(*ParseFault("list:2:eio"));
  EXPECT_EQ(ListDir(root_).error().code, Errc::kNotFound);
}

TEST_F(DirTest, WalkGivesChildrenBeforeParents) {
  Put("t/b/c/f1", "");
  Put("t/f2", "");
  ASSERT_EQ(::symlink(root_.c_str(), At("t/loop").c_str()), 0);
  const auto tree = WalkTree(At("t"));
  ASSERT_TRUE(tree);
  EXPECT_EQ(tree->files, (std::vector<std::string>{At("t/b/c/f1"), At("t/f2")}));
  EXPECT_EQ(tree->dirs, (std::vector<std::string>{At("t/b/c"), At("t/b"), At("t")}));
  EXPECT_EQ(tree->other, (std::vector<std::string>{At("t/loop")}));
}

TEST_F(DirTest, RenamesWithAndWithoutReplacing) {
  Put("a", "1");
  Put("b", "2");
  EXPECT_EQ(RenameNew(At("a"), At("b")).error().code, Errc::kBusy);
  EXPECT_EQ(Contents(), (Files{{"a", "1"}, {"b", "2"}}));
  EXPECT_TRUE(Rename(At("a"), At("b")));
  EXPECT_TRUE(RenameNew(At("b"), At("c")));
  EXPECT_EQ(Contents(), (Files{{"c", "1"}}));
  EXPECT_EQ(Rename(At("absent"), At("d")).error().sys, ENOENT);
}

TEST_F(DirTest, WhereNamesCannotBeKeptTheyAreLookedAtFirst) {
  Put("a", "1");
  Put("b", "2");
  const ScopedFault fault(*ParseFault("rename:1+:einval"));
  EXPECT_EQ(RenameNew(At("a"), At("b")).error().code, Errc::kBusy);
  EXPECT_EQ(Contents(), (Files{{"a", "1"}, {"b", "2"}}));
}

TEST_F(DirTest, ANameIsGivenWhereNamesCannotBeKept) {
  Put("a", "1");
  for (const char* const spec : {"rename:1:einval,stat:1:eio", "rename:1:einval,rename:2:eio"}) {
    const ScopedFault fault(*ParseFaults(spec));
    EXPECT_EQ(RenameNew(At("a"), At("b")).error().sys, EIO) << spec;
    EXPECT_TRUE(fault.fired(1)) << spec;
  }
  const ScopedFault fault(*ParseFault("rename:1:einval"));
  EXPECT_TRUE(RenameNew(At("a"), At("b")));
  EXPECT_EQ(Contents(), (Files{{"b", "1"}}));
}

TEST_F(DirTest, EveryLookThatFailsIsToldWithItsPath) {
  Put("d/a", "1");
  Put("d/sub/b", "2");
  const Files before = Contents();
  const auto told = [&](const std::string& spec, Errc code, const std::string& path,
                        const std::function<Status()>& call) {
    const ScopedFault fault(*ParseFaults(spec));
    const Status status = call();
    ASSERT_FALSE(status) << spec;
    EXPECT_TRUE(fault.fired()) << spec;
    EXPECT_EQ(status.error().code, code) << spec;
    EXPECT_EQ(status.error().sys, EIO) << spec;
    EXPECT_EQ(status.error().message.rfind(path + ": ", 0), 0U) << status.error().message;
  };
  const auto of = [](const auto& result) {
    return result ? Status() : Status(tl::unexpected<Error>(result.error()));
  };
  const std::string d = At("d");
  const std::string a = At("d/a");
  const Directory here = Here();
  told("stat:1:eio", Errc::kNotFound, a, [&] { return of(Exists(a)); });
  told("stat:1:eio", Errc::kNotFound, d, [&] { return of(IsDir(d)); });
  told("stat:1:eio", Errc::kNotFound, d, [&] { return ExpectDir(d); });
  told("stat:2:eio", Errc::kNotFound, a, [&] { return ExpectDir(a); });
  told("stat:1:eio", Errc::kNotFound, d, [&] { return of(here.Look("d")); });
  told("stat:2:eio", Errc::kNotFound, d, [&] { return of(SplitOutput(a)); });
  told("open:1:eio", Errc::kNotFound, d, [&] { return of(ListDir(d)); });
  told("list:1:eio", Errc::kNotFound, d, [&] { return of(ListDir(d)); });
  told("open:1:eio", Errc::kIo, d, [&] { return SyncDir(d); });
  told("sync:1:eio", Errc::kIo, d, [&] { return SyncDir(d); });
  told("open:2:eio", Errc::kIo, a, [&] { return here.SyncFile("d/a"); });
  told("exchange:1:eio", Errc::kIo, a, [&] { return of(here.Exchange("d/a", "d/sub/b")); });
  told("unlink:1:eio", Errc::kIo, a, [&] { return RemoveFile(a); });
  told("open:1:eio", Errc::kNotFound, a, [&] { return of(ReadWholeText(a, 9)); });
  told("stat:1:eio", Errc::kNotFound, a, [&] { return of(ReadWholeText(a, 9)); });
  told("stat:2:eio", Errc::kNotFound, a, [&] { return of(ReadWholeFile(a, 9)); });
  told("read:1:eio", Errc::kNotFound, a, [&] { return of(ReadWholeFile(a, 9)); });
  told("stat:1:eio", Errc::kNotFound, a + ".tmp", [&] { return ReplaceFile(a, "new"); });
  told("open:3:eio", Errc::kNotFound, d + "/sub", [&] { return of(WalkTree(d)); });
  const std::string top = root_.substr(0, root_.find('/', 1));
  told("mkdir:1+:eio,stat:1+:eio", Errc::kIo, top, [&] { return MakeDirs(At("x/y")); });
  told("stat:1:eio", Errc::kNotFound, d, [&] { return RemoveTree(d, root_); });
  told("stat:3:eio", Errc::kNotFound, root_, [&] { return RemoveTree(d, root_); });
  told("open:1:eio", Errc::kIo, d, [&] { return RemoveTree(d, root_); });
  told("list:1:eio", Errc::kIo, d, [&] { return RemoveTree(d, root_); });
  told("list:2:eio", Errc::kIo, d, [&] { return RemoveTree(d, root_); });
  told("unlink:1+:eio,rmdir:1+:eio", Errc::kIo, a, [&] {
    // The names come in the order of the folder.
    Status status = RemoveTree(d, root_);
    if (status) return status;
    if (status.error().message.rfind(a, 0) != 0)
      status.error().message = a + ": " + status.error().message;
    return status;
  });
  EXPECT_EQ(Contents(), before);
  EXPECT_FALSE(ExpectDir(a));
  EXPECT_EQ(ExpectDir(At("no")).error().message, At("no") + ": no such folder");
  EXPECT_EQ(RemoveFile(At("no")).error().sys, ENOENT);
  const ScopedFault fault(
      *ParseFault("sync:1:einval"));  // a file system that does not need to sync folders
  EXPECT_TRUE(SyncDir(d));
}

TEST_F(DirTest, ATreeWhoseFoldersStayIsNotSaidToBeRemoved) {
  for (const char* const spec : {"rmdir:1:eio", "rmdir:2:eio", "open:2:eio"}) {
    ASSERT_TRUE(MakeDirs(At("t/sub")));
    const ScopedFault fault(*ParseFault(spec));
    EXPECT_EQ(RemoveTree(At("t"), root_).error().code, Errc::kIo) << spec;
    EXPECT_TRUE(fault.fired()) << spec;
    EXPECT_TRUE(*IsDir(At("t"))) << spec;
  }
}

TEST_F(DirTest, AFileOfTheWorkingFolderIsReplaced) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(root_);
  const Status status = ReplaceFile("a", "new");
  std::filesystem::current_path(before);
  ASSERT_TRUE(status) << status.error().message;
  EXPECT_EQ(Get("a"), "new");
}

TEST_F(DirTest, AReplacementThatFailsLeavesNothingBeside) {
  Put("a", "old");
  const ScopedFault fault(*ParseFault("rename:1:eio"));
  EXPECT_EQ(ReplaceFile(At("a"), "new").error().code, Errc::kIo);
  EXPECT_EQ(Contents(), (Files{{"a", "old"}}));
}

TEST_F(DirTest, ExchangeSwapsDirectories) {
  Put("a/x", "1");
  Put("b/y", "2");
  const auto done = Here().Exchange("a", "b");
  ASSERT_TRUE(done);
  if (!*done) GTEST_SKIP() << "the file system cannot exchange names";
  EXPECT_EQ(Contents(), (Files{{"a", "/"}, {"a/y", "2"}, {"b", "/"}, {"b/x", "1"}}));
}

TEST_F(DirTest, RemoveTreeStaysInsideItsRootAndFollowsNoLink) {
  Put("keep/precious", "1");
  Put("work/t/a/b", "");
  ASSERT_EQ(::symlink(At("keep").c_str(), At("work/t/link").c_str()), 0);
  ASSERT_EQ(::symlink(At("keep").c_str(), At("work/link").c_str()), 0);
  EXPECT_EQ(RemoveTree(At("keep"), At("work")).error().code, Errc::kUsage);
  EXPECT_EQ(RemoveTree(At("work/../keep"), At("work")).error().code, Errc::kUsage);
  EXPECT_EQ(RemoveTree(At("work/link/precious"), At("work")).error().code, Errc::kUsage);
  EXPECT_EQ(RemoveTree(At("work"), At("work")).error().code, Errc::kUsage);
  EXPECT_EQ(RemoveTree(At("work/t/.."), At("work")).error().code, Errc::kUsage);
  EXPECT_EQ(RemoveTree(At("work/t"), At("wor")).error().code, Errc::kNotFound);
  ASSERT_TRUE(MakeDir(At("wor")));
  EXPECT_EQ(RemoveTree(At("work/t"), At("wor")).error().code, Errc::kUsage);
  ASSERT_TRUE(RemoveTree(At("wor"), root_));
  EXPECT_TRUE(RemoveTree(At("work/t"), At("work")));
  EXPECT_TRUE(RemoveTree(At("work/link"), At("work")));
  EXPECT_TRUE(RemoveTree(At("work/absent"), At("work")));
  EXPECT_EQ(Contents(), (Files{{"keep", "/"}, {"keep/precious", "1"}, {"work", "/"}}));
}

TEST_F(DirTest, RemoveTreeRefusesAbsurdDepth) {
  std::string deep = At("t");
  for (int i = 0; i < kTreeDepth + 2; ++i) deep += "/d";
  ASSERT_TRUE(MakeDirs(deep));
  EXPECT_EQ(RemoveTree(At("t"), root_).error().code, Errc::kLimit);
  EXPECT_EQ(WalkTree(At("t")).error().code, Errc::kLimit);
  EXPECT_EQ(WalkTree(At("t/d")).error().code, Errc::kLimit);
  EXPECT_TRUE(WalkTree(At("t/d/d")));
}

TEST_F(DirTest, HardLinkSharesAndNeverReplaces) {
  Put("a", "data");
  const Directory here = Here();
  const File a = *File::OpenRead(At("a"));
  ASSERT_TRUE(here.HardLink(At("a"), a, "b"));
  EXPECT_EQ(File::OpenRead(At("a"))->Stat()->inode, File::OpenRead(At("b"))->Stat()->inode);
  EXPECT_EQ((*here.Look("b"))->links, 2U);
  ASSERT_EQ(::symlink("a", At("symlink").c_str()), 0);
  ASSERT_TRUE(here.HardLink(At("symlink"), a, "d"));
  EXPECT_EQ((*here.Look("d"))->links, 3U);
  Put("c", "other");
  EXPECT_EQ(here.HardLink(At("a"), a, "c").error().code, Errc::kBusy);
  EXPECT_EQ(Get("c"), "other");
  EXPECT_EQ(here.HardLink(At("absent"), a, "e").error().code, Errc::kNotFound);
  // Another file has replaced the path since it was opened.
  EXPECT_EQ(here.HardLink(At("c"), a, "e").error().code, Errc::kNotFound);
  EXPECT_FALSE(*here.Exists("e"));
}

TEST_F(DirTest, HardLinkNeverCopiesInstead) {
  Put("a", "data");
  const Directory here = Here();
  const File a = *File::OpenRead(At("a"));
  {
    const ScopedFault fault(*ParseFault("link:1:eacces"));
    EXPECT_EQ(here.HardLink(At("a"), a, "b").error().code, Errc::kUnsupported);
  }
  EXPECT_EQ(here.HardLink("/proc/self/status", a, "b").error().code,
            Errc::kUnsupported);  // EXDEV
  const ScopedFault fault(*ParseFault("link:1:enospc"));
  EXPECT_EQ(here.HardLink(At("a"), a, "b").error().code, Errc::kIo);
  EXPECT_FALSE(*Exists(At("b")));
}

TEST_F(DirTest, CloneSaysWhetherItCould) {
  Put("a", "data");
  const auto from = File::OpenRead(At("a"));
  const auto to = File::Create(At("b"));
  const Result<bool> cloned = CloneInto(*from, *to);
  ASSERT_TRUE(cloned) << cloned.error().message;
  EXPECT_EQ(Get("b"), *cloned ? "data" : "");
  const ScopedFault fault(*ParseFault("clone:1:enospc"));
  EXPECT_EQ(CloneInto(*from, *to).error().sys, ENOSPC);
}

TEST_F(DirTest, ResolvedPathsEndWhereLinksLead) {
  Put("a", "data");
  ASSERT_EQ(::symlink("a", At("link").c_str()), 0);
  ASSERT_EQ(::symlink("loop", At("loop").c_str()), 0);
  EXPECT_EQ(*ResolvePath(At("link")), *ResolvePath(At("a")));
  EXPECT_EQ(*ResolvePath(At("loop")), "");
  EXPECT_EQ(*ResolvePath(At("absent")), "");
  const ScopedFault fault(*ParseFault("stat:1:eio"));
  EXPECT_EQ(ResolvePath(At("a")).error().sys, EIO);
}

TEST_F(DirTest, WholeFilesRoundTripWithinTheirCap) {
  ASSERT_TRUE(Here().WriteWholeFile("a", "hello"));
  EXPECT_EQ(*ReadWholeText(At("a"), 5), "hello");
  const auto over = ReadWholeFile(At("a"), 4);
  EXPECT_EQ(over.error().code, Errc::kLimit);
  EXPECT_EQ(over.error().message, At("a") + ": 4 bytes at most, found 5");
  EXPECT_EQ(Here().WriteWholeFile("a", "again").error().code, Errc::kBusy);
  EXPECT_EQ(Get("a"), "hello");
}

TEST_F(DirTest, FailedWholeFileLeavesNothing) {
  for (const std::string spec : {"write:1:enospc", "sync:1:eio"}) {
    const ScopedFault fault(*ParseFault(spec));
    EXPECT_EQ(Here().WriteWholeFile("a", "hello").error().code, Errc::kIo) << spec;
    EXPECT_TRUE(Contents().empty()) << spec;
  }
}

TEST_F(DirTest, ReplaceShowsOldOrNewAtEveryFault) {
  bool fired = true;
  for (int call = 1; fired; ++call) {
    Put("a", "old");
    const ScopedFault fault(*ParseFault("any:" + std::to_string(call) + ":eio"));
    const Status status = ReplaceFile(At("a"), "new");
    fired = fault.fired();
    EXPECT_EQ(static_cast<bool>(status), !fired);
    const std::string found = Get("a");
    EXPECT_TRUE(found == "old" || found == "new") << call << ": " << found;
    if (status) {
      EXPECT_EQ(found, "new");
    }
    ASSERT_LT(call, 50);
  }
  Put("a.tmp", "left by a kill");
  EXPECT_TRUE(ReplaceFile(At("a"), "newer"));
  EXPECT_EQ(Contents(), (Files{{"a", "newer"}}));
}

TEST_F(DirTest, AsksForSpaceAndAccess) {
  EXPECT_GT(FreeSpaceAt(root_)->bytes, 0U);
  EXPECT_EQ(FreeSpaceAt("/proc")->bytes, std::nullopt);  // it has no blocks
  EXPECT_EQ(FreeSpaceAt("/proc")->files, std::nullopt);
  EXPECT_EQ(FreeSpaceAt(At("absent")).error().code, Errc::kNotFound);
  EXPECT_TRUE(*IsWritable(root_));
  EXPECT_EQ(IsWritable(At("absent")).error().code, Errc::kNotFound);
  const ScopedFault fault(*ParseFault("stat:1:erofs"));
  EXPECT_FALSE(*IsWritable(root_));
}

// Space that only root may use is not free.
TEST_F(DirTest, FreeSpaceIsThatOfEveryUser) {
  for (const std::string& path : std::vector<std::string>{root_, ".", "/", "/var/tmp"}) {
    struct statvfs info {};
    if (::statvfs(path.c_str(), &info) != 0 || info.f_bfree - info.f_bavail < 1000) continue;
    const std::uint64_t all = std::uint64_t{info.f_bfree} * info.f_frsize;
    const std::uint64_t available = std::uint64_t{info.f_bavail} * info.f_frsize;
    EXPECT_LT(FreeSpaceAt(path)->bytes, available + (all - available) / 2)
        << path;  // others write too
    return;
  }
  GTEST_SKIP() << "no file system keeps blocks for root";
}

TEST_F(DirTest, SyncFileNamesTheFile) {
  Put("a", "");
  const Directory here = Here();
  EXPECT_TRUE(here.SyncFile("a"));
  const ScopedFault fault(*ParseFault("sync:1:eio"));
  EXPECT_EQ(here.SyncFile("a").error().message.rfind(At("a") + ": cannot sync", 0), 0U);
}

}  // namespace
}  // namespace shardwright::os
