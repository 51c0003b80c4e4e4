// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/pec.h"
#include "convert/input.h"
#include "partial/gradient_log/log_collect.h"
#include "partial/gradient_log/log_reader.h"
#include "partial/save/repair.h"
#include "partial/store/store.h"
#include "partial/store/undo.h"
#include "pec-save/save_flags.h"
#include "pec-save/subcommands.h"
#include "support/base/stop.h"
#include "support/os/dir.h"

namespace shardwright::apps {

namespace {

/// Returns the damage of a store's gradient log. Empty if there is no log, or no damage.
Result<std::string> DamageOfLog(const std::string& path, unsigned threads) {
  SW_TRY_ASSIGN(const bool there, os::IsDir(path + "/logs"));
  if (!there) return std::string();
  SW_TRY_ASSIGN(const partial::Store store, partial::Store::Open(path));
  const auto log = partial::GradientLog::Open(path + "/logs", store.head().fingerprint, threads);
  return log ? std::string() : log.error().message;
}

struct CheckFlags {
  std::string store;
  std::string repair;  ///< path of a checkpoint; empty: none
  std::vector<std::string> also;
  std::vector<std::string> patterns;
};

/// Adds the damage of the gradient log to a check. Collective.
Status CheckLog(cli::Context& context, const std::string& store, partial::StoreCheck* report) {
  const auto look = [&] {
    const Interruptible reading(context.sink());
    return DamageOfLog(store, context.flags().threads);
  };
  SW_TRY_ASSIGN(std::string damage, context.comm().OnRootText(look));
  if (!damage.empty()) report->damaged.push_back(std::move(damage));
  return {};
}

Status Check(cli::Context& context, const CheckFlags& flags) {
  SW_TRY_ASSIGN(const auto rules, convert::ReadPatterns(flags.patterns));
  SW_TRY_ASSIGN(auto report, partial::CheckStore(context.comm(), flags.store, rules,
                                                 context.flags().threads, context.sink()));
  SW_TRY(CheckLog(context, flags.store, &report));
  return ShowCheck(context, flags.store, report);
}

Status Repair(cli::Context& context, const CheckFlags& flags) {
  convert::InputOptions source;
  source.source_paths = {flags.repair};
  source.source_paths.insert(source.source_paths.end(), flags.also.begin(), flags.also.end());
  source.pattern_files = flags.patterns;
  // The digests of blobs already verify more than these two checks.
  source.allow_mixed = true;
  source.proof.reset();
  SW_TRY_ASSIGN(const auto input, OpenInput(context, source));
  const partial::RepairRequest request{flags.store, context.flags().take_over,
                                       context.flags().threads};
  SW_TRY_ASSIGN(auto repair, partial::RepairStore(context.comm(), *input, request, context.sink()));
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
  app.ShowInShortHelp({"--repair"});
  app.AddText("--repair", &flags.repair,
              "checkpoint from which missing and damaged blobs are written again, if it contains "
              "exactly the data of the blob; exit with code 5 if a blob is still damaged",
              "CKPT");
  app.AddList("--also", &flags.also, "another folder with a part of CKPT", "DIR");
  AddPatterns(app, &flags.patterns);
  app.Check([&]() -> Status {
    if (!flags.repair.empty()) return {};
    if (app.IsSet("--repair"))
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
  partial::Retention rules;
  app.AddInput(&store, "store to clean up", "STORE");
  app.Use({cli::Shared::kDryRun, cli::Shared::kTakeOver});
  app.ShowInShortHelp({"--keep-last", "--keep-every"});
  app.AddCount("--keep-last", &rules.keep_last, 1, kMany,
               "number of newest checkpoints to keep; this flag or --keep-every is required");
  app.AddCount("--keep-every", &rules.keep_every, 1, kMany,
               "also keep checkpoints at multiples of N iterations");
  app.Check([&]() -> Status {
    if (app.IsSet("--keep-last") || app.IsSet("--keep-every")) return {};
    return Fail(Errc::kUsage,
                "no rule specifies which checkpoints to keep; give --keep-last N or --keep-every N "
                "(--keep-last 1 keeps only the newest checkpoint)");
  });
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    const bool dry_run = context.flags().dry_run;
    const bool take_over = context.flags().take_over;
    partial::Collected collected;
    partial::CollectedLog log;
    const StopCheck stop = StopOf(context.sink());
    SW_TRY(context.comm().OnRoot([&]() -> Status {
      SW_TRY_ASSIGN(collected, partial::CollectGarbage(store, rules, dry_run, stop, take_over));
      SW_TRY_ASSIGN(const partial::Store opened, partial::Store::Open(store));
      SW_TRY_ASSIGN(log, partial::CollectLog(opened, collected.oldest_version, dry_run, stop));
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
    SW_TRY_ASSIGN(const partial::StoreListing listing, partial::ListStore(store));
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
  app.ShowInShortHelp({"--confirm"});
  app.AddFlag("--confirm", &confirm,
              "record the last restore as a restart instead, which abandons newer checkpoints");
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    const bool take_over = context.flags().take_over;
    partial::Undone undone;
    SW_TRY(context.comm().OnRoot([&]() -> Status {
      SW_TRY_ASSIGN(undone, confirm ? partial::ConfirmRestart(store, take_over)
                                    : partial::UndoRestart(store, take_over));
      return {};
    }));
    ShowUndone(context, undone, confirm);
    return {};
  });
}

}  // namespace shardwright::apps
