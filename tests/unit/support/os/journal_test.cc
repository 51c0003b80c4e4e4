// SPDX-License-Identifier: Apache-2.0
#include "support/os/journal.h"

#include <set>
#include <thread>

#include "scratch.h"
#include "support/os/fault.h"
#include "unit/complexity.h"

namespace shardwright::os {
namespace {

using JournalTest = Scratch;

Fingerprint Print(int seed) {
  Fingerprint print{};
  for (std::size_t i = 0; i < print.size(); ++i) {
    print[i] = static_cast<std::byte>(seed + static_cast<int>(i));
  }
  return print;
}

std::vector<std::string> Texts(const JournalRecords& records) {
  std::vector<std::string> texts;
  for (const auto& record : records.records) texts.push_back(AsText(record));
  return texts;
}

TEST_F(JournalTest, ContinuesWhereItStopped) {
  {
    auto journal = Journal::Open(Here(), "j", Print(1));
    ASSERT_TRUE(journal);
    EXPECT_TRUE(journal->found().records.empty());
    ASSERT_TRUE(journal->Append(AsBytes("one")));
    ASSERT_TRUE(journal->Append({}));
    ASSERT_TRUE(journal->Sync());
  }
  {
    auto journal = Journal::Open(Here(), "j", Print(1));
    ASSERT_TRUE(journal);
    EXPECT_EQ(Texts(journal->found()), (std::vector<std::string>{"one", ""}));
    ASSERT_TRUE(journal->Append(AsBytes("three")));
  }
  const std::vector<std::string> paths = {"j"};
  const auto read = ReadJournals(Here(), paths, Print(1));
  ASSERT_TRUE(read);
  EXPECT_EQ(Texts(*read), (std::vector<std::string>{"one", "", "three"}));
  EXPECT_EQ(read->torn_bytes, 0U);
}

TEST_F(JournalTest, HeadersAreSyncedAndRecordsWhenAsked) {
  const ScopedFault calls;
  auto journal = Journal::Open(Here(), "j", Print(1));
  ASSERT_TRUE(journal);
  EXPECT_EQ(calls.Count(Op::kSync), 1U);
  ASSERT_TRUE(journal->Append(AsBytes("one")));
  EXPECT_EQ(calls.Count(Op::kSync), 1U);
  ASSERT_TRUE(journal->Sync());
  EXPECT_EQ(calls.Count(Op::kSync), 2U);
}

TEST_F(JournalTest, TheFormatIsWhatTheHeaderSays) {
  auto journal = Journal::Open(Here(), "j", Print(0));
  ASSERT_TRUE(journal && journal->Append(AsBytes("abc")));
  std::string expected = "SWJOURNL";
  expected += std::string("\x01\0\0\0\0\0\0\0", 8);
  for (char i = 0; i < 16; ++i) expected += i;
  expected += std::string("\x03\0\0\0", 4);
  // zlib.crc32(b"\x03\0\0\0abc")
  expected += std::string("\063\135\341\146", 4);
  expected += "abc";
  EXPECT_EQ(Get("j"), expected);
}

TEST_F(JournalTest, EveryCutKeepsTheWholeRecordsAndCanGoOn) {
  {
    auto journal = Journal::Open(Here(), "whole", Print(1));
    ASSERT_TRUE(journal && journal->Append(AsBytes("first")) && journal->Append(AsBytes("second")));
  }
  const std::string whole = Get("whole");
  const std::size_t first_end = 32 + 8 + 5;
  for (std::size_t cut = 0; cut <= whole.size(); ++cut) {
    Put("j", whole.substr(0, cut));
    std::vector<std::string> expected;
    if (cut >= first_end) expected.push_back("first");
    if (cut == whole.size()) expected.push_back("second");
    {
      auto journal = Journal::Open(Here(), "j", Print(1));
      ASSERT_TRUE(journal) << cut << journal.error().message;
      EXPECT_EQ(Texts(journal->found()), expected) << cut;
      ASSERT_TRUE(journal->Append(AsBytes("x")));
    }
    expected.push_back("x");
    const std::vector<std::string> paths = {"j"};
    EXPECT_EQ(Texts(*ReadJournals(Here(), paths, Print(1))), expected) << cut;
    EXPECT_EQ(ReadJournals(Here(), paths, Print(1))->torn_bytes, 0U) << cut;
  }
}

// A power failure before the header is synced leaves any bytes in its place.
TEST_F(JournalTest, AGarbledHeaderIsWrittenAgain) {
  for (const unsigned bytes : {1U, 8U, 31U, 32U}) {
    Put("j", std::string(bytes, '\xa5'));
    const std::vector<std::string> paths = {"j"};
    EXPECT_EQ(ReadJournals(Here(), paths, Print(1))->torn_bytes, bytes);
    {
      auto journal = Journal::Open(Here(), "j", Print(1));
      ASSERT_TRUE(journal) << journal.error().message;
      EXPECT_TRUE(journal->found().records.empty());
      ASSERT_TRUE(journal->Append(AsBytes("one")));
    }
    EXPECT_EQ(Texts(*ReadJournals(Here(), paths, Print(1))), (std::vector<std::string>{"one"}));
  }
}

TEST_F(JournalTest, AChangedBitOrATailOfZerosEndsTheJournal) {
  {
    auto journal = Journal::Open(Here(), "j", Print(1));
    ASSERT_TRUE(journal && journal->Append(AsBytes("first")) && journal->Append(AsBytes("second")));
  }
  const std::string whole = Get("j");
  const std::vector<std::string> paths = {"j"};
  for (std::size_t at = 32 + 8 + 5; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x10);
    Put("j", changed);
    EXPECT_EQ(Texts(*ReadJournals(Here(), paths, Print(1))), (std::vector<std::string>{"first"}))
        << at;
  }
  Put("j", whole + std::string(4096, '\0'));
  EXPECT_EQ(ReadJournals(Here(), paths, Print(1))->records.size(), 2U);
  EXPECT_EQ(ReadJournals(Here(), paths, Print(1))->torn_bytes, 4096U);
}

TEST_F(JournalTest, RefusesWhatIsNotItsOwn) {
  { ASSERT_TRUE(Journal::Open(Here(), "j", Print(1))); }
  EXPECT_EQ(Journal::Open(Here(), "j", Print(2)).error().code, Errc::kMismatch);
  std::string other = Get("j");
  other[8] = 2;
  Put("j", other);
  EXPECT_EQ(Journal::Open(Here(), "j", Print(1)).error().code, Errc::kUnsupported);
  for (const unsigned bytes : {33U, 100U}) {
    const std::string text(bytes, 'x');
    Put("j", text);
    EXPECT_EQ(Journal::Open(Here(), "j", Print(1)).error().code, Errc::kBadInput);
    EXPECT_EQ(Get("j"), text);
  }
  const std::vector<std::string> absent = {"absent"};
  EXPECT_EQ(ReadJournals(Here(), absent, Print(1)).error().code, Errc::kNotFound);
}

TEST_F(JournalTest, TakesTimeInProportionToItsRecords) {
  const auto make = [&](std::size_t n) {
    std::string name = "j" + std::to_string(n);
    auto journal = Journal::Open(Here(), name, Print(1));
    EXPECT_TRUE(journal);
    for (std::size_t i = 0; i < n; ++i) EXPECT_TRUE(journal->Append(AsBytes(Digits(i))));
    return name;
  };
  const auto parse = [&](const std::string& name) {
    const auto read = ReadJournals(Here(), std::vector<std::string>{name}, Print(1));
    ASSERT_TRUE(read) << read.error().message;
    ASSERT_EQ(read->torn_bytes, 0U);
  };
  ExpectLinear(5'000, make, parse);
}

TEST_F(JournalTest, NothingFollowsAFailedWrite) {
  auto journal = Journal::Open(Here(), "j", Print(1));
  ASSERT_TRUE(journal && journal->Append(AsBytes("kept")));
  {
    const ScopedFault fault(*ParseFault("write:1:enospc"));
    EXPECT_EQ(journal->Append(AsBytes("lost")).error().sys, ENOSPC);
  }
  EXPECT_EQ(journal->Append(AsBytes("after")).error().code, Errc::kIo);
  const std::vector<std::string> paths = {"j"};
  EXPECT_EQ(Texts(*ReadJournals(Here(), paths, Print(1))), (std::vector<std::string>{"kept"}));
  const std::vector<std::byte> huge(kJournalRecordBytes + 1);
  EXPECT_EQ(journal->Append(huge).error().code, Errc::kLimit);
}

TEST_F(JournalTest, NoSyncFollowsAFailedSync) {
  auto journal = Journal::Open(Here(), "j", Print(1));
  ASSERT_TRUE(journal && journal->Append(AsBytes("a")));
  {
    const ScopedFault fault(*ParseFault("sync:1:eio"));
    EXPECT_EQ(journal->Sync().error().sys, EIO);
  }
  const ScopedFault fault(*ParseFault("sync:1:eio"));
  EXPECT_TRUE(journal->Clear());
  EXPECT_FALSE(journal->Append(AsBytes("b")));
  const std::vector<std::string> paths = {"j"};
  EXPECT_TRUE(ReadJournals(Here(), paths, Print(1))->records.empty());
}

TEST_F(JournalTest, AFailedWriteDoesNotKeepClearFromSyncing) {
  auto journal = Journal::Open(Here(), "j", Print(1));
  ASSERT_TRUE(journal);
  {
    const ScopedFault fault(*ParseFault("write:1:enospc"));
    EXPECT_FALSE(journal->Append(AsBytes("a")));
  }
  const ScopedFault fault(*ParseFault("sync:1:eio"));
  EXPECT_EQ(journal->Clear().error().sys, EIO);
}

TEST_F(JournalTest, TakesNoMoreThanIsReadAgain) {
  constexpr std::uint64_t kMost = 32 + 2 * (8 + 5);
  {
    auto journal = Journal::Open(Here(), "j", Print(1), kMost);
    ASSERT_TRUE(journal && journal->Append(AsBytes("first")));
    EXPECT_EQ(journal->Append(AsBytes("larger")).error().code, Errc::kLimit);
    ASSERT_TRUE(journal->Append(AsBytes("whole")));  // a rejected record is not a failed write
    EXPECT_EQ(journal->Append({}).error().code, Errc::kLimit);
  }
  EXPECT_EQ(Texts(Journal::Open(Here(), "j", Print(1), kMost)->found()),
            (std::vector<std::string>{"first", "whole"}));
  EXPECT_EQ(Journal::Open(Here(), "j", Print(1), kMost - 1).error().code, Errc::kLimit);
}

TEST_F(JournalTest, EveryFailedCallIsToldAndTheNextOpenGoesOn) {
  {
    auto journal = Journal::Open(Here(), "whole", Print(1));
    ASSERT_TRUE(journal && journal->Append(AsBytes("first")));
  }
  const Directory here = Here();
  const std::string torn = Get("whole") + "torn";
  for (const std::string target : {"any", "open", "stat", "read"}) {
    for (const std::string& start : {std::string(), torn, torn.substr(0, 7)}) {
      bool fired = true;
      for (int call = 1; fired; ++call) {
        std::filesystem::remove(At("j"));
        if (!start.empty()) Put("j", start);
        {
          const ScopedFault fault(*ParseFault(target + ":" + std::to_string(call) + ":eio"));
          const auto journal = Journal::Open(here, "j", Print(1));
          fired = fault.fired();
          // Open fails if and only if the fault fired, also if space cannot be reserved.
          EXPECT_EQ(static_cast<bool>(journal), !fired) << target << call;
          if (!journal) {
            EXPECT_EQ(journal.error().sys, EIO) << target << call;
          }
        }
        const auto journal = Journal::Open(Here(), "j", Print(1));
        ASSERT_TRUE(journal) << target << call << journal.error().message;
        EXPECT_EQ(journal->found().records.size(), start == torn ? 1U : 0U) << target << call;
        ASSERT_LT(call, 20);
      }
    }
  }
}

TEST_F(JournalTest, ManyThreadsLoseNothing) {
  auto journal = Journal::Open(Here(), "j", Print(1));
  ASSERT_TRUE(journal);
  constexpr int kThreads = 4;
  constexpr int kEach = 200;
  {
    std::vector<std::thread> threads;
    threads.reserve(kThreads);
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kEach; ++i) {
          const std::string text = std::to_string(t) + ":" + std::to_string(i);
          EXPECT_TRUE(journal->Append(AsBytes(text)));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  const std::vector<std::string> paths = {"j"};
  const std::vector<std::string> texts = Texts(*ReadJournals(Here(), paths, Print(1)));
  EXPECT_EQ(texts.size(), std::size_t{kThreads} * kEach);
  EXPECT_EQ(std::set<std::string>(texts.begin(), texts.end()).size(), texts.size());
}

TEST_F(JournalTest, RanksAreReadInOrder) {
  for (const std::string name : {"r0", "r1"}) {
    auto journal = Journal::Open(Here(), name, Print(1));
    ASSERT_TRUE(journal && journal->Append(AsBytes(name + "a")) &&
                journal->Append(AsBytes(name + "b")));
  }
  const std::vector<std::string> paths = {"r1", "r0"};
  EXPECT_EQ(Texts(*ReadJournals(Here(), paths, Print(1))),
            (std::vector<std::string>{"r1a", "r1b", "r0a", "r0b"}));
}

}  // namespace
}  // namespace shardwright::os
