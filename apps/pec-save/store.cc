#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/stop.h"
#include "common/pec.h"
#include "os/dir.h"
#include "pec-save/save_flags.h"
#include "pec-save/subcommands.h"
#include "pec/log/log_collect.h"
#include "pec/log/log_reader.h"
#include "pec/store/store.h"
#include "pec/store/undo.h"
#include "ucp/input.h"

namespace shardwright::apps {

namespace {

/// What is wrong with a store's log of gradients; empty where there is none, or nothing is.
Result<std::string> DamageOfLog(const std::string& path, unsigned threads) {
  SW_TRY_ASSIGN(const bool there, os::IsDir(path + "/logs"));
  if (!there) return std::string();
  SW_TRY_ASSIGN(const pec::Store store, pec::Store::Open(path));
  const auto log = pec::GradientLog::Open(path + "/logs", store.head().fingerprint, threads);
  return log ? std::string() : log.error().message;
}

}  // namespace

int CheckMain(int argc, const char* const* argv) {
  cli::App app("pec-save check", "Verify every blob of a store; exit 5 if one is bad.",
               {{"store/", "Reads and verifies all that the checkpoints of a store refer to."}});
  std::string store;
  std::vector<std::string> patterns;
  app.AddInput(&store, "store to verify", "STORE");
  app.Use({cli::Shared::kThreads});
  AddPatterns(app, &patterns);
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    SW_TRY_ASSIGN(const auto rules, ucp::ReadPatterns(patterns));
    SW_TRY_ASSIGN(auto report, pec::CheckStore(context.comm(), store, rules,
                                               context.flags().threads, context.sink()));
    const auto look = [&] {
      const Interruptible reading(context.sink());
      return DamageOfLog(store, context.flags().threads);
    };
    SW_TRY_ASSIGN(std::string damage, context.comm().OnRootText(look));
    if (!damage.empty()) report.damaged.push_back(std::move(damage));
    return ShowCheck(context, store, report);
  });
}

int CollectMain(int argc, const char* const* argv) {
  cli::App app(
      "pec-save gc",
      "Remove what no rule keeps from a store, and gradients that bring nothing forward that is "
      "kept.",
      {{"store/ --keep-last 3", "Keeps the three newest checkpoints."}});
  std::string store;
  pec::Retention rules;
  app.AddInput(&store, "store to collect", "STORE");
  app.Use({cli::Shared::kDryRun, cli::Shared::kTakeOver});
  app.Daily({"--keep-last", "--keep-every"});
  app.AddCount("--keep-last", &rules.keep_last, 1, kMany, "newest checkpoints to keep");
  app.AddCount("--keep-every", &rules.keep_every, 1, kMany,
               "also checkpoints whose iteration is a multiple of this");
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    const bool dry_run = context.flags().dry_run;
    const bool take_over = context.flags().take_over;
    pec::Collected collected;
    pec::CollectedLog log;
    const StopCheck stop = StopOf(context.sink());
    SW_TRY(context.comm().OnRoot([&]() -> Status {
      SW_TRY_ASSIGN(collected, pec::CollectGarbage(store, rules, dry_run, stop, take_over));
      SW_TRY_ASSIGN(const pec::Store opened, pec::Store::Open(store));
      SW_TRY_ASSIGN(log, pec::CollectLog(opened, collected.oldest_version, dry_run, stop));
      return {};
    }));
    ShowCollected(context, collected, log, dry_run);
    return {};
  });
}

int ListMain(int argc, const char* const* argv) {
  cli::App app("pec-save list", "Say what a store holds; reads no payload.",
               {{"store/", "Shows the checkpoints and how old their modules are."}});
  std::string store;
  app.Alone();
  app.AddInput(&store, "store to list", "STORE");
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    const Interruptible reading(context.sink());
    SW_TRY_ASSIGN(const pec::StoreListing listing, pec::ListStore(store));
    ShowListing(context, listing);
    return {};
  });
}

int UndoMain(int argc, const char* const* argv) {
  cli::App app("pec-save undo",
               "Take back the last restore of a store: checkpoints that it abandoned are usable "
               "again.",
               {{"store/",
                 "Forgets a restore that was a look at the store, or a restart before its "
                 "first save."},
                {"store/ --confirm", "Records the restore as a restart of the training."}});
  std::string store;
  bool confirm = false;
  app.Alone();
  app.AddInput(&store, "store to change", "STORE");
  app.Use({cli::Shared::kTakeOver});
  app.Daily({"--confirm"});
  app.AddFlag("--confirm", &confirm,
              "record the last restore as a restart instead, which abandons newer checkpoints");
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    const bool take_over = context.flags().take_over;
    pec::Undone undone;
    SW_TRY(context.comm().OnRoot([&]() -> Status {
      SW_TRY_ASSIGN(undone, confirm ? pec::ConfirmRestart(store, take_over)
                                    : pec::UndoRestart(store, take_over));
      return {};
    }));
    ShowUndone(context, undone, confirm);
    return {};
  });
}

}  // namespace shardwright::apps
