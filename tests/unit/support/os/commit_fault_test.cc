// SPDX-License-Identifier: Apache-2.0
// A fault at every call of a run that makes an output: tests the contents of the disk afterwards,
// and that the next run succeeds.

#include <sys/wait.h>

#include <csignal>
#include <set>

#include "scratch.h"
#include "support/os/commit.h"
#include "support/os/dir.h"
#include "support/os/fault.h"
#include "support/os/journal.h"

namespace shardwright::os {
namespace {

struct Case {
  const char* name;
  bool replace;   // an older output exists
  bool exchange;  // the file system can exchange names
};

class CommitFaultTest : public Scratch, public ::testing::WithParamInterface<Case> {
 protected:
  using Files = std::map<std::string, std::string>;

  // Thousands of syncs: in memory where there is such a file system.
  std::filesystem::path Parent() const override {
    return ::access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : Scratch::Parent();
  }

  void Reset() {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directory(root_);
    if (GetParam().replace) {
      Put("out/a", "old");
      Put("out/manifest", "old");
    }
  }

  static Files Whole(const std::string& text) {
    return {{"out", "/"}, {"out/a", text}, {"out/manifest", text}};
  }

  Files OutputNow() const {
    Files found = Contents("out");
    if (std::filesystem::exists(At("out"))) found["out"] = "/";
    return found;
  }

  /// A whole run: begin, one unit of work, commit.
  Status Run(const std::string& id, Resume resume, bool force) const {
    SW_TRY_ASSIGN(Stage stage,
                  Stage::Begin(At("out"), {.force = force, .resume = resume, .run_id = id}));
    const Directory& folder = stage.directory();
    SW_TRY_ASSIGN(const Directory journals, folder.OpenDir(kJournalDir));
    SW_TRY_ASSIGN(Journal journal, Journal::Open(journals, "0", {}));
    SW_TRY_ASSIGN(const bool there, folder.Exists("a"));
    if (there) SW_TRY(folder.RemoveFile("a"));
    SW_TRY(folder.WriteWholeFile("a", "new"));
    SW_TRY(journal.Append(AsBytes("a")));
    CommitSteps steps;
    steps.write_manifest = [](const Directory& written) {
      return written.ReplaceFile("manifest", "new");
    };
    return stage.Commit(steps);
  }

  std::vector<FaultRule> Rules(const std::string& spec) const {
    std::vector<FaultRule> rules = {*ParseFault(spec)};
    if (!GetParam().exchange) rules.push_back(*ParseFault("exchange:1+:einval"));
    return rules;
  }

  /// After a fault: the old output whole or the new one whole, and otherwise only files that a next
  /// run recognizes. In the gap of the fallback the old output has another name, nothing else.
  void ExpectWhole(const std::string& where, bool may_be_aside) {
    const Files found = OutputNow();
    const Files old = GetParam().replace ? Whole("old") : Files{};
    const bool aside = may_be_aside && found.empty() && Get("out.partial-r1.old/a") == "old" &&
                       Get("out.partial-r1.old/manifest") == "old";
    EXPECT_TRUE(found == old || found == Whole("new") || aside) << where;
    const std::set<std::string> known = {"out",
                                         "out.lock",
                                         "out.partial-r1",
                                         "out.partial-r1.old",
                                         "out.partial-r1.journal",
                                         "out.partial-s",
                                         "out.partial-s.old",
                                         "out.partial-s.journal"};
    for (const auto& entry : std::filesystem::directory_iterator(root_)) {
      EXPECT_TRUE(known.count(entry.path().filename().string()) == 1) << where << entry.path();
    }
  }

  /// A next run, resumed or fresh, ends with the new output and nothing else.
  void ExpectNextRunCleans(const std::string& where, Resume resume) {
    const Status next = Run("r2", resume, true);
    EXPECT_TRUE(next) << where << (next ? "" : next.error().message);
    EXPECT_EQ(Contents(), Whole("new")) << where;
  }
};

TEST_P(CommitFaultTest, AnErrorAtEveryCallLeavesOldOrNewWhole) {
  // "any" selects the calls that change something; the others only read.
  for (const std::string target : {"any", "open", "stat", "list"}) {
    const std::string action = target == "list" ? "enospc" : "eio";
    bool fired = true;
    for (int call = 1; fired; ++call) {
      const std::string where = target + " " + std::to_string(call) + ": ";
      Reset();
      Status status;
      {
        std::string rule = target;
        rule.append(":").append(std::to_string(call)).append(":").append(action);
        const ScopedFault fault(Rules(rule));
        status = Run("r1", Resume::kNever, GetParam().replace);
        fired = fault.fired();
      }
      ExpectWhole(where, false);
      EXPECT_FALSE(std::filesystem::exists(At("out.partial-r1.journal")) && !status &&
                   OutputNow() != Whole("new"))
          << where;
      if (!status) {
        const Errc code = status.error().code;
        EXPECT_TRUE(code == Errc::kIo || (code == Errc::kNotFound && target != "any"))
            << where << status.error().message;
        EXPECT_NE(status.error().sys, 0) << where;
      } else {
        EXPECT_EQ(OutputNow(), Whole("new")) << where;
      }
      if (!fired) {
        EXPECT_EQ(Contents(), Whole("new"));
      }
      ExpectNextRunCleans(where, call % 2 == 0 ? Resume::kIfSame : Resume::kNever);
      ASSERT_LT(call, 200);
    }
  }
}

// The next run recovers from one killed before, during and after the exchange of names.
TEST_P(CommitFaultTest, AnErrorAtEveryCallOfARecoveryLosesNothing) {
  const std::vector<Files> left = {
      {{"out.partial-r1/a", "half"}, {"out.partial-r1/.journal/0", ""}},
      {{"out.partial-r1/a", "half"}},
      {{"out.partial-r1/a", "half"}, {"out.partial-r1.journal/0", ""}},
      {{"out.partial-r1.old/a", "old"}, {"out.partial-r1.old/manifest", "old"}},
  };
  for (std::size_t which = 0; which < left.size(); ++which) {
    const bool aside = left[which].count("out.partial-r1.old/a") == 1;
    if (aside && !GetParam().replace) continue;
    for (const std::string target : {"any", "open", "stat", "list"}) {
      bool fired = true;
      for (int call = 1; fired; ++call) {
        const std::string where =
            std::to_string(which) + ", " + target + " " + std::to_string(call) + ": ";
        Reset();
        for (const auto& [name, text] : left[which]) Put(name, text);
        // An output next to one that was moved aside: a run was killed before it removed the old
        // one.
        if (aside && GetParam().exchange) std::filesystem::remove_all(At("out"));
        {
          const ScopedFault fault(Rules(target + ":" + std::to_string(call) + ":eio"));
          const Status status = Run("s", Resume::kIfSame, GetParam().replace);
          fired = fault.fired();
          if (!fired) {
            EXPECT_TRUE(status) << where << status.error().message;
          }
        }
        ExpectWhole(where, true);
        ExpectNextRunCleans(where, call % 2 == 0 ? Resume::kIfSame : Resume::kNever);
        ASSERT_LT(call, 200);
      }
    }
  }
}

TEST_P(CommitFaultTest, AKillAtEveryCallLeavesOldOrNewWhole) {
  for (const Resume resume : {Resume::kNever, Resume::kIfSame}) {
    bool killed = true;
    for (int call = 1; killed; ++call) {
      const std::string where = "kill at call " + std::to_string(call) + ": ";
      Reset();
      const int status = InChild([&] {
        const ScopedFault fault(Rules("any:" + std::to_string(call) + ":kill"));
        return Run("r1", Resume::kNever, GetParam().replace) ? 0 : 1;
      });
      killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
      if (!killed) {
        EXPECT_EQ(status, 0) << where;
      }
      ExpectWhole(where, !GetParam().exchange);
      if (!killed) {
        EXPECT_EQ(Contents(), Whole("new"));
      }
      ExpectNextRunCleans(where, resume);
      ASSERT_LT(call, 200);
    }
  }
}

TEST_P(CommitFaultTest, AKillAtEveryNamedStepLeavesOldOrNewWhole) {
  for (const std::string step :
       {"lock", "stage", "sync", "manifest", "verify", "rename", "sync_parent", "release"}) {
    Reset();
    const int status = InChild([&] {
      const ScopedFault fault(Rules("commit." + step + ":1:kill"));
      return Run("r1", Resume::kNever, GetParam().replace) ? 0 : 1;
    });
    EXPECT_TRUE(WIFSIGNALED(status)) << step;
    const bool renamed = step == "sync_parent" || step == "release";
    const Files old = GetParam().replace ? Whole("old") : Files{};
    EXPECT_EQ(OutputNow(), renamed ? Whole("new") : old) << step;
    ExpectNextRunCleans(step, Resume::kIfSame);
  }
}

TEST_P(CommitFaultTest, AFullDiskFromEveryCallOnLeavesOldOrNewWhole) {
  bool fired = true;
  for (int call = 1; fired; ++call) {
    const std::string where = "full from write " + std::to_string(call) + ": ";
    Reset();
    {
      const ScopedFault fault(Rules("write:" + std::to_string(call) + "+:enospc"));
      const Status status = Run("r1", Resume::kNever, GetParam().replace);
      fired = fault.fired();
      EXPECT_EQ(static_cast<bool>(status), !fired) << where;
    }
    const Files old = GetParam().replace ? Whole("old") : Files{};
    EXPECT_EQ(OutputNow(), fired ? old : Whole("new")) << where;
    ExpectNextRunCleans(where, Resume::kIfSame);
    ASSERT_LT(call, 100);
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, CommitFaultTest,
                         ::testing::Values(Case{"Fresh", false, true}, Case{"Exchange", true, true},
                                           Case{"MoveAside", true, false}),
                         [](const auto& made) { return made.param.name; });

}  // namespace
}  // namespace shardwright::os
