// SPDX-License-Identifier: Apache-2.0
#include "support/os/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <limits>

#include "scratch.h"
#include "support/os/dir.h"
#include "support/os/directory.h"
#include "support/os/fault.h"

namespace shardwright::os {
namespace {

using FileTest = Scratch;

FaultRule Rule(const std::string& spec) {
  auto rule = ParseFault(spec);
  EXPECT_TRUE(rule) << rule.error().message;
  return *rule;
}

TEST_F(FileTest, WritesAndReadsAtOffsets) {
  auto file = File::Create(At("a"));
  ASSERT_TRUE(file);
  ASSERT_TRUE(file->WriteAt(4, AsBytes("tail")));
  ASSERT_TRUE(file->WriteAt(0, AsBytes("head")));
  ASSERT_TRUE(file->Sync());
  std::string text(8, '?');
  ASSERT_TRUE(file->ReadAt(0, std::as_writable_bytes(std::span(text))));
  EXPECT_EQ(text, "headtail");
  EXPECT_EQ(Get("a"), "headtail");
}

TEST_F(FileTest, ReadBeyondTheEndIsBadInputAndSaysWhereItEnds) {
  Put("a", "12345");
  auto file = File::OpenRead(At("a"));
  ASSERT_TRUE(file);
  std::vector<std::byte> out(4);
  const Status status = file->ReadAt(3, out);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Errc::kBadInput);
  EXPECT_EQ(status.error().message, At("a") + ": 4 bytes expected at offset 3, the file ends at 5");
  EXPECT_EQ(file->ReadAt(std::numeric_limits<std::uint64_t>::max(), out).error().code,
            Errc::kBadInput);
  EXPECT_TRUE(file->ReadAt(5, {}));
  constexpr auto kLast = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  EXPECT_TRUE(file->ReadAt(kLast, {}));
  EXPECT_FALSE(file->ReadAt(kLast + 1, {}));
}

TEST_F(FileTest, CreateNeverReplaces) {
  Put("a", "old");
  const auto file = File::Create(At("a"));
  ASSERT_FALSE(file);
  EXPECT_EQ(file.error().code, Errc::kBusy);
  EXPECT_EQ(file.error().sys, EEXIST);
  EXPECT_EQ(Get("a"), "old");
}

TEST_F(FileTest, OpensOnlyRegularFiles) {
  ASSERT_EQ(::mkfifo(At("pipe").c_str(), 0600), 0);
  for (const std::string& path : {At("absent"), At(""), At("pipe"), std::string("/dev/null")}) {
    const auto read = File::OpenRead(path);
    ASSERT_FALSE(read) << path;
    EXPECT_EQ(read.error().code, Errc::kNotFound) << path;
    const auto write = File::OpenWrite(path);
    ASSERT_FALSE(write) << path;
    EXPECT_EQ(write.error().code, Errc::kNotFound) << path;
  }
  EXPECT_EQ(File::Create(At("no/dir")).error().code, Errc::kIo);
}

TEST_F(FileTest, AllocateSetsTheSizeBothWays) {
  auto file = File::Create(At("a"));
  ASSERT_TRUE(file);
  for (const std::uint64_t bytes : std::initializer_list<std::uint64_t>{10'000, 100, 0, 7}) {
    ASSERT_TRUE(file->Allocate(bytes));
    EXPECT_EQ(file->Stat()->bytes, bytes);
  }
  const Status status = file->Allocate(std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(status.error().code, Errc::kIo);
  EXPECT_EQ(status.error().sys, EFBIG);
  EXPECT_EQ(file->Stat()->bytes, 7U);
}

TEST_F(FileTest, IdentityChangesWithTheContent) {
  Put("a", "one");
  Put("b", "one");
  const Identity a = *File::OpenRead(At("a"))->Stat();
  EXPECT_EQ(a, *File::OpenRead(At("a"))->Stat());
  EXPECT_NE(a, *File::OpenRead(At("b"))->Stat());
  Put("a", "longer");
  EXPECT_NE(a, *File::OpenRead(At("a"))->Stat());
}

TEST_F(FileTest, IdentityKnowsNanosecondsAndWhatMayBeRun) {
  EXPECT_FALSE(*File::Create(At("a"))->IsExecutable());
  EXPECT_TRUE(*File::Create(At("b"), true)->IsExecutable());
  for (const long ns : {1, 2}) {
    const struct timespec times[2] = {{1'000, ns}, {1'000, ns}};
    ASSERT_EQ(::utimensat(AT_FDCWD, At("a").c_str(), times, 0), 0);
    EXPECT_EQ(File::OpenRead(At("a"))->Stat()->mtime_ns, 1'000'000'000'000 + ns);
  }
}

TEST_F(FileTest, NothingIsWrittenBeyondTheLargestOffset) {
  auto file = File::Create(At("a"));
  ASSERT_TRUE(file);
  const Status status =
      file->WriteAt(std::numeric_limits<std::uint64_t>::max() - 8, AsBytes("data"));
  EXPECT_EQ(status.error().sys, EFBIG);
  EXPECT_EQ(file->Stat()->bytes, 0U);
}

TEST_F(FileTest, ShortAndInterruptedCallsAreContinued) {
  for (const std::string spec :
       {"write:1+:short", "write:2:eintr", "read:1+:short", "read:1:eintr"}) {
    std::filesystem::remove(At("a"));
    auto file = File::Create(At("a"));
    ASSERT_TRUE(file);
    std::string text(1000, '?');
    {
      const ScopedFault fault(Rule(spec));
      ASSERT_TRUE(file->WriteAt(0, AsBytes(std::string(500, 'x')))) << spec;
      ASSERT_TRUE(file->WriteAt(500, AsBytes(std::string(500, 'y')))) << spec;
      ASSERT_TRUE(file->ReadAt(0, std::as_writable_bytes(std::span(text)))) << spec;
      EXPECT_TRUE(fault.fired()) << spec;
      EXPECT_GT(fault.Count(Op::kRead) + fault.Count(Op::kWrite), 3U) << spec;
    }
    EXPECT_EQ(text, std::string(500, 'x') + std::string(500, 'y')) << spec;
  }
}

TEST_F(FileTest, EveryFailingCallBecomesAnErrorWithErrno) {
  auto file = File::Create(At("a"));
  ASSERT_TRUE(file && file->WriteAt(0, AsBytes("data")));
  const auto expect = [&](const std::string& spec, int sys, const std::function<Status()>& call) {
    const ScopedFault fault(Rule(spec));
    const Status status = call();
    ASSERT_FALSE(status) << spec;
    EXPECT_EQ(status.error().code, Errc::kIo) << spec;
    EXPECT_EQ(status.error().sys, sys) << spec;
    EXPECT_EQ(status.error().message.rfind(At("a") + ": ", 0), 0U) << status.error().message;
  };
  expect("write:1:enospc", ENOSPC, [&] { return file->WriteAt(0, AsBytes("x")); });
  const auto allocates = [&] {  // not in memory, where it would only take time
    const ScopedFault fault(Rule("allocate:2:enospc"));
    return file->Allocate(9) && fault.Count(Op::kAllocate) > 0;
  };
  if (allocates()) expect("allocate:1:enospc", ENOSPC, [&] { return file->Allocate(18); });
  expect("truncate:1:edquot", EDQUOT, [&] { return file->Allocate(9); });
  expect("sync:1:eio", EIO, [&] { return file->Sync(); });
  expect("sync:1:eintr", EINTR, [&] { return file->Sync(); });  // never retried
  EXPECT_EQ(Get("a").substr(0, 4), "data");
  std::vector<std::byte> out(4);
  const ScopedFault fault(Rule("read:1:eio"));
  EXPECT_EQ(file->ReadAt(0, out).error().code, Errc::kNotFound);
}

TEST_F(FileTest, SpaceIsReservedOnlyWhereTheFileSystemCan) {
  constexpr std::uint64_t kBytes = std::uint64_t{1} << 20;
  const auto file = File::Create(At("a"));
  ASSERT_TRUE(file);
  EXPECT_TRUE(file->Reserve(10));
  EXPECT_EQ(file->Stat()->bytes, 0U) << "small files are written soon after";
  {
    const ScopedFault fault(Rule("allocate:1+:einval"));
    EXPECT_TRUE(file->Reserve(kBytes));
    EXPECT_EQ(file->Stat()->bytes, 0U);
  }
  const ScopedFault fault(Rule("allocate:1+:enospc"));
  const Status full = file->Reserve(kBytes);
  if (fault.fired()) {  // not in memory, where it would only take time
    ASSERT_FALSE(full);
    EXPECT_EQ(full.error().sys, ENOSPC);
  } else {
    EXPECT_TRUE(full);
  }
}

TEST_F(FileTest, WhatCannotBeLookedAtIsNotOpened) {
  Put("a", "data");
  const auto file = File::OpenRead(At("a"));
  ASSERT_TRUE(file);
  {
    const ScopedFault fault(Rule("stat:1+:eio"));
    EXPECT_EQ(File::OpenRead(At("a")).error().sys, EIO);
    EXPECT_EQ(file->Stat().error().sys, EIO);
    EXPECT_EQ(file->IsExecutable().error().sys, EIO);
    std::vector<std::byte> out(4);
    EXPECT_EQ(file->ReadAt(std::numeric_limits<std::uint64_t>::max(), out).error().sys, EIO);
  }
  const ScopedFault fault(Rule("open:1+:eacces"));
  EXPECT_EQ(File::OpenRead(At("a")).error().code, Errc::kNotFound);
  EXPECT_EQ(File::OpenWrite(At("a")).error().code, Errc::kIo);
  EXPECT_EQ(Directory::Open(root_).error().code, Errc::kNotFound);
}

TEST_F(FileTest, AFileThatTakesTheNameOfAnotherLetsItGo) {
  auto a = File::Create(At("a"));
  auto b = File::Create(At("b"));
  ASSERT_TRUE(a && b);
  *a = std::move(*b);
  EXPECT_EQ(a->path(), At("b"));
  ASSERT_TRUE(a->WriteAt(0, AsBytes("x")));
  EXPECT_EQ(Get("a"), "");
  EXPECT_EQ(Get("b"), "x");
}

TEST_F(FileTest, AFileSystemIsSyncedWholeAndSaysWhatFailed) {
  const Directory system = Here();
  const ScopedFault fault(
      Rule("sync:1:eio"));  // not really: that would wait for all that others write
  const Status status = system.SyncFileSystem();
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().message.rfind(root_ + ": cannot sync the file system", 0), 0U);
}

TEST_F(FileTest, OnlyKnownFileSystemsAreSyncedAsAWhole) {
  EXPECT_FALSE(Directory::Open("/proc")->CanSyncFileSystem());
  EXPECT_TRUE(Directory::Open("/dev/shm")->CanSyncFileSystem());  // tmpfs, since Linux 5.8
}

TEST_F(FileTest, ACloseReportsWhatCouldNotBeStored) {
  auto file = File::Create(At("a"));
  ASSERT_TRUE(file);
  {
    const ScopedFault fault(Rule("close:1:edquot"));
    const Status closed = file->Close();
    ASSERT_FALSE(closed);
    EXPECT_EQ(closed.error().code, Errc::kIo);
    EXPECT_EQ(closed.error().sys, EDQUOT);
  }
  EXPECT_FALSE(file->is_open());
  const ScopedFault fault(Rule("close:1:eio"));
  EXPECT_EQ(ReplaceFile(At("b"), std::string_view("text")).error().sys, EIO);
  EXPECT_EQ(Contents().size(), 1U) << "the temporary file of b is left";
}

TEST_F(FileTest, PagesLeaveMemoryWhereTheFileSystemLetsThem) {
  for (const std::string& folder : std::vector<std::string>{"/dev/shm", "/var/tmp"}) {
    const std::string path = folder + "/sw-file-" + std::to_string(::getpid());
    const auto file = File::Create(path);
    ASSERT_TRUE(file);
    ASSERT_EQ(::unlink(path.c_str()), 0);
    ASSERT_TRUE(file->WriteAt(0, AsBytes(std::string(100'000, 'x'))));
    ASSERT_TRUE(file->Sync());
    const bool left = file->DropCache();
    if (folder == "/dev/shm") {
      EXPECT_FALSE(left) << "memory is all that tmpfs has";
    }
    std::vector<std::byte> out(4);
    ASSERT_TRUE(file->ReadAt(99'996, out));
    EXPECT_EQ(out[0], std::byte{'x'});
  }
}

// In memory nothing is reserved, so the file is made elsewhere if there is such a place.
TEST_F(FileTest, AFullDiskIsToldWhenRoomIsReserved) {
  for (const std::string& folder : std::vector<std::string>{root_, "/var/tmp", "."}) {
    const std::string path = folder + "/sw-file-" + std::to_string(::getpid());
    const auto file = File::Create(path);
    if (!file) continue;
    ASSERT_EQ(::unlink(path.c_str()), 0);
    const ScopedFault fault(Rule("allocate:1:enospc"));
    const Status status = file->Allocate(18);
    if (!fault.fired()) continue;
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().sys, ENOSPC);
    return;
  }
  GTEST_SKIP() << "no folder outside of memory";
}

}  // namespace
}  // namespace shardwright::os
