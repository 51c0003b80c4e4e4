// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "common/outputs.h"
#include "moe-replace/flags.h"
#include "moe-replace/show.h"
#include "placement/failure_simulation/failures_page.h"
#include "placement/planning/planning_json.h"
#include "placement/planning/planning_text.h"
#include "support/base/limits.h"
#include "support/text/text.h"

namespace shardwright::apps {
namespace {

Status CheckForce(const cli::App& app, const MoeFlags& flags) {
  if (!flags.report.empty() || !app.IsSet("--force")) return {};
  return Fail(Errc::kUsage, "--force requires --html");
}

Status Compare(cli::Context& context, MoeFlags flags) {
  flags.AddShared(context.flags());
  const placement::PlanRequest& request = flags.request;
  SW_TRY(CheckOutputs(context, {flags.report}));
  SW_TRY_ASSIGN(const placement::PlanInput input,
                placement::ReadPlanInput(context.comm(), request, context.sink()));
  SW_TRY_ASSIGN(const std::vector<placement::PlannedRow> rows,
                placement::PlanWithAll(context.comm(), request, input, context.sink()));
  return context.comm().OnRoot([&]() -> Status {
    context.out() << placement::ComparisonText(request, input, rows);
    context.SetResult(placement::ComparisonJson(request, input, rows));
    const placement::PlannedRow* const chosen = placement::FirstPlan(rows);
    if (chosen == nullptr)
      return Fail(Errc::kInfeasible,
                  "no strategy found a feasible plan; the table shows the reason of each strategy");
    if (flags.report.empty()) return {};
    context.sink().Pass("write");
    return WriteText(context, flags.report,
                     placement::PlanPage(request, input, *chosen, rows, context.sink()));
  });
}

Status Evaluate(cli::Context& context, MoeFlags flags, const std::string& plan) {
  flags.AddShared(context.flags());
  const placement::PlanRequest& request = flags.request;
  SW_TRY(CheckOutputs(context, {flags.report}));
  return context.comm().OnRoot([&]() -> Status {
    SW_TRY_ASSIGN(const placement::EvaluatedPlan found,
                  placement::EvaluatePlan(request, plan, context.sink()));
    if (!flags.report.empty()) {
      context.sink().Pass("write");
      const std::string page =
          placement::PlanPage(request, found.input, found.row, {}, context.sink());
      SW_TRY(WriteText(context, flags.report, page));
    }
    ShowPlan(context, flags, found.input, found.row, "");
    return placement::CheckEvaluated(request, found.row);
  });
}

}  // namespace

int CompareMain(int argc, const char* const* argv) {
  cli::App app("moe-replace compare", "Compare the plans of all strategies in one table.",
               {{"loads.jsonl --cluster cluster.json", "Compares all strategies."}});
  MoeFlags flags;
  app.Use({cli::Shared::kForce, cli::Shared::kTakeOver, cli::Shared::kThreads, cli::Shared::kSeed});
  flags.AddLoadsTo(app);
  flags.AddInputTo(app, true);
  app.Group("Plans");
  flags.AddStrategyOptionsTo(app, true);
  flags.AddTimesTo(app);
  app.Group("Outputs");
  flags.AddReportTo(app);
  app.Check([&]() -> Status {
    SW_TRY(flags.CheckRules(app, true));
    if (flags.request.old_plan.empty() && app.IsSet("--map")) {
      return Fail(Errc::kUsage, "--map requires --old");
    }
    return CheckForce(app, flags);
  });
  return app.Run(argc, argv, [&](cli::Context& context) { return Compare(context, flags); });
}

int SimulateFailuresMain(int argc, const char* const* argv) {
  cli::App app("moe-replace simulate-failures",
               "Simulate nodes that fail and join during a recorded run.",
               {{"loads.jsonl nodes.csv --nodes 32 --gpus 1 --slots 4",
                 "Simulates the failures and arrivals in nodes.csv on 32 equal nodes."}});
  MoeFlags flags;
  placement::EventsRequest events;
  events.strategy = "best";
  bool compare = false;
  app.Use({cli::Shared::kForce, cli::Shared::kTakeOver, cli::Shared::kThreads, cli::Shared::kSeed});
  flags.AddLoadsTo(app);
  app.AddInput(&events.events, "nodes that fail and join (docs/formats/loads.md)", "EVENTS");
  app.ShowInShortHelp({"--compare", "--rebalance-every", "--iteration-seconds"});
  app.AddFlag("--compare", &compare, "simulate every strategy and compare them in one table");
  app.AddReal("--iteration-seconds", &events.iteration_seconds, 0, 1e6,
              "seconds per iteration; 0 spreads the run over the events");
  app.AddCount("--rebalance-every", &events.rebalance_every, 0, limits::kMoeTokens,
               "iterations between two plans while no node fails or joins; 0: never");
  flags.AddInputTo(app, false);
  app.Group("Plans");
  AddStrategy(app, &events.strategy);
  flags.AddStrategyOptionsTo(app, false);
  AddThroughput(app, &events);
  app.Group("Outputs");
  app.AddText("--html", &flags.report, "HTML report with a timeline to write, as a single file",
              "FILE");
  app.Check([&]() -> Status {
    SW_TRY(flags.CheckRules(app, true));
    SW_TRY(CheckForce(app, flags));
    SW_TRY(CheckThroughput(app, events));
    flags.request.options.copies_may_fall = true;
    if (!compare) return flags.CheckKnown(app, events.strategy, true, false);
    SW_TRY(app.Exclude({"--strategy"}, "--compare"));
    events.strategy.clear();
    return {};
  });
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    flags.AddShared(context.flags());
    SW_TRY(CheckOutputs(context, {flags.report}));
    SW_TRY_ASSIGN(const placement::FailureSimulations simulations,
                  placement::SimulateEvents(context.comm(), flags.request, events, context.sink()));
    return context.comm().OnRoot([&]() -> Status {
      context.out() << placement::FailureSimulationsText(events.events, simulations);
      context.SetResult(placement::FailureSimulationsJson(simulations));
      if (flags.report.empty()) return {};
      const std::string page =
          placement::FailuresPageText({simulations.results, text::Printable(events.events),
                                       simulations.cluster.expert_bytes > 0});
      return WriteText(context, flags.report, page);
    });
  });
}

int EvaluateMain(int argc, const char* const* argv) {
  cli::App app("moe-replace evaluate",
               "Measure an existing plan of any format; exit with code 5 if it survives fewer "
               "failures than --faults.",
               {{"theirs.json loads.jsonl", "Measures a plan that another program wrote."}});
  MoeFlags flags;
  std::string plan;
  app.Use({cli::Shared::kForce, cli::Shared::kTakeOver, cli::Shared::kThreads, cli::Shared::kSeed});
  app.AddInput(&plan, "plan to measure, of any format (docs/formats/plan.md)", "PLAN");
  flags.AddLoadsTo(app);
  flags.AddInputTo(app, true);
  app.Group("Plan");
  flags.AddFaultsTo(app);
  flags.AddTimesTo(app);
  app.Group("Outputs");
  flags.AddReportTo(app);
  app.Check([&]() -> Status {
    SW_TRY(flags.CheckRules(app, false));
    if (!flags.request.cost.given()) SW_TRY(app.Require({"--nonmoe-seconds"}, "--gpu-flops"));
    return CheckForce(app, flags);
  });
  return app.Run(argc, argv, [&](cli::Context& context) { return Evaluate(context, flags, plan); });
}

}  // namespace shardwright::apps
