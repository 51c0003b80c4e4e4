#include "os/lock.h"

#include <signal.h>
#include <sys/wait.h>

#include "os/fault.h"
#include "scratch.h"

namespace shardwright::os {
namespace {

using LockTest = Scratch;

TEST_F(LockTest, OneOwnerAtATimeAndTheOwnerIsNamed) {
  auto first = Lock::Take(At("out.lock"), "run r1");
  ASSERT_TRUE(first);
  const auto second = Lock::Take(At("out.lock"), "run r2");
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, Errc::kBusy);
  const std::string owner = "in use by process " + std::to_string(::getpid()) + " on ";
  EXPECT_NE(second.error().message.find(owner), std::string::npos) << second.error().message;
  EXPECT_NE(second.error().message.find("(run r1)"), std::string::npos);
  EXPECT_TRUE(first->Release());
  EXPECT_TRUE(Contents().empty());
  EXPECT_TRUE(Lock::Take(At("out.lock"), "run r2"));
  EXPECT_TRUE(Contents().empty());
}

TEST_F(LockTest, FileOfAKilledOwnerIsNoObstacle) {
  const int status = InChild([&] {
    const auto lock = Lock::Take(At("out.lock"), "a much longer note than the next one");
    if (lock) KillSelf();
    return 1;
  });
  ASSERT_TRUE(WIFSIGNALED(status));
  ASSERT_TRUE(std::filesystem::exists(At("out.lock")));
  auto lock = Lock::Take(At("out.lock"), "next");
  ASSERT_TRUE(lock);
  const std::string line = Get("out.lock");
  EXPECT_TRUE(line.ends_with(" (next)\n")) << line;
  EXPECT_TRUE(lock->Release());
  EXPECT_TRUE(Contents().empty());
}

TEST_F(LockTest, ManyProcessesNeverHoldItTogether) {
  Put("counter", "0");
  std::vector<pid_t> children;
  constexpr int kChildren = 4;
  constexpr int kTurns = 50;
  for (int c = 0; c < kChildren; ++c) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (int turn = 0; turn < kTurns;) {
        auto lock = Lock::Take(At("out.lock"), "turn");
        if (!lock) continue;
        Put("counter", std::to_string(std::stoi(Get("counter")) + 1));
        if (!lock->Release()) ::_exit(1);
        ++turn;
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(Get("counter"), std::to_string(kChildren * kTurns));
}

TEST_F(LockTest, TheOwnerIsWrittenWholeAndAFileThatStaysIsTold) {
  {
    const ScopedFault fault(*ParseFault("write:1+:short"));
    ASSERT_TRUE(Lock::Take(At("other.lock"), "run") && fault.fired());
  }
  const ScopedFault fault(*ParseFaults("write:1:short,unlink:1:eio"));
  auto lock = Lock::Take(At("out.lock"), "run r1");
  ASSERT_TRUE(lock);
  EXPECT_EQ(Get("out.lock").rfind("process " + std::to_string(::getpid()) + " on ", 0), 0U);
  EXPECT_TRUE(Get("out.lock").ends_with(" (run r1)\n"));
  EXPECT_EQ(lock->Release().error().code, Errc::kIo);
}

// Between the open and the lock its last owner removes the file, and another process makes and
// locks a new one.
TEST_F(LockTest, AFileThatLostItsNameIsNoLock) {
  const pid_t child = ::fork();
  if (child == 0) {
    const ScopedFault fault(*ParseFault("lock:1:hang"));
    const auto lock = Lock::Take(At("out.lock"), "late");
    ::_exit(!lock && lock.error().code == Errc::kBusy ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  ASSERT_EQ(::link(At("out.lock").c_str(), At("old").c_str()),
            0);  // so that its number is not given again
  ASSERT_EQ(::unlink(At("out.lock").c_str()), 0);
  auto lock = Lock::Take(At("out.lock"), "owner");
  ASSERT_TRUE(lock);
  ::kill(child, SIGCONT);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(Get("out.lock").ends_with(" (owner)\n"));
}

TEST_F(LockTest, ALookThatFailsIsToldAndNothingIsHeld) {
  for (const char* const spec : {"stat:1:eio", "stat:2:eio", "lock:1:eio", "create:1:erofs"}) {
    {
      const ScopedFault fault(*ParseFault(spec));
      EXPECT_EQ(Lock::Take(At("out.lock"), "run").error().code, Errc::kIo) << spec;
      EXPECT_TRUE(fault.fired()) << spec;
    }
    EXPECT_TRUE(Lock::Take(At("out.lock"), "run")) << spec;
  }
  Lock held = *Lock::Take(At("a.lock"), "run");
  held = *Lock::Take(At("b.lock"), "run");
  EXPECT_EQ(Contents().count("a.lock"), 0U);
  EXPECT_EQ(Contents().count("b.lock"), 1U);
  // An owner that cannot be read is another process.
  const ScopedFault fault(*ParseFault("read:1:eio"));
  EXPECT_EQ(Lock::Take(At("b.lock"), "run").error().message,
            At("b.lock") + ": in use by another process");
}

TEST_F(LockTest, EveryFaultFailsOrSucceedsCleanly) {
  bool fired = true;
  for (int call = 1; fired; ++call) {
    const ScopedFault fault(*ParseFault("any:" + std::to_string(call) + ":eio"));
    {
      auto lock = Lock::Take(At("out.lock"), "run");
      if (!lock) {
        EXPECT_EQ(lock.error().code, Errc::kIo);
      }
    }
    fired = fault.fired();
    ASSERT_LT(call, 20);
  }
  EXPECT_TRUE(Contents().empty());
  EXPECT_EQ(Lock::Take(At("absent/out.lock"), "run").error().code, Errc::kIo);
}

}  // namespace
}  // namespace shardwright::os
