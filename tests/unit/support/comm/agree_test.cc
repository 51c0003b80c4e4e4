// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "support/comm/comm.h"
#include "support/comm/threads.h"

namespace shardwright::comm {
namespace {

/// Returns the status all ranks get when rank r brings brought[r]. Fails the test if they differ.
Status AgreeOn(const std::vector<Status>& brought) {
  const auto answers = RunThreads(static_cast<int>(brought.size()), [&](Comm& comm) {
    return comm.Agree(brought[static_cast<std::size_t>(comm.rank())]);
  });
  for (const Status& answer : answers) {
    EXPECT_EQ(static_cast<bool>(answer), static_cast<bool>(answers[0]));
    if (answer || answers[0]) continue;
    EXPECT_EQ(answer.error().code, answers[0].error().code);
    EXPECT_EQ(answer.error().message, answers[0].error().message);
    EXPECT_EQ(answer.error().sys, answers[0].error().sys);
    EXPECT_EQ(answer.error().rank, answers[0].error().rank);
  }
  return answers[0];
}

Status Bad(Errc code, const std::string& text, int sys = 0) { return FailErrno(code, sys, text); }

TEST(AgreeTest, HandsOnWhatARankMade) {
  for (const bool one_fails : {false, true}) {
    std::atomic<int> right = 0;
    RunThreads(3, [&](Comm& comm) -> Status {
      Result<int> mine = 10 + comm.rank();
      if (one_fails && comm.rank() == 1) mine = Fail(Errc::kIo, "disk");
      const Result<int> answer = comm.Agree(std::move(mine));
      if (one_fails) {
        right += !answer && answer.error().message == "disk" && answer.error().rank == 1 ? 1 : 0;
      } else {
        right += answer && *answer == 10 + comm.rank() ? 1 : 0;
      }
      return {};
    });
    EXPECT_EQ(right, 3) << one_fails;
  }
}

TEST(AgreeTest, SuccessNeedsEveryRank) {
  EXPECT_TRUE(AgreeOn({{}, {}, {}}));
  EXPECT_FALSE(AgreeOn({{}, {}, Bad(Errc::kIo, "disk")}));
}

TEST(AgreeTest, OneFailureKeepsItsWordsAndNamesItsRank) {
  const Status answer = AgreeOn({{}, {}, Bad(Errc::kIo, "a: cannot write", 28), {}});
  EXPECT_EQ(answer.error().code, Errc::kIo);
  EXPECT_EQ(answer.error().message, "a: cannot write");
  EXPECT_EQ(answer.error().sys, 28);
  EXPECT_EQ(answer.error().rank, 2);
}

TEST(AgreeTest, TheLowestRankWinsAndOthersAreListed) {
  const Status answer =
      AgreeOn({{}, Bad(Errc::kLimit, "too big"), Bad(Errc::kIo, "disk"), Bad(Errc::kIo, "disk")});
  EXPECT_EQ(answer.error().code, Errc::kLimit);
  EXPECT_EQ(answer.error().rank, 1);
  EXPECT_EQ(answer.error().message, "too big; ranks 2, 3: disk");
}

TEST(AgreeTest, IdenticalMessagesAreMerged) {
  const Status bad = Bad(Errc::kIo, "disk");
  const Status answer = AgreeOn({bad, bad, bad, {}, bad, {}, bad, bad});
  EXPECT_EQ(answer.error().message, "disk (ranks 0-2, 4, 6, 7)");
  EXPECT_EQ(answer.error().rank, 0);
}

TEST(AgreeTest, AnErrorOutranksAStop) {
  const Status stop = Bad(Errc::kStopped, "stopped by SIGTERM");
  const Status answer = AgreeOn({stop, stop, Bad(Errc::kIo, "disk"), stop});
  EXPECT_EQ(answer.error().code, Errc::kIo);
  EXPECT_EQ(answer.error().message, "disk");
  EXPECT_EQ(answer.error().rank, 2);
  const Status stopped = AgreeOn({{}, stop, stop});
  EXPECT_EQ(stopped.error().code, Errc::kStopped);
  EXPECT_EQ(stopped.error().message, "stopped by SIGTERM (ranks 1, 2)");
}

TEST(AgreeTest, ManyDifferentFailuresStayReadable) {
  std::vector<Status> brought;
  brought.reserve(9);
  for (int r = 0; r < 9; ++r) brought.push_back(Bad(Errc::kIo, "error " + std::to_string(r)));
  EXPECT_EQ(
      AgreeOn(brought).error().message,
      "error 0; rank 1: error 1; rank 2: error 2; rank 3: error 3; other failures on ranks 4-8");
}

TEST(AgreeTest, AgreeingTwiceChangesNothing) {
  const auto answers = RunThreads(4, [](Comm& comm) -> Status {
    Status mine;
    if (comm.rank() >= 2) mine = Fail(Errc::kIo, "disk");
    return comm.Agree(comm.Agree(std::move(mine)));
  });
  for (const Status& answer : answers) {
    EXPECT_EQ(answer.error().message, "disk (ranks 2, 3)");
    EXPECT_EQ(answer.error().rank, 2);
  }
}

TEST(AgreeTest, EmptyAndBinaryMessagesSurvive) {
  const std::string odd("a\0\xff\n", 4);
  EXPECT_EQ(AgreeOn({{}, Bad(Errc::kIo, "")}).error().message, "");
  EXPECT_EQ(AgreeOn({{}, Bad(Errc::kIo, odd, -5)}).error().message, odd);
  EXPECT_EQ(AgreeOn({{}, Bad(Errc::kIo, odd, -5)}).error().sys, -5);
}

TEST(AgreeTest, OneRankKeepsItsStatus) {
  const auto comm = MakeSerialComm();
  EXPECT_TRUE(comm->Agree({}));
  const Status answer = comm->Agree(Fail(Errc::kIo, "disk"));
  EXPECT_EQ(answer.error().message, "disk");
  EXPECT_EQ(answer.error().rank, -1);
}

TEST(OnRootTest, OnlyRootActsAndAllLearn) {
  for (const int ranks : {1, 2, 5}) {
    std::atomic<int> acted{0};
    const auto answers = RunThreads(ranks, [&](Comm& comm) -> Status {
      SW_TRY_ASSIGN(const std::string text, comm.OnRootText([&]() -> Result<std::string> {
        ++acted;
        EXPECT_EQ(comm.rank(), 0);
        return std::string("the answer");
      }));
      EXPECT_EQ(text, "the answer");
      SW_TRY(comm.OnRoot([&]() -> Status {
        ++acted;
        return {};
      }));
      return comm.OnRoot([]() -> Status { return FailErrno(Errc::kBusy, 17, "out: exists"); });
    });
    EXPECT_EQ(acted, 2);
    for (const Status& answer : answers) {
      ASSERT_FALSE(answer);
      EXPECT_EQ(answer.error().code, Errc::kBusy);
      EXPECT_EQ(answer.error().message, "out: exists");
      EXPECT_EQ(answer.error().sys, 17);
      EXPECT_EQ(answer.error().rank, ranks == 1 ? -1 : 0);
    }
  }
}

TEST(OnRootTest, AnExceptionLeavesNoRankWaiting) {
  const auto answers = RunThreads(3, [](Comm& comm) {
    return comm.OnRoot([]() -> Status { throw std::runtime_error("library"); });
  });
  for (const Status& answer : answers) {
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code, Errc::kInternal);
    EXPECT_EQ(answer.error().message, "unexpected exception: library");
  }
}

}  // namespace
}  // namespace shardwright::comm
