// SPDX-License-Identifier: Apache-2.0
// Every call on the file system fails in turn: in commits with all sorts of leftovers, in locks
// that others have had, and in operations of directory handles. Nothing is lost, and a failing
// operation returns an error.

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <vector>

#include "scratch.h"
#include "support/os/commit.h"
#include "support/os/dir.h"
#include "support/os/directory.h"
#include "support/os/fault.h"
#include "support/os/journal.h"
#include "support/os/lock.h"
#include "support/os/socket.h"

namespace shardwright::os {
namespace {

constexpr unsigned kSomebody = 65534;

class EveryCall : public Scratch {
 protected:
  // Thousands of syncs: in memory where there is such a file system.
  std::filesystem::path Parent() const override {
    return ::access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : Scratch::Parent();
  }

  /// Calls `act` again and again, after `prepare`, while the Nth call of each kind fails with
  /// each of the errors, until no call is left to fail.
  /// \param look  receives each outcome
  void FailInTurn(const std::function<void()>& prepare, const std::function<Status()>& act,
                  const std::function<void(const Status&, const std::string&)>& look) {
    constexpr std::uint64_t kMost = 2'000;
    for (const std::string target : {"every", "stat", "open", "write"}) {
      for (const std::string action : {"eio", "eacces", "enospc"}) {
        // Other errors only where they mean something else.
        if (action != "eio" && (target == "every" || (target == "write") != (action == "enospc"))) {
          continue;
        }
        std::uint64_t calls = 0;
        for (std::uint64_t n = 1; n == 1 || calls >= n - 1; ++n) {
          std::filesystem::remove_all(root_);
          std::filesystem::create_directory(root_);
          prepare();
          std::string rule = target;
          rule.append(":").append(std::to_string(n)).append(":").append(action);
          Status done;
          {
            const ScopedFault fault(*ParseFault(rule));
            done = act();
            calls = 0;
            for (std::size_t op = 0; op < kOpCount; ++op) {
              const auto kind = static_cast<Op>(op);
              if (target == "every" || target == OpName(kind)) calls += fault.Count(kind);
            }
          }
          ASSERT_LT(n, kMost);
          EXPECT_TRUE(done || !done.error().message.empty()) << rule;
          look(done, rule);
          EXPECT_TRUE(done || calls >= n) << "without a fault: " << done.error().message;
        }
      }
    }
  }

  void PutOld() {
    Put("out/a", "old");
    Put("out/sub/b", "old");
  }

  void GiveAway(const std::string& name) const {
    if (::geteuid() == 0) {
      ASSERT_EQ(::chown(At(name).c_str(), kSomebody, kSomebody), 0);
    }
  }
};

TEST_F(EveryCall, OfACommitAmongLeftovers) {
  const auto prepare = [&] {
    PutOld();
    for (const char* const id : {"k1", "k2"}) {
      Put("out.partial-" + std::string(id) + "/.journal/0", "journal");
      Put("out.partial-" + std::string(id) + "/a", "half");
      Put("out.partial-" + std::string(id) + ".old/a", "older");
      Put("out.partial-" + std::string(id) + ".journal/0", "journal");
    }
    for (int i = 0; i < 5; ++i) {
      const std::string name = "out.partial-foreign" + std::to_string(i);
      Put(name + "/a", "of somebody");
      GiveAway(name);
    }
    Put("out.partial-g.old/a", "of somebody");
    GiveAway("out.partial-g.old");
    Put("out.partial-h.journal/a", "of somebody");
    GiveAway("out.partial-h.journal");
  };
  std::vector<std::string> said;
  const auto act = [&]() -> Status {
    SW_TRY_ASSIGN(
        Stage stage,
        Stage::Begin(At("out"), {.force = true, .resume = Resume::kNever, .run_id = "r1"}));
    SW_TRY(stage.directory().WriteWholeFile("a", "new"));
    CommitSteps steps;
    steps.write_manifest = [](const Directory& made) { return made.ReplaceFile("manifest", "m"); };
    Status done = stage.Commit(steps);
    said = stage.notes();
    return done;
  };
  FailInTurn(prepare, act, [&](const Status& done, const std::string& rule) {
    const std::string now = Get("out/a");
    EXPECT_TRUE(now == "new" || (!done && now == "old")) << rule << ": " << now;
    EXPECT_TRUE(::geteuid() != 0 || Get("out.partial-foreign0/a") == "of somebody") << rule;
  });
  if (::geteuid() == 0) {
    EXPECT_FALSE(said.empty());
  }
}

TEST_F(EveryCall, OfAStageThatIsResumedOrGivenUp) {
  const auto prepare = [&] {
    Put("out.partial-k1/.journal/0", "");
    Put("out.partial-k1/a", "half");
    std::filesystem::permissions(At("out.partial-k1"), std::filesystem::perms::owner_all);
  };
  const auto act = [&]() -> Status {
    SW_TRY_ASSIGN(Stage stage,
                  Stage::Begin(At("out"), {.resume = Resume::kIfSameOrDone, .run_id = "r1"}));
    SW_TRY_ASSIGN(const Directory journals, stage.directory().OpenDir(kJournalDir));
    SW_TRY_ASSIGN(Journal journal, Journal::Open(journals, "0", {}));
    SW_TRY(journal.Append(AsBytes("a")));
    return stage.Abandon(stage.resumed());
  };
  FailInTurn(prepare, act, [&](const Status& done, const std::string& rule) {
    EXPECT_TRUE(!done || Get("out.partial-k1/a") == "half") << rule;
    EXPECT_FALSE(std::filesystem::exists(At("out"))) << rule;
  });
}

TEST_F(EveryCall, OfALockThatAnotherProcessHasHad) {
  for (const char* const text : {"process 7 on elsewhere (run 1)\nboot 0000 start 5\n", "proc"}) {
    for (const bool foreign : {false, true}) {
      const auto prepare = [&] {
        Put("x.lock", text);
        if (foreign) GiveAway("x.lock");
        std::filesystem::last_write_time(
            At("x.lock"), std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
      };
      const auto act = [&]() -> Status {
        SW_TRY_ASSIGN(Lock lock, Lock::Take(At("x.lock"), "a test", true));
        SW_TRY(lock.Check());
        return lock.Release();
      };
      FailInTurn(prepare, act, [](const Status&, const std::string&) {});
    }
  }
}

TEST_F(EveryCall, OfAFileThatIsReplaced) {
  const auto prepare = [&] {
    Put("plan", "old");
    Put("plan.partial", "half");
  };
  const auto act = [&] { return CommitFile(At("plan"), "new", true); };
  FailInTurn(prepare, act, [&](const Status& done, const std::string& rule) {
    const std::string now = Get("plan");
    EXPECT_TRUE(now == "new" || (!done && now == "old")) << rule << ": " << now;
  });
}

TEST_F(EveryCall, OfADirectory) {
  const auto prepare = [&] {
    PutOld();
    Put("other/c", "c");
    std::filesystem::create_symlink("c", At("other/link"));
  };
  const auto act = [&]() -> Status {
    SW_TRY_ASSIGN(const Directory top, Directory::Open(At("")));
    SW_TRY_ASSIGN(const Directory other, top.OpenDir("other"));
    SW_TRY_ASSIGN(const std::vector<Entry> entries, top.List());
    SW_TRY_ASSIGN(const File file, other.OpenRead("c"));
    SW_TRY(top.HardLink(At("other/c"), file, "again"));
    SW_TRY_ASSIGN(const File below, top.OpenRead("out/sub/b"));
    SW_TRY(top.ReplaceFile("text", "text"));
    SW_TRY_ASSIGN(const bool exchanged, top.Exchange("out", "other"));
    SW_TRY(top.RemoveTree("out"));
    SW_TRY(top.RemoveTree("other"));
    SW_TRY(top.Sync());
    return exchanged ? Status() : top.RemoveFile("text");
  };
  FailInTurn(prepare, act, [](const Status&, const std::string&) {});
}

TEST_F(EveryCall, OfASocketFileThatIsThereAlready) {
  const Address address{At("s"), {}, 0};
  const auto prepare = [&] {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    At("s").copy(name.sun_path, sizeof name.sun_path - 1);
    ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&name), sizeof name), 0);
    ::close(fd);
  };
  const auto act = [&]() -> Status {
    SW_TRY_ASSIGN(Listener first, Listener::Open(address));
    Listener second = std::move(first);
    Listener third;
    third = std::move(second);
    return {};
  };
  FailInTurn(prepare, act, [&](const Status& done, const std::string& rule) {
    EXPECT_TRUE(!done || !std::filesystem::exists(At("s"))) << rule;
  });
}

}  // namespace
}  // namespace shardwright::os
