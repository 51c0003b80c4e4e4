#include "os/dir.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "os/fault.h"
#include "scratch.h"

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

TEST_F(DirTest, AReplacementThatFailsLeavesNothingBeside) {
  Put("a", "old");
  const ScopedFault fault(*ParseFault("rename:1:eio"));
  EXPECT_EQ(ReplaceFile(At("a"), "new").error().code, Errc::kIo);
  EXPECT_EQ(Contents(), (Files{{"a", "old"}}));
}

TEST_F(DirTest, ExchangeSwapsDirectories) {
  Put("a/x", "1");
  Put("b/y", "2");
  const auto done = Exchange(At("a"), At("b"));
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
  ASSERT_TRUE(HardLink(At("a"), At("b")));
  EXPECT_EQ(File::OpenRead(At("a"))->Stat()->inode, File::OpenRead(At("b"))->Stat()->inode);
  EXPECT_EQ(*LinkCount(At("b")), 2U);
  ASSERT_EQ(::symlink("a", At("symlink").c_str()), 0);
  ASSERT_TRUE(HardLink(At("symlink"), At("d")));
  EXPECT_EQ(*LinkCount(At("d")), 3U);
  Put("c", "other");
  EXPECT_EQ(HardLink(At("a"), At("c")).error().code, Errc::kBusy);
  EXPECT_EQ(Get("c"), "other");
  EXPECT_EQ(HardLink(At("absent"), At("e")).error().code, Errc::kNotFound);
}

TEST_F(DirTest, HardLinkNeverCopiesInstead) {
  Put("a", "data");
  {
    const ScopedFault fault(*ParseFault("link:1:eacces"));
    EXPECT_EQ(HardLink(At("a"), At("b")).error().code, Errc::kUnsupported);
  }
  const ScopedFault fault(*ParseFault("link:1:enospc"));
  EXPECT_EQ(HardLink(At("a"), At("b")).error().code, Errc::kIo);
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

TEST_F(DirTest, RealPathEndsWhereLinksLead) {
  Put("a", "data");
  ASSERT_EQ(::symlink("a", At("link").c_str()), 0);
  ASSERT_EQ(::symlink("loop", At("loop").c_str()), 0);
  EXPECT_EQ(RealPath(At("link")), RealPath(At("a")));
  EXPECT_EQ(RealPath(At("loop")), "");
  EXPECT_EQ(RealPath(At("absent")), "");
}

TEST_F(DirTest, WholeFilesRoundTripWithinTheirCap) {
  ASSERT_TRUE(WriteWholeFile(At("a"), "hello"));
  EXPECT_EQ(*ReadWholeText(At("a"), 5), "hello");
  const auto over = ReadWholeFile(At("a"), 4);
  EXPECT_EQ(over.error().code, Errc::kLimit);
  EXPECT_EQ(over.error().message, At("a") + ": 4 bytes at most, found 5");
  EXPECT_EQ(WriteWholeFile(At("a"), "again").error().code, Errc::kBusy);
  EXPECT_EQ(Get("a"), "hello");
}

TEST_F(DirTest, FailedWholeFileLeavesNothing) {
  for (const std::string spec : {"write:1:enospc", "sync:1:eio"}) {
    const ScopedFault fault(*ParseFault(spec));
    EXPECT_EQ(WriteWholeFile(At("a"), "hello").error().code, Errc::kIo) << spec;
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
  EXPECT_GT(*FreeBytes(root_), 0U);
  EXPECT_EQ(FreeBytes(At("absent")).error().code, Errc::kNotFound);
  EXPECT_TRUE(*IsWritable(root_));
  EXPECT_EQ(IsWritable(At("absent")).error().code, Errc::kNotFound);
  const ScopedFault fault(*ParseFault("stat:1:erofs"));
  EXPECT_FALSE(*IsWritable(root_));
}

TEST_F(DirTest, SyncFilesNamesTheOneThatFails) {
  Put("a", "");
  Put("b", "");
  const std::vector<std::string> paths = {At("a"), At("b")};
  EXPECT_TRUE(SyncFiles(paths));
  const ScopedFault fault(*ParseFault("sync:2:eio"));
  const Status status = SyncFiles(paths);
  EXPECT_EQ(status.error().message.rfind(At("b") + ": cannot sync", 0), 0U);
  EXPECT_EQ(fault.Count(Op::kSync), 2U);
}

}  // namespace
}  // namespace shardwright::os
