// SPDX-License-Identifier: Apache-2.0
#include "support/cli/run_sink.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

namespace shardwright::cli {
namespace {

class RunSinkTest : public ::testing::Test {
 protected:
  Console console_{{"test", -1, false, 0}};
  SignalGuard signals_;
};

TEST_F(RunSinkTest, AddsUpPassesOfOneName) {
  RunSink sink({}, console_, signals_);
  sink.Pass("read");
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  sink.Pass("write");
  sink.Pass("read");
  const RankStats facts = sink.Finish();
  ASSERT_EQ(facts.passes.size(), 2U);
  EXPECT_EQ(facts.passes[0].name, "read");
  EXPECT_GE(facts.passes[0].seconds, 0.005);
  EXPECT_EQ(facts.passes[1].name, "write");
}

TEST_F(RunSinkTest, CountsFromManyThreads) {
  RunSink sink({}, console_, signals_);
  sink.Pass("write");
  std::array<std::thread, 8> threads;
  for (std::thread& thread : threads) {
    thread = std::thread([&sink] {
      for (std::uint64_t i = 0; i < 1000; ++i) {
        sink.AddRead(3, 1);
        sink.AddWritten(5, 2);
        sink.Progress(i, 1000);
        sink.Warn(i % 2 == 0 ? "even" : "odd");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const RankStats facts = sink.Finish();
  EXPECT_EQ(facts.bytes_read, 24'000U);
  EXPECT_EQ(facts.files_read, 8000U);
  EXPECT_EQ(facts.bytes_written, 40'000U);
  EXPECT_EQ(facts.files_written, 16'000U);
  EXPECT_EQ(facts.warnings.size(), 2U);
  EXPECT_EQ(facts.warnings_omitted, 0U);
  EXPECT_GT(facts.peak_memory_bytes, 0U);
}

TEST_F(RunSinkTest, KeepsABoundedNumberOfWarnings) {
  RunSink sink({}, console_, signals_);
  for (std::size_t i = 0; i < kWarningsKept + 10; ++i) sink.Warn("warning " + std::to_string(i));
  sink.Warn("warning 0");
  const RankStats facts = sink.Finish();
  EXPECT_EQ(facts.warnings.size(), kWarningsKept);
  EXPECT_EQ(facts.warnings_omitted, 10U);
}

TEST_F(RunSinkTest, FinishesTwice) {
  RunSink sink({ProgressMode::kPlain, 0, 1}, console_, signals_);
  sink.Pass("read");
  EXPECT_EQ(sink.Finish().passes.size(), 1U);
  EXPECT_EQ(sink.Finish().passes.size(), 1U);
}

/// Returns true if a run ends after a stop.
bool Leaves(const std::function<void(RunSink&, const std::atomic<bool>& left)>& work) {
  Console console{{"test", -1, false, 0}};
  const SignalGuard signals;
  std::atomic<bool> left{false};
  RunSink sink({ProgressMode::kOff, 0, 1, [&] { left = true; }}, console, signals);
  raise(SIGTERM);
  work(sink, left);
  return left;
}

TEST(InterruptibleTest, WorkThatDoesNotEndAfterAStopIsLeft) {
  EXPECT_TRUE(Leaves([](RunSink& sink, const std::atomic<bool>& left) {
    const Interruptible outer(sink);
    { const Interruptible inner(sink); }
    // However busy the machine is, the sink's thread gets its turn within a minute.
    for (int i = 0; i < 600 && !left; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }));
}

TEST(InterruptibleTest, OtherWorkIsWaitedFor) {
  EXPECT_FALSE(Leaves([](RunSink& sink, const std::atomic<bool>&) {
    { const Interruptible before(sink); }
    std::this_thread::sleep_for(std::chrono::seconds(2));
  }));
}

TEST(InterruptibleTest, NothingIsLeftWithoutAStop) {
  Console console{{"test", -1, false, 0}};
  const SignalGuard signals;
  std::atomic<bool> left{false};
  RunSink sink({ProgressMode::kOff, 0, 1, [&] { left = true; }}, console, signals);
  const Interruptible work(sink);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  EXPECT_FALSE(left);
}

TEST(SignalGuardTest, FirstSignalAsksToStop) {
  const SignalGuard signals;
  Console console({"test", -1, false, 0});
  const RunSink sink({}, console, signals);
  EXPECT_FALSE(sink.stop_requested());
  raise(SIGUSR1);
  EXPECT_TRUE(sink.stop_requested());
  EXPECT_EQ(SignalGuard::StopSignal(), SIGUSR1);
  raise(SIGUSR1);
  EXPECT_EQ(SignalGuard::StopSignal(), SIGUSR1) << "a second SIGUSR1 changes nothing";
}

TEST(SignalGuardTest, SecondSignalEndsAtOnce) {
  const auto stop_twice = [](int first, int second) {
    const SignalGuard signals;
    raise(first);
    raise(second);
  };
  EXPECT_EXIT(stop_twice(SIGINT, SIGINT), ::testing::KilledBySignal(SIGINT), "");
  EXPECT_EXIT(stop_twice(SIGTERM, SIGINT), ::testing::KilledBySignal(SIGINT), "");
  EXPECT_EXIT(stop_twice(SIGUSR1, SIGTERM), ::testing::KilledBySignal(SIGTERM), "");
}

TEST(SignalGuardTest, GivesTheSignalsBack) {
  struct sigaction before {};
  sigaction(SIGTERM, nullptr, &before);
  { const SignalGuard signals; }
  struct sigaction after {};
  sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

}  // namespace
}  // namespace shardwright::cli
