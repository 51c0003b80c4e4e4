// SPDX-License-Identifier: Apache-2.0
#include "support/os/io_threads.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

namespace shardwright::os {
namespace {

TEST(IoThreads, EveryIndexIsWorkedOnOnce) {
  for (const unsigned threads : {1U, 3U, 64U}) {
    std::vector<std::atomic<int>> times(100);
    ASSERT_TRUE(ForEachFile(times.size(), threads, [&](std::uint64_t i) -> Status {
      ++times[i];
      return {};
    }));
    for (const std::atomic<int>& one : times) EXPECT_EQ(one, 1) << threads;
  }
  EXPECT_TRUE(ForEachFile(0, 8, [](std::uint64_t) -> Status { return Fail(Errc::kIo, "none"); }));
}

TEST(IoThreads, AsManyWaitAtTheSameTimeAsWereAskedFor) {
  constexpr unsigned kThreads = 8;
  std::mutex mutex;
  std::condition_variable all;
  unsigned arrived = 0;
  const Status met = ForEachFile(kThreads, kThreads, [&](std::uint64_t) -> Status {
    std::unique_lock lock(mutex);
    ++arrived;
    all.notify_all();
    const bool here =
        all.wait_for(lock, std::chrono::minutes(5), [&] { return arrived == kThreads; });
    return here ? Status() : Fail(Errc::kInternal, arrived, " threads only");
  });
  EXPECT_TRUE(met) << met.error().message;
}

TEST(IoThreads, TheErrorOfTheLowestIndexIsReported) {
  for (const unsigned threads : {1U, 2U, 7U, 64U}) {
    const Status done = ForEachFile(200, threads, [](std::uint64_t i) -> Status {
      if (i < 50 || i % 3 != 0) return {};
      return Fail(Errc::kBadInput, "file ", i);
    });
    ASSERT_FALSE(done);
    EXPECT_EQ(done.error().message, "file 51") << threads;
  }
}

TEST(IoThreads, AnExceptionReachesTheCaller) {
  for (const unsigned threads : {1U, 4U}) {
    EXPECT_THROW((void)ForEachFile(20, threads,
                                   [](std::uint64_t i) -> Status {
                                     if (i == 5) throw std::bad_alloc();
                                     return {};
                                   }),
                 std::bad_alloc);
  }
}

TEST(IoThreads, TheLimitOfOpenFilesBoundsThem) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto allowed_with = [&](rlim_t files) {
    const rlimit limit{std::min<rlim_t>(files, before.rlim_max), before.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    return IoThreadsAllowed(32);
  };
  EXPECT_EQ(allowed_with(64 + 4 * kFilesPerIoThread), 4U);
  EXPECT_EQ(allowed_with(32), 1U);
  EXPECT_EQ(OpenFilesAllowed(100), 1U);
  EXPECT_EQ(allowed_with(64 + 300), 32U);
  EXPECT_EQ(OpenFilesAllowed(1000), 100U);
  EXPECT_EQ(OpenFilesAllowed(20), 20U);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

/// CPU time of this process in nanoseconds.
std::int64_t ProcessorTime() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return std::int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

TEST(IoThreads, ReportsASlowCallEachTimeThatItHasTakenTwiceAsLong) {
  std::mutex mutex;
  std::vector<double> told;  // seconds
  SlowCalls slow;
  slow.seconds = 0.01;
  slow.tell = [&](std::uint64_t index, double seconds, std::size_t others) {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(index, 3U);
    EXPECT_EQ(others, 0U);
    told.push_back(seconds);
  };
  const auto count = [&] {
    const std::lock_guard lock(mutex);
    return told.size();
  };
  std::int64_t used = 0;
  ASSERT_TRUE(ForEachFile(
      4, 1,
      [&](std::uint64_t i) -> Status {
        if (i < 3) return {};
        while (count() < 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        // A process that only waits must not look busy: few reports take little time.
        const std::int64_t before = ProcessorTime();
        while (count() < 6) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        used = ProcessorTime() - before;
        return {};
      },
      nullptr, &slow));
  ASSERT_GE(told.size(), 6U);
  EXPECT_GE(told[0], 0.01);
  for (std::size_t i = 1; i < told.size(); ++i) EXPECT_GE(told[i], 2 * told[i - 1]) << i;
  EXPECT_LT(used, 50'000'000);
}

}  // namespace
}  // namespace shardwright::os
