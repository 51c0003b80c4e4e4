// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "common/outputs.h"
#include "moe-replace/flags.h"
#include "moe-replace/show.h"

namespace apps = shardwright::apps;
namespace placement = shardwright::placement;
using shardwright::Errc;
using shardwright::Fail;
using shardwright::Status;
using shardwright::cli::Shared;
using shardwright::cli::Subcommand;

namespace {

struct PlanFlags : apps::MoeFlags {
  std::string strategy = "best";
  std::string output;
  placement::PlanFormat format = placement::PlanFormat::kPlan;
};

void AddTo(shardwright::cli::App& app, PlanFlags& flags) {
  flags.AddLoadsTo(app);
  flags.AddInputTo(app, true);
  app.Group("Plan");
  apps::AddStrategy(app, &flags.strategy);
  flags.AddStrategyOptionsTo(app, true);
  flags.AddTimesTo(app);
  app.Group("Outputs");
  app.ShowInShortHelp({"--output", "--format"});
  app.AddText("-o,--output", &flags.output, "file for the plan", "FILE");
  app.AddEnum<placement::PlanFormat>("--format", &flags.format,
                                     {{"plan", placement::PlanFormat::kPlan},
                                      {"eplb", placement::PlanFormat::kEplb},
                                      {"sglang", placement::PlanFormat::kSglang},
                                      {"vllm", placement::PlanFormat::kVllm},
                                      {"tensorrt-llm", placement::PlanFormat::kTensorrt},
                                      {"vllm-ascend", placement::PlanFormat::kAscend}},
                                     "program that reads the plan");
  flags.AddReportTo(app);
}

Status CheckRules(const shardwright::cli::App& app, PlanFlags& flags) {
  SW_TRY(flags.CheckRules(app, true));
  if (flags.request.old_plan.empty() && app.IsSet("--map")) {
    return Fail(Errc::kUsage, "--map requires --old");
  }
  const bool writes_eplb = flags.format == placement::PlanFormat::kEplb && !flags.output.empty();
  SW_TRY(flags.CheckKnown(app, flags.strategy, false, writes_eplb));
  if (!flags.output.empty()) return {};
  if (app.IsSet("--format")) return Fail(Errc::kUsage, "--format requires --output");
  if (!flags.report.empty() || !app.IsSet("--force")) return {};
  return Fail(Errc::kUsage, "--force requires --output or --html");
}

Status Plan(shardwright::cli::Context& context, PlanFlags flags) {
  flags.AddShared(context.flags());
  const placement::PlanRequest& request = flags.request;
  SW_TRY(apps::CheckOutputs(context, {flags.output, flags.report}));
  SW_TRY_ASSIGN(const placement::PlanInput input,
                placement::ReadPlanInput(context.comm(), request, context.sink()));
  SW_TRY_ASSIGN(const placement::Strategy* strategy, placement::FindStrategy(flags.strategy));
  SW_TRY_ASSIGN(const placement::PlannedRow row,
                placement::PlanWith(context.comm(), request, input, *strategy, context.sink()));
  if (!row.reason.empty()) return Fail(Errc::kInfeasible, row.reason);
  std::vector<placement::PlannedRow> others;
  if (!flags.report.empty()) {
    SW_TRY_ASSIGN(others, placement::PlanWithAll(context.comm(), request, input, context.sink()));
  }
  return context.comm().OnRoot([&]() -> Status {
    SW_TRY(placement::CheckSurvives(*row.plan, request.faults, input.loads, input.cluster,
                                    request.options.failure_unit));
    for (const std::string& warning : row.plan->result.warnings) context.sink().Warn(warning);
    context.sink().Pass("write");
    if (!flags.output.empty()) {
      SW_TRY_ASSIGN(const std::string text,
                    placement::PlanBytes(flags.format, request, input, *row.plan, context.sink()));
      SW_TRY(apps::WriteText(context, flags.output, text));
    }
    if (!flags.report.empty()) {
      const std::string page = placement::PlanPage(request, input, row, others, context.sink());
      SW_TRY(apps::WriteText(context, flags.report, page));
    }
    apps::ShowPlan(context, flags, input, row, flags.output);
    return {};
  });
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Subcommand> subcommands = {
      {"compare", "compare the plans of all strategies in one table", &apps::CompareMain},
      {"simulate-failures", "simulate nodes that fail and join during a recorded run",
       &apps::SimulateFailuresMain},
      {"evaluate", "measure an existing plan of any format", &apps::EvaluateMain}};
  if (const Subcommand* one = shardwright::cli::FindSubcommand(subcommands, argc, argv)) {
    return one->main(argc, argv);
  }
  shardwright::cli::App app(
      "moe-replace",
      "Plan which GPUs have which expert replicas, to balance the load and to survive failures.",
      {{"loads.jsonl --cluster cluster.json --faults 1 -o plan.json",
        "Places the experts so that any one node can fail."},
       {"loads.jsonl --cluster cluster.json --old plan.json -o next.json --format sglang",
        "Updates a plan with few moves, in the format of SGLang."}});
  PlanFlags flags;
  app.AddSubcommands(subcommands);
  app.Use({Shared::kForce, Shared::kTakeOver, Shared::kThreads, Shared::kSeed});
  AddTo(app, flags);
  app.Check([&] { return CheckRules(app, flags); });
  return app.Run(argc, argv,
                 [&](shardwright::cli::Context& context) { return Plan(context, flags); });
}
