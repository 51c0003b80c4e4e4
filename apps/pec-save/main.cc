#include <optional>
#include <string>

#include "common/pec.h"
#include "dialect/patterns.h"
#include "moe/load_trace.h"
#include "pec-save/agent_flags.h"
#include "pec-save/flags.h"
#include "pec-save/plan.h"
#include "pec-save/simulate.h"
#include "pec/check_store.h"
#include "pec/collect.h"
#include "pec/save.h"
#include "ucp/input.h"

namespace apps = shardwright::apps;
namespace pec = shardwright::pec;
using shardwright::Status;
using shardwright::cli::Shared;

namespace {

Status Save(shardwright::cli::Context& context, const shardwright::cli::App& app,
            const apps::SaveFlags& flags) {
  SW_TRY_ASSIGN(pec::SaveRequest options, flags.Options(app, context.flags()));
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
  SW_TRY_ASSIGN(const auto report, pec::CheckStore(context.comm(), flags.source.input, patterns,
                                                   context.flags().threads, context.sink()));
  return apps::ShowCheck(context, flags.source.input, report);
}

Status Collect(shardwright::cli::Context& context, const apps::SaveFlags& flags) {
  pec::Collected collected;
  SW_TRY(context.comm().OnRoot([&]() -> Status {
    SW_TRY_ASSIGN(collected,
                  pec::CollectGarbage(flags.source.input, flags.Rules(), context.flags().dry_run));
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
                             {"--check store/", "Verifies every blob of a store."},
                             {"--simulate tokens.jsonl --faults 0.02 --interval 10",
                              "Shows what each policy and K saves, loses and costs."},
                             {"--plan --k 2 --dp 16 --ep 8 --checkpoints 4",
                              "Shows what the next checkpoints hold and who saves what."}});
  apps::SaveFlags flags;
  apps::AgentFlags agent;
  app.Use({Shared::kDryRun, Shared::kVerify, Shared::kThreads, Shared::kMemory, Shared::kList,
           Shared::kForce, Shared::kSeed});
  flags.AddTo(app);
  agent.AddTo(app);
  app.Check([&]() -> Status {
    SW_TRY(flags.CheckRules(app));
    return agent.CheckRules(flags);
  });
  return app.Run(argc, argv, [&](shardwright::cli::Context& context) -> Status {
    switch (flags.mode) {
      case apps::Mode::kSave:
        return Save(context, app, flags);
      case apps::Mode::kList:
        return apps::ShowStore(context, flags.source.input);
      case apps::Mode::kCheck:
        return Check(context, flags);
      case apps::Mode::kCollect:
        return Collect(context, flags);
      case apps::Mode::kAgent:
        return agent.Run(context, app, flags);
      case apps::Mode::kAsk:
        return apps::AskAgent(context, flags.source.input, flags.modes.tell);
      case apps::Mode::kSimulate:
        return apps::Simulate(context, app, flags, flags.planning);
      case apps::Mode::kAuto:
        return apps::Auto(context, app, flags, flags.planning);
      case apps::Mode::kPlan:
        return apps::Plan(context, app, flags);
    }
    return {};
  });
}
