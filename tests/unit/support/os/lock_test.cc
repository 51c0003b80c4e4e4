// SPDX-License-Identifier: Apache-2.0
#include "support/os/lock.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <thread>

#include "scratch.h"
#include "support/base/system.h"
#include "support/os/fault.h"

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
  EXPECT_NE(line.find(" (next)\n"), std::string::npos) << line;
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
  EXPECT_NE(Get("out.lock").find(" (run r1)\nboot "), std::string::npos);
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
  EXPECT_NE(Get("out.lock").find(" (owner)\n"), std::string::npos);
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

TEST_F(LockTest, WhatAPowerFailureLeavesOfALockIsNoObstacle) {
  for (const std::string& left : {std::string(), std::string("pro"), std::string("process 7 on"),
                                  std::string(60, '\0'), std::string("gar\xC3\x01\xFFled")}) {
    Put("out.lock", left);
    EXPECT_TRUE(Lock::Take(At("out.lock"), "run")) << left;
    EXPECT_TRUE(Contents().empty());
  }
}

TEST_F(LockTest, WhatIsNotALockIsNeitherWrittenNorRemoved) {
  Put("data", "results of a week");
  ASSERT_EQ(::symlink("data", At("link").c_str()), 0);
  ASSERT_EQ(::mkdir(At("folder").c_str(), 0755), 0);
  ASSERT_EQ(::link(At("data").c_str(), At("second").c_str()), 0);
  for (const char* const name : {"data", "link", "folder", "second"}) {
    const auto lock = Lock::Take(At(name), "run");
    ASSERT_FALSE(lock) << name;
    EXPECT_EQ(lock.error().code, Errc::kBusy) << name;
    EXPECT_NE(lock.error().message.find("is not a lock file"), std::string::npos) << name;
  }
  EXPECT_EQ(Get("data"), "results of a week");
  EXPECT_EQ(Contents().size(), 4U);
}

TEST_F(LockTest, EveryFaultWithALockOfAKilledRunFailsOrSucceedsCleanly) {
  bool fired = true;
  for (int call = 1; fired; ++call) {
    Put("out.lock", "process 7 on " + HostName() + " (run)\n");
    const ScopedFault fault(*ParseFault("every:" + std::to_string(call) + ":eacces"));
    {
      auto lock = Lock::Take(At("out.lock"), "run");
      if (!lock) {
        EXPECT_NE(lock.error().code, Errc::kInternal) << lock.error().message;
      }
    }
    fired = fault.fired();
    ASSERT_LT(call, 40);
  }
  EXPECT_TRUE(Contents().empty());
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

// The tests below cannot have file systems with locks that fail between machines. They replace the
// lock of a running process by an unlocked file.

constexpr const char* kElsewhere = "process 7 on elsewhere (run r1)\nboot b7 start 5\n";

void SetAge(const std::string& path, std::chrono::seconds age) {
  std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() - age);
}

TEST_F(LockTest, ALockOfAnotherMachineIsTakenOverOnRequestOnceItsHeartbeatHasExpired) {
  const auto take = [&](bool take_over) { return Lock::Take(At("out.lock"), "run r2", take_over); };
  for (const std::string& text :
       {std::string(kElsewhere), std::string("process 7 on elsewhere (run r1)\n")}) {
    Put("out.lock", text);
    for (const std::chrono::seconds age : {std::chrono::seconds(0), 2 * kHeartbeatExpires}) {
      SetAge(At("out.lock"), age);
      const auto lock = take(false);
      ASSERT_FALSE(lock);
      EXPECT_EQ(lock.error().code, Errc::kBusy);
      const std::string owner =
          "in use by process 7 on elsewhere (run r1), a process of another machine";
      EXPECT_NE(lock.error().message.find(owner), std::string::npos) << lock.error().message;
      EXPECT_NE(lock.error().message.find("--take-over"), std::string::npos);
      EXPECT_EQ(Get("out.lock"), text);
      EXPECT_EQ(Contents().size(), 1U);
    }
    {
      const auto lock = take(true);
      ASSERT_TRUE(lock) << lock.error().message;
      EXPECT_NE(Get("out.lock").find("(run r2)"), std::string::npos);
    }
    EXPECT_TRUE(Contents().empty());
  }
}

TEST_F(LockTest, ATakeOverWaitsForTheHeartbeatToExpire) {
  Put("out.lock", kElsewhere);
  SetAge(At("out.lock"), kHeartbeatExpires - std::chrono::seconds(1));
  const auto lock = Lock::Take(At("out.lock"), "run r2", true);
  ASSERT_TRUE(lock) << lock.error().message;
  EXPECT_NE(Get("out.lock").find("(run r2)"), std::string::npos);
}

TEST_F(LockTest, AProcessOfAnotherMachineThatIsAliveKeepsItsLock) {
  Put("out.lock", kElsewhere);
  std::atomic<bool> done = false;
  std::thread owner([&] {
    for (int beat = 0; !done; ++beat) {
      SetAge(At("out.lock"), std::chrono::seconds(beat % 9));
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  });
  const auto refused = Lock::Take(At("out.lock"), "run r2", true);
  done = true;
  owner.join();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kBusy);
  EXPECT_TRUE(refused.error().message.ends_with("; it is running")) << refused.error().message;
  EXPECT_EQ(Get("out.lock"), kElsewhere);
}

TEST_F(LockTest, ALockFromBeforeARestartOfThisMachineIsNoObstacle) {
  Put("out.lock", "process " + std::to_string(::getppid()) + " on " + HostName() +
                      " (run r1)\nboot b7 start 5\n");
  const std::chrono::nanoseconds uptime(ClockNanoseconds(CLOCK_BOOTTIME));
  SetAge(At("out.lock"),
         std::chrono::duration_cast<std::chrono::seconds>(uptime) + std::chrono::seconds(2));
  EXPECT_TRUE(Lock::Take(At("out.lock"), "run r2"));
}

TEST_F(LockTest, AHeartbeatSinceTheBootIsThatOfAnotherMachineOfThisName) {
  const std::string owner = "process 7 on " + HostName() + " (run r1)";
  Put("out.lock", owner + "\nboot b7 start 5\n");
  const auto refused = Lock::Take(At("out.lock"), "run r2");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kBusy);
  EXPECT_NE(refused.error().message.find("in use by " + owner +
                                         ", a process of another machine of this name ("),
            std::string::npos)
      << refused.error().message;
  Put("out.lock", owner + "\n");  // of an older version: decided by the name
  EXPECT_TRUE(Lock::Take(At("out.lock"), "run r2"));
}

TEST_F(LockTest, ATakeOverDoesNotRemoveALockThatAnotherProcessHasTakenOver) {
  ASSERT_EQ(::mkdir(At("its").c_str(), 0755), 0);
  auto its = Lock::Take(At("its/lock"), "run r3");
  ASSERT_TRUE(its);
  Put("out.lock", kElsewhere);
  SetAge(At("out.lock"), 2 * kHeartbeatExpires);
  const pid_t child = ::fork();
  if (child == 0) {
    const ScopedFault fault(*ParseFaults("rename:1:hang"));
    const auto lock = Lock::Take(At("out.lock"), "run r2", true);
    ::_exit(lock ? 1 : lock.error().code == Errc::kBusy ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  ASSERT_EQ(::unlink(At("out.lock").c_str()), 0);
  Put("out.lock", Get("its/lock"));
  ::kill(child, SIGCONT);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(Get("out.lock"), Get("its/lock"));
  EXPECT_EQ(Contents().size(), 3U);  // no file is left aside
}

TEST_F(LockTest, ARunningProcessOfThisMachineKeepsALockThatDoesNotHold) {
  ASSERT_EQ(::mkdir(At("its").c_str(), 0755), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto lock = Lock::Take(At("its/lock"), "run r1");
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  Put("out.lock", Get("its/lock"));
  const auto refused = Lock::Take(At("out.lock"), "run r2", true);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kBusy);
  EXPECT_NE(refused.error().message.find("which is running"), std::string::npos)
      << refused.error().message;
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(Lock::Take(At("out.lock"), "run r2"));
}

TEST_F(LockTest, AnOwnerUpdatesItsFileUntilAnotherTakesItOver) {
  auto lock = Lock::Take(Here(), "out.lock", "run r1", false, std::chrono::milliseconds(5));
  ASSERT_TRUE(lock);
  EXPECT_TRUE(lock->Check());
  const auto old = std::filesystem::file_time_type::clock::now() - kHeartbeatExpires;
  const auto is_old = [&] { return std::filesystem::last_write_time(At("out.lock")) <= old; };
  std::filesystem::last_write_time(At("out.lock"), old);
  for (int look = 0; look < 6000 && is_old(); ++look) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_FALSE(is_old());
  ASSERT_EQ(::unlink(At("out.lock").c_str()), 0);
  EXPECT_EQ(lock->Check().error().code, Errc::kBusy);
  Put("out.lock", kElsewhere);
  const Status lost = lock->Check();
  ASSERT_FALSE(lost);
  EXPECT_EQ(lost.error().message,
            At("out.lock") + ": taken over by process 7 on elsewhere (run r1)");
  EXPECT_TRUE(lock->Release());
  EXPECT_EQ(Get("out.lock"), kElsewhere);
}

TEST_F(LockTest, AFullDiskIsNoObstacle) {
  for (const char* const spec :
       {"write:1+:enospc", "write:1+:edquot", "write:1:short,write:2:enospc"}) {
    const ScopedFault fault(*ParseFaults(spec));
    auto lock = Lock::Take(At("out.lock"), "run r1");
    ASSERT_TRUE(lock) << lock.error().message;
    EXPECT_EQ(Get("out.lock"), "");
    EXPECT_EQ(Lock::Take(At("out.lock"), "run r2").error().message,
              At("out.lock") + ": in use by another process");
    EXPECT_TRUE(lock->Check());
    EXPECT_TRUE(lock->Release());
    EXPECT_TRUE(Contents().empty());
  }
}

}  // namespace
}  // namespace shardwright::os
