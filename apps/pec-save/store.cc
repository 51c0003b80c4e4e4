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
#include "pec/save/repair.h"
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

struct CheckFlags {
  std::string store;
  std::string repair;  ///< checkpoint; empty: none
  std::vector<std::string> also;
  std::vector<std::string> patterns;
};

/// Adds the damage of the gradient log to a check. Collective.
Status CheckLog(cli::Context& context, const std::string& store, pec::StoreCheck* report) {
  const auto look = [&] {
    const Interruptible reading(context.sink());
    return DamageOfLog(store, context.flags().threads);
  };
  SW_TRY_ASSIGN(std::string damage, context.comm().OnRootText(look));
  if (!damage.empty()) report->damaged.push_back(std::move(damage));
  return {};
}

Status Check(cli::Context& context, const CheckFlags& flags) {
  SW_TRY_ASSIGN(const auto rules, ucp::ReadPatterns(flags.patterns));
  SW_TRY_ASSIGN(auto report, pec::CheckStore(context.comm(), flags.store, rules,
                                             context.flags().threads, context.sink()));
  SW_TRY(CheckLog(context, flags.store, &report));
  return ShowCheck(context, flags.store, report);
}

Status Repair(cli::Context& context, const CheckFlags& flags) {
  ucp::InputOptions source;
  source.roots = {flags.repair};
  source.roots.insert(source.roots.end(), flags.also.begin(), flags.also.end());
  source.pattern_files = flags.patterns;
  // The digests of blobs prove more than these two.
  source.allow_mixed = true;
  source.proof.reset();
  SW_TRY_ASSIGN(const auto input, OpenInput(context, source));
  const pec::RepairRequest request{flags.store, context.flags().take_over, context.flags().threads};
  SW_TRY_ASSIGN(auto repair, pec::RepairStore(context.comm(), *input, request, context.sink()));
  SW_TRY(CheckLog(context, flags.store, &repair.check));
  return ShowRepair(context, flags.store, repair);
}

}  // namespace

int CheckMain(int argc, const char* const* argv) {
  cli::App app("pec-save check",
               "Verify every blob of a store, and optionally repair damaged ones; exit with code 5 "
               "if one is damaged.",
               {{"store/", "Reads and verifies all data of the checkpoints of a store."},
                {"store/ --repair ckpt/global_step100",
                 "Also writes missing and damaged blobs again, if the checkpoint still contains "
                 "their data."}});
  CheckFlags flags;
  app.AddInput(&flags.store, "store to verify", "STORE");
  app.Use({cli::Shared::kThreads, cli::Shared::kMode, cli::Shared::kTakeOver});
  app.Daily({"--repair"});
  app.AddText("--repair", &flags.repair,
              "checkpoint from which missing and damaged blobs are written again, if it contains "
              "exactly the data of the blob; exit with code 5 if a blob is still damaged",
              "CKPT");
  app.AddList("--also", &flags.also, "another folder with a part of CKPT", "DIR");
  AddPatterns(app, &flags.patterns);
  app.Check([&]() -> Status {
    if (!flags.repair.empty()) return {};
    if (app.Given("--repair"))
      return Fail(Errc::kUsage, "--repair: expected the path of a checkpoint, found an empty path");
    return app.Require({"--also", "--mode", "--take-over"}, "--repair");
  });
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    return flags.repair.empty() ? Check(context, flags) : Repair(context, flags);
  });
}

int CollectMain(int argc, const char* const* argv) {
  cli::App app("pec-save gc",
               "Delete checkpoints and blobs that no retention rule covers, and logged gradients "
               "that no remaining checkpoint needs.",
               {{"store/ --keep-last 3", "Keeps the three newest checkpoints."}});
  std::string store;
  pec::Retention rules;
  app.AddInput(&store, "store to clean up", "STORE");
  app.Use({cli::Shared::kDryRun, cli::Shared::kTakeOver});
  app.Daily({"--keep-last", "--keep-every"});
  app.AddCount("--keep-last", &rules.keep_last, 1, kMany, "number of newest checkpoints to keep");
  app.AddCount("--keep-every", &rules.keep_every, 1, kMany,
               "also keep checkpoints at multiples of N iterations");
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
  cli::App app("pec-save list", "List the checkpoints of a store; reads metadata only.",
               {{"store/", "Shows the checkpoints and the age of their modules."}});
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
  cli::App app(
      "pec-save undo",
      "Undo the last restore of a store: the checkpoints that it abandoned become usable again.",
      {{"store/",
        "Forgets a restore that only looked at the store, or a restart that has not saved yet."},
       {"store/ --confirm", "Records the last restore as a restart of training."}});
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
