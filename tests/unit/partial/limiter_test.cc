// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/throttle/limiter.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace shardwright::partial {
namespace {

using std::chrono::duration;
using std::chrono::duration_cast;
using Time = IdleRanks::Time;

constexpr std::size_t kIdle = 0, kBusy = 1, kDue = 2, kAny = 3;

/// Memory as a trainer's process shares it, and the process's view of it.
class Marks {
 public:
  Marks() : fd_(::memfd_create("marks", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    EXPECT_EQ(::ftruncate(fd_, kIdleMarkBytes), 0);
    EXPECT_EQ(::fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    words_ = static_cast<std::uint64_t*>(
        ::mmap(nullptr, kIdleMarkBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
  }
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;
  ~Marks() {
    ::munmap(words_, kIdleMarkBytes);
    ::close(fd_);
  }
  HandedMemory Hand() const {
    auto memory = HandedMemory::Map(::dup(fd_), kIdleMarkBytes);
    EXPECT_TRUE(memory) << memory.error().message;
    return *std::move(memory);
  }
  void Set(Time time, bool idle) {
    const auto ns = duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
    words_[1 + words_[0] % kIdleMarks] = 2 * static_cast<std::uint64_t>(ns) + (idle ? 1 : 0);
    ++words_[0];
  }

 private:
  int fd_;
  std::uint64_t* words_;
};

/// A clock that advances when a thread waits. Events run when their time passes.
class LimiterTest : public ::testing::Test {
 protected:
  static Time At(double seconds) {
    return Time(std::chrono::hours(1)) + duration_cast<Time::duration>(duration<double>(seconds));
  }
  PaceClock Clock() {
    return {[this] { return now_; }, [this](Time time) { Go(time); }};
  }
  void Go(Time time) {
    while (!events_.empty() && events_.begin()->first <= time) {
      const auto event = events_.extract(events_.begin());
      now_ = std::max(now_, event.key());
      event.mapped()();
    }
    now_ = std::max(now_, time);
  }
  void When(double seconds, std::function<void()> what) {
    events_.emplace(At(seconds), std::move(what));
  }
  void Idles(Marks& marks, double from, double to) {
    When(from, [this, &marks] { marks.Set(now_, true); });
    When(to, [this, &marks] { marks.Set(now_, false); });
  }
  double Seconds() const { return duration<double>(now_ - At(0)).count(); }

  Time now_ = At(0);
  std::multimap<Time, std::function<void()>> events_;
};

constexpr double kLooks = 0.0021;  // a waiting job looks each millisecond

TEST_F(LimiterTest, KeepsToTheRateWhereNobodyTellsOfIdleRanks) {
  Limiter limiter(100, {}, Clock());
  limiter.Begin(1);
  Limiter::Job job(limiter, 200);
  job.Spend(50);
  EXPECT_NEAR(Seconds(), 0.5, 1e-6);
  job.Spend(150);
  EXPECT_NEAR(Seconds(), 2, 1e-6);
  Go(At(10));
  Limiter::Job(limiter).Spend(100);  // a job that waits for bytes has no other rate
  EXPECT_NEAR(Seconds(), 11, 1e-6);
  Limiter unlimited(0, {}, Clock());
  Limiter::Job(unlimited, 5).Spend(std::uint64_t{1} << 40);
  EXPECT_NEAR(Seconds(), 11, 1e-6);
  EXPECT_EQ(limiter.sent()[kAny], 300U);
  EXPECT_EQ(limiter.jobs_due(), 0U);
}

TEST_F(LimiterTest, SendsWhileARankIdles) {
  Marks marks;
  Limiter limiter(0, {}, Clock());
  limiter.idle().Enter(0, marks.Hand());
  Idles(marks, 5, 6);
  Idles(marks, 8, 9);
  Limiter::Job job(limiter, 3000);
  job.Spend(1000);
  EXPECT_NEAR(Seconds(), 5, kLooks);
  job.Spend(1000);
  EXPECT_NEAR(Seconds(), 5, kLooks) << "at any speed";
  Go(At(6.5));
  job.Spend(1000);
  EXPECT_NEAR(Seconds(), 8, kLooks);
  EXPECT_EQ(job.sent()[kIdle], 3000U);
  const auto ranks = limiter.idle().Between(At(5.5), At(8.5));
  ASSERT_EQ(ranks.size(), 1U);
  ASSERT_EQ(ranks[0].idle.size(), 2U);
  EXPECT_EQ(ranks[0].idle[0].begin, At(5.5));
  EXPECT_EQ(ranks[0].idle[0].end, At(6));
  EXPECT_EQ(ranks[0].idle[1].begin, At(8));
}

TEST_F(LimiterTest, BesideComputationTheRateHolds) {
  Marks marks;
  Limiter limiter(1000, {}, Clock());
  limiter.idle().Enter(0, marks.Hand());
  Idles(marks, 2.5, 3);
  Limiter::Job job(limiter, 100'000);
  for (int i = 0; i < 3; ++i) job.Spend(1000);
  EXPECT_NEAR(Seconds(), 2, kLooks);
  EXPECT_EQ(job.sent()[kBusy], 3000U);
  for (int i = 0; i < 10; ++i) job.Spend(1000);
  EXPECT_NEAR(Seconds(), 2.5, kLooks) << "the rank idles before the rate would let it go";
  EXPECT_EQ(job.sent()[kIdle], 10'000U);
}

TEST_F(LimiterTest, WhatIsDueIsSentAllTheSame) {
  Marks marks;
  Limiter limiter(0, {}, Clock());
  limiter.idle().Enter(0, marks.Hand());
  limiter.Begin(10);
  Go(At(10));
  limiter.Begin(20);
  limiter.Begin(20);  // once more: the next one comes no sooner
  {
    // The duration is unknown: half of the time must be enough, except for a piece each ten seconds
    // that keeps connections alive.
    Limiter::Job job(limiter, 2000);
    job.Spend(1000);
    EXPECT_NEAR(Seconds(), 15, kLooks);
    EXPECT_EQ(job.sent()[kDue], 1000U);
  }
  EXPECT_EQ(limiter.jobs_due(), 1U);
  Go(At(20));
  limiter.Begin(30);
  marks.Set(now_, true);
  Limiter::Job fast(limiter, 100'000);
  for (int i = 0; i < 10; ++i) {  // 1000 bytes in 10 ms
    fast.Spend(1000);
    Go(now_ + std::chrono::milliseconds(10));
  }
  marks.Set(now_, false);
  // 90,000 bytes are left, which take 0.9 s; twice that before 30 s is 28.2 s.
  EXPECT_EQ(fast.sent()[kIdle], 10'000U);
  Go(At(27));
  fast.Spend(1000);
  EXPECT_NEAR(Seconds(), 28.2, 0.02);
  EXPECT_EQ(fast.sent()[kDue], 1000U);
}

TEST_F(LimiterTest, AllHurryForTheFirstThatIsDue) {
  Marks marks;
  Limiter limiter(0, {}, Clock());
  limiter.idle().Enter(0, marks.Hand());
  limiter.Begin(10);
  Go(At(10));
  limiter.Begin(20);
  std::array<std::optional<Limiter::Job>, 3> jobs;
  jobs[1].emplace(limiter, 1000);  // due at 20 s
  Go(At(16));
  limiter.Begin(30);
  jobs[0].emplace(limiter, 1000);  // due at 22 s
  jobs[2].emplace(limiter, 1000);
  // Half of the time from 16 to 20 s has to be enough.
  jobs[2]->Spend(1000);
  EXPECT_NEAR(Seconds(), 18, kLooks);
  EXPECT_EQ(jobs[2]->sent()[kDue], 1000U);
}

TEST_F(LimiterTest, ASilentConnectionWouldBeTakenForDead) {
  Marks marks;
  Limiter limiter(0, {}, Clock());
  limiter.idle().Enter(0, marks.Hand());
  limiter.Begin(1);
  Go(At(100));
  limiter.Begin(2);
  Limiter::Job job(limiter, 100);
  job.Spend(10);
  EXPECT_NEAR(Seconds(), 110, kLooks);
  EXPECT_EQ(job.sent()[kBusy], 10U);
}

TEST_F(LimiterTest, NobodyWhoWaitsIsHeldUp) {
  Marks marks;
  Limiter limiter(0, {}, Clock());
  const std::uint64_t entered = limiter.idle().Enter(0, marks.Hand());
  Limiter::Job(limiter).Spend(1000);
  EXPECT_EQ(Seconds(), 0);
  Limiter::Job job(limiter, 1000);
  {
    const Limiter::Hurry hurry(limiter);
    job.Spend(500);
    EXPECT_EQ(Seconds(), 0);
  }
  When(3, [&] { limiter.idle().Leave(0, entered); });  // the trainer ends, or is killed
  job.Spend(500);
  EXPECT_NEAR(Seconds(), 3, kLooks);
  EXPECT_EQ(limiter.sent()[kAny], 2000U);
}

TEST_F(LimiterTest, WhoWaitsIsNotHeldBackByTheRate) {
  Limiter limiter(10, {}, Clock());
  Limiter::Job job(limiter, 1'000'000);
  std::optional<Limiter::Hurry> hurry;
  When(3, [&] { hurry.emplace(limiter); });  // a stop request: the bytes before it keep the rate
  job.Spend(100'000);
  EXPECT_NEAR(Seconds(), 3, 0.2);
  job.Spend(900'000);
  EXPECT_NEAR(Seconds(), 3, 0.2);
}

TEST_F(LimiterTest, AsManyRanksIdleAsHaveTo) {
  std::array<Marks, 3> marks;
  Limiter two(0, {std::nullopt, 2}, Clock());
  Limiter all(0, {}, Clock());
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    two.idle().Enter(rank, marks[rank].Hand());
    all.idle().Enter(rank, marks[rank].Hand());
  }
  Idles(marks[0], 1, 9);
  Idles(marks[2], 2, 9);
  Idles(marks[1], 4, 9);
  Limiter::Job(two, 1).Spend(1);
  EXPECT_NEAR(Seconds(), 2, kLooks);
  Limiter::Job(all, 1).Spend(1);
  EXPECT_NEAR(Seconds(), 4, kLooks);
}

TEST_F(LimiterTest, MarksOfAnybodyAreOfUse) {
  Marks marks;
  IdleRanks ranks(IdleOptions{});
  ranks.Enter(7, marks.Hand());
  EXPECT_FALSE(ranks.idle(now_));  // nothing is marked yet
  // More than the ring holds, then times that go back.
  for (std::uint64_t i = 0; i < kIdleMarks + 10; ++i) {
    marks.Set(At(1e-3 * static_cast<double>(i)), i % 2 == 0);
  }
  marks.Set(At(0), true);
  EXPECT_TRUE(ranks.idle(now_));
  const auto told = ranks.Between(At(0), At(100));
  EXPECT_GT(told[0].idle.size(), kIdleMarks / 2 - 10);
  for (const auto& one : told[0].idle) EXPECT_LT(one.begin, one.end);
  EXPECT_TRUE(ranks.Between(At(0), At(0))[0].idle.empty());
}

TEST_F(LimiterTest, FollowsASchedule) {
  // Stage 3 of the worked example idles for 3 s before its first forward, 6 s after the last
  // backward of an iteration of 33 s.
  const PipelineTimes pipeline{4, 8, 1, 1, 2};
  auto schedule = ScheduleOf(pipeline, {3}, 0);
  ASSERT_TRUE(schedule) << schedule.error().message;
  Limiter limiter(0, {*schedule, 0}, Clock());
  EXPECT_FALSE(limiter.idle().known()) << "no iteration has ended yet";
  limiter.Begin(1);
  Go(At(330));
  limiter.Begin(11);  // iterations take the times of the schedule
  Limiter::Job job(limiter, 100);
  job.Spend(1);
  EXPECT_NEAR(Seconds(), 330, kLooks);
  Go(At(335));
  job.Spend(1);
  EXPECT_NEAR(Seconds(), 345, kLooks) << "a piece, so that nobody takes it for dead";
  Go(At(350));
  job.Spend(1);
  EXPECT_NEAR(Seconds(), 357, kLooks);
  EXPECT_EQ(job.sent()[kIdle], 2U);
  const auto stages = limiter.idle().Between(At(330), At(396));
  ASSERT_EQ(stages.size(), 1U);
  EXPECT_EQ(stages[0].number, 3U);
  double idle = 0;
  for (const auto& one : stages[0].idle) idle += duration<double>(one.end - one.begin).count();
  EXPECT_NEAR(idle, 2 * 9, 1e-6);
}

TEST_F(LimiterTest, AnIterationTakesLongerThanItsPipeline) {
  auto schedule = ScheduleOf({2, 2, 1, 1, 1}, {1}, 0);  // 6 s; idle in the first and the last
  ASSERT_TRUE(schedule);
  IdleRanks ranks({*schedule, 0});
  ranks.Begin(1, At(0));
  ranks.Begin(3, At(20));  // ten seconds each
  EXPECT_TRUE(ranks.idle(At(20.5)));
  EXPECT_TRUE(ranks.idle(At(25.5)));
  EXPECT_FALSE(ranks.idle(At(26.5))) << "its optimizer's step";
  EXPECT_TRUE(ranks.idle(At(30.5)));
}

TEST(PipelineSchedule, StagesThatNeverIdleTogetherAreRefused) {
  const PipelineTimes pipeline{4, 8, 1, 1, 2};
  EXPECT_TRUE(ScheduleOf(pipeline, {2, 3}, 0));
  EXPECT_FALSE(ScheduleOf({2, 2, 1, 1, 1}, {0, 1}, 0));
  EXPECT_TRUE(ScheduleOf({2, 2, 1, 1, 1}, {0, 1}, 1));
  EXPECT_FALSE(ScheduleOf(pipeline, {0, 1, 2, 3}, 5));
  EXPECT_FALSE(ScheduleOf(pipeline, {1, 1}, 0));
  EXPECT_FALSE(ScheduleOf(pipeline, {4}, 0));
  EXPECT_FALSE(ScheduleOf({1, 8, 1, 1, 2}, {0}, 0)) << "one stage has no bubble";
}

}  // namespace
}  // namespace shardwright::partial
