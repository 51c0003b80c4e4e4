#include <memory>
#include <vector>

#include "common/pec.h"
#include "pec-save/save_flags.h"
#include "pec-save/subcommands.h"
#include "pec/store/token_log.h"
#include "ucp/input.h"

namespace apps = shardwright::apps;
namespace pec = shardwright::pec;
using shardwright::Status;
using shardwright::cli::Shared;
using shardwright::cli::Subcommand;

namespace {

Status Save(shardwright::cli::Context& context, const apps::SaveFlags& flags) {
  pec::SaveRequest options = flags.Options(context.flags());
  std::shared_ptr<pec::TokenLog> tokens;
  if (!flags.selection.tokens.empty()) {
    SW_TRY_ASSIGN(tokens, pec::TokenLog::Open(flags.selection.tokens));
    options.tokens = tokens.get();
  }
  SW_TRY_ASSIGN(const auto input, apps::OpenInput(context, flags.source.Options(context.flags())));
  SW_TRY_ASSIGN(const auto report, pec::Save(context.comm(), *input, options, context.sink()));
  apps::ShowSave(context, report, options.dry_run);
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Subcommand> subcommands = {
      {"list", "list the checkpoints of a store", &apps::ListMain},
      {"check", "verify every blob of a store, and repair blobs", &apps::CheckMain},
      {"undo", "take back the last restore of a store", &apps::UndoMain},
      {"gc", "remove what no rule keeps from a store", &apps::CollectMain},
      {"agent", "keep running, hold snapshots in memory and save them beside the training",
       &apps::AgentMain},
      {"agents", "list agents that trainers have started, or end them", &apps::AgentsMain},
      {"status", "show what an agent does", &apps::StatusMain},
      {"tell", "send an agent a request: snapshot, flush or stop", &apps::TellMain},
      {"keygen", "make the key that agents at ports and all who ask them share", &apps::KeygenMain},
      {"plan", "show what the next checkpoints hold and who saves what", &apps::PlanMain},
      {"tune", "choose K, K to persist and the interval", &apps::TuneMain},
      {"simulate", "play a trace of tokens with every policy and K", &apps::SimulateMain}};
  if (const Subcommand* one = shardwright::cli::FindSubcommand(subcommands, argc, argv)) {
    return one->main(argc, argv);
  }
  shardwright::cli::App app("pec-save", "Save a part of the experts of a checkpoint into a store.",
                            {{"ckpt/global_step100 store/ --k 2",
                              "Saves all but the experts, and two of each MoE layer."},
                             {"check store/", "Verifies every blob of a store."}});
  apps::SaveFlags flags;
  app.AddSubcommands(subcommands);
  app.Replaced("--list", "pec-save list STORE");
  app.Replaced("--check", "pec-save check STORE");
  app.Replaced("--gc", "pec-save gc STORE");
  app.Replaced("--agent", "pec-save agent INPUT STORE");
  app.Replaced("--status", "pec-save status ADDRESS");
  app.Replaced("--tell", "pec-save tell ADDRESS REQUEST");
  app.Replaced("--plan", "pec-save plan [STORE]");
  app.Replaced("--auto", "pec-save tune [STORE]");
  app.Replaced("--simulate", "pec-save simulate TOKENS [STORE]");
  app.Use({Shared::kDryRun, Shared::kVerify, Shared::kThreads, Shared::kMemory, Shared::kMode,
           Shared::kTakeOver});
  flags.AddTo(app);
  flags.AddSaveOnlyTo(app);
  app.Check([&] { return flags.CheckRules(app); });
  return app.Run(argc, argv,
                 [&](shardwright::cli::Context& context) { return Save(context, flags); });
}
