#include <optional>
#include <string>

#include "common/pec.h"
#include "dialect/patterns.h"
#include "moe/load_trace.h"
#include "pec-save/flags.h"
#include "pec/check_store.h"
#include "pec/collect.h"
#include "pec/save.h"
#include "ucp/input.h"

namespace apps = shardwright::apps;
namespace pec = shardwright::pec;
using shardwright::Status;
using shardwright::cli::Shared;

namespace {

Status Save(shardwright::cli::Context& context, const apps::SaveFlags& flags,
            pec::SaveRequest options) {
  std::optional<shardwright::moe::LoadTrace> trace;
  if (!flags.tokens.empty()) {
    SW_TRY_ASSIGN(trace, shardwright::moe::ReadLoads(flags.tokens));
    options.tokens = &*trace;
    options.tokens_path = flags.tokens;
  }
  SW_TRY_ASSIGN(const auto input, shardwright::ucp::OpenInput(
                                      context.comm(), flags.source.Options(), context.sink()));
  SW_TRY_ASSIGN(const auto report, pec::Save(context.comm(), *input, options, context.sink()));
  apps::ShowSave(context, report, options.dry_run);
  return {};
}

Status Check(shardwright::cli::Context& context, const apps::SaveFlags& flags) {
  SW_TRY_ASSIGN(const auto patterns,
                shardwright::ucp::ReadPatterns(flags.source.Options().pattern_files));
  SW_TRY_ASSIGN(const auto report, pec::CheckStore(context.comm(), flags.store, patterns,
                                                   context.flags().threads, context.sink()));
  return apps::ShowCheck(context, flags.store, report);
}

Status Collect(shardwright::cli::Context& context, const apps::SaveFlags& flags) {
  pec::Collected collected;
  SW_TRY(context.comm().OnRoot([&]() -> Status {
    SW_TRY_ASSIGN(collected,
                  pec::CollectGarbage(flags.store, flags.Rules(), context.flags().dry_run));
    return {};
  }));
  apps::ShowCollected(context, collected, context.flags().dry_run);
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  shardwright::cli::App app("pec-save", "Save a part of the experts of a checkpoint into a store.",
                            {{"ckpt/global_step100 store/ --k 2",
                              "Saves all but the experts, and two of each MoE layer."},
                             {"--check store/", "Verifies every blob of a store."}});
  apps::SaveFlags flags;
  app.Use({Shared::kDryRun, Shared::kVerify, Shared::kThreads, Shared::kMemory, Shared::kList});
  flags.AddTo(app);
  app.Check([&] { return flags.CheckRules(app); });
  return app.Run(argc, argv, [&](shardwright::cli::Context& context) -> Status {
    if (context.flags().list) return apps::ShowStore(context, flags.source.input);
    if (flags.check) return Check(context, flags);
    if (flags.gc) return Collect(context, flags);
    SW_TRY_ASSIGN(pec::SaveRequest options, flags.Options(app, context.flags()));
    return Save(context, flags, std::move(options));
  });
}
