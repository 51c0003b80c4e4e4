// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <vector>

#include "common/pec.h"
#include "convert/convert.h"
#include "convert/input.h"
#include "partial/store/token_log.h"
#include "pec-save/save_flags.h"
#include "pec-save/subcommands.h"
#include "support/os/dir.h"

namespace apps = shardwright::apps;
namespace partial = shardwright::partial;
using shardwright::Status;
using shardwright::cli::Shared;
using shardwright::cli::Subcommand;

namespace {

/// Warns if a save may not fit. Unchanged blobs take no space, but a dry run does not hash them.
Status WarnOfSpace(shardwright::cli::Context& context, const std::string& store,
                   std::uint64_t bytes) {
  const auto there = shardwright::os::IsDir(store);
  SW_TRY_ASSIGN(const shardwright::os::FreeSpace free,
                shardwright::convert::FreeSpaceFor(context.comm(),
                                                   there && *there ? store + "/blobs" : store));
  const Status fits = shardwright::exec::CheckFits(free, store, bytes, 0);
  if (!fits && context.comm().rank() == 0) context.sink().Warn(fits.error().message);
  return {};
}

Status Save(shardwright::cli::Context& context, const apps::SaveFlags& flags) {
  partial::SaveRequest options = flags.Options(context.flags());
  std::shared_ptr<partial::TokenLog> tokens;
  if (!flags.selection.tokens.empty()) {
    SW_TRY_ASSIGN(tokens, partial::TokenLog::Open(flags.selection.tokens));
    options.tokens = tokens.get();
  }
  SW_TRY_ASSIGN(const auto input, apps::OpenInput(context, flags.source.Options(context.flags())));
  SW_TRY_ASSIGN(const auto report, partial::Save(context.comm(), *input, options, context.sink()));
  apps::ShowSave(context, report, options.dry_run);
  return options.dry_run ? WarnOfSpace(context, options.store, report.bytes) : Status();
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Subcommand> subcommands = {
      {"list", "list the checkpoints of a store", &apps::ListMain},
      {"check", "verify every blob of a store, and repair damaged ones", &apps::CheckMain},
      {"undo", "undo the last restore of a store", &apps::UndoMain},
      {"gc", "delete checkpoints and blobs not covered by a retention rule", &apps::CollectMain},
      {"agent", "take snapshots into memory and save them while training runs", &apps::AgentMain},
      {"agents", "list or stop agents that trainers have started", &apps::AgentsMain},
      {"status", "print the state of an agent", &apps::StatusMain},
      {"tell", "send a request to an agent: snapshot, flush or stop", &apps::TellMain},
      {"keygen", "create the key for agents at HOST:PORT and their clients", &apps::KeygenMain},
      {"plan", "show the contents of the next checkpoints and the share of each rank",
       &apps::PlanMain},
      {"replan", "place the copies of agents again after nodes have left", &apps::ReplanMain},
      {"tune", "choose K, K to persist and the interval", &apps::TuneMain},
      {"simulate", "simulate a trace of token counts with every policy and K",
       &apps::SimulateMain}};
  if (const Subcommand* one = shardwright::cli::FindSubcommand(subcommands, argc, argv)) {
    return one->main(argc, argv);
  }
  shardwright::cli::App app("pec-save",
                            "Save a checkpoint into a store, with only some of its experts.",
                            {{"ckpt/global_step100 store/ --k 2",
                              "Saves all non-expert modules, and two experts of each MoE layer."},
                             {"check store/", "Verifies every blob of a store."}});
  apps::SaveFlags flags;
  app.AddSubcommands(subcommands);
  app.Use({Shared::kDryRun, Shared::kVerify, Shared::kThreads, Shared::kMemory, Shared::kMode,
           Shared::kTakeOver});
  flags.AddTo(app);
  flags.AddSaveOnlyTo(app);
  app.Check([&] { return flags.CheckRules(app); });
  return app.Run(argc, argv,
                 [&](shardwright::cli::Context& context) { return Save(context, flags); });
}
