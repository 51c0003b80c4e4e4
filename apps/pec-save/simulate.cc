// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "common/outputs.h"
#include "partial/planner/simulation.h"
#include "pec-save/job_flags.h"
#include "pec-save/save_flags.h"
#include "pec-save/subcommands.h"
#include "support/base/checked.h"
#include "support/text/text.h"

namespace shardwright::apps {
namespace {

struct SimulateFlags {
  partial::SimulateRequest request;
  JobFlags job;
  partial::Policy policy = partial::Policy::kSequential;
  std::string faults = "0.02";
  std::string csv;
  std::string page;

  void AddTo(cli::App& app);
  Status CheckRules(const cli::App& app);

 private:
  Status CheckPolicy(const cli::App& app) const;
  Status ReadFaults(const cli::App& app);
};

/// Parses a number as a rate. Returns nothing for other texts, which are paths.
std::optional<double> AsRate(const std::string& text) {
  const auto rate = NumberIn<double>(text);
  return rate && std::isfinite(*rate) ? rate : std::nullopt;
}

void SimulateFlags::AddTo(cli::App& app) {
  app.AddInput(&request.tokens, "token counts per expert and iteration (docs/formats/loads.md)",
               "TOKENS");
  app.ShowInShortHelp({"--faults", "--interval", "--policy", "--k", "--html", "--plt-limit"});
  app.Group("Run");
  app.AddText("--faults", &faults,
              "file of lines \"ITERATION NODE,NODE\" (no nodes: no memory is lost), or rate of "
              "random faults per iteration",
              "FILE|RATE");
  app.AddReal("--node-share", &request.node_share, 0, 1,
              "share of the random faults that destroy the memory of a node");
  app.AddCount("--interval", &request.interval, 1, kMany, "iterations between checkpoints");
  app.AddFlag("--partial-start", &request.partial_start,
              "select experts also for the first checkpoint, which otherwise has all experts");
  app.AddReal("--plt-limit", &request.plt_limit, 1e-9, 1, "acceptable share of lost tokens");
  app.Group("Policies to simulate (without these flags: every policy with K of 1, 2, 4, ...)");
  app.AddEnum<partial::Policy>("--policy", &policy, PolicyWords(), "simulate only this policy");
  app.AddCount("--k", &request.k, 1, 65536, "simulate only this K");
  app.AddCount("--k-persist", &request.k_persist, 1, 65536,
               "number of selected experts of each layer to persist [default: all]");
  app.AddCount("--max-age", &request.max_age, 1, kMany,
               "load-aware: number of checkpoints after which an unsaved expert is selected first "
               "[default: 4 rounds]");
  app.AddReal(
      "--dynamic-k", &request.dynamic_limit, 1e-9, 1,
      "also simulate a K that doubles when its part of this share of lost tokens is used up");
  app.AddSize("--budget", &request.budget_bytes,
              "gradient-log: bytes per iteration, log included, instead of K; 0: no budget");
  app.AddFlag("--gradients", &request.gradients,
              "also compute the bytes that MoEtion's rule and the rule of least bytes would send "
              "for all experts");
  app.AddCount("--full-every", &request.full_every, 1, kMany,
               "number of consecutive gradients of an expert, after which its state is sent");
  app.AddSize("--gradient-budget", &request.gradient_budget,
              "bytes per iteration for the rule of least bytes; the rest of the budget is used for "
              "the states of experts with the longest chains of gradients; 0: no budget");
  job.AddTo(app, &request.job, false);
  AddStepTimes(app, &request.job);
  app.Group("Outputs");
  app.AddText("--csv", &csv, "also write the rows to this CSV file", "FILE");
  app.AddText("--html", &page, "also write an HTML report with curves and rows", "FILE");
}

Status SimulateFlags::CheckPolicy(const cli::App& app) const {
  if (app.IsSet("--policy") && policy != partial::Policy::kLoadAware) {
    SW_TRY(app.Require({"--max-age"}, "--policy load-aware"));
  }
  if (app.IsSet("--policy") && policy == partial::Policy::kFull) {
    SW_TRY(app.Exclude({"--k", "--k-persist"}, "--policy full, which saves all experts"));
  }
  if (!request.k) SW_TRY(app.Require({"--k-persist"}, "--k"));
  if (request.k_persist && *request.k_persist > *request.k) {
    return Fail(Errc::kUsage, "--k-persist ", *request.k_persist, " is larger than --k ",
                *request.k);
  }
  const bool replays = !app.IsSet("--policy") || policy == partial::Policy::kReplay;
  if (!request.gradients) {
    SW_TRY(app.Require({"--gradient-budget"}, "--gradients"));
    if (!replays) SW_TRY(app.Require({"--full-every"}, "--gradients or --policy gradient-log"));
  }
  if (!replays) SW_TRY(app.Require({"--budget"}, "--policy gradient-log"));
  if (policy == partial::Policy::kReplay && app.IsSet("--policy")) {
    SW_TRY(app.Exclude({"--k-persist"}, "--policy gradient-log, which has one K"));
  }
  if (!request.dynamic_limit) return {};
  if (app.IsSet("--policy") && policy != partial::Policy::kSequential) {
    return Fail(Errc::kUsage, "--dynamic-k requires --policy sequential, found ",
                partial::Name(policy));
  }
  return app.Exclude({"--k-persist"}, "--dynamic-k: its K applies to memory and to storage");
}

Status SimulateFlags::ReadFaults(const cli::App& app) {
  if (const std::optional<double> rate = AsRate(faults)) {
    request.fault_rate = *rate;
    return {};
  }
  request.fault_file = faults;
  return app.Exclude({"--node-share", "--seed"},
                     "--faults " + faults + ", because a file has no random faults");
}

Status SimulateFlags::CheckRules(const cli::App& app) {
  if (csv.empty() && page.empty()) SW_TRY(app.Require({"--force"}, "--csv or --html"));
  if (!page.empty() && page == csv) {
    return Fail(Errc::kUsage, "--csv and --html must be different files, found ", page);
  }
  SW_TRY(CheckPolicy(app));
  if (app.IsSet("--policy")) request.policy = policy;
  SW_TRY(ReadFaults(app));
  return job.Complete(app, &request.job);
}

Status Simulate(cli::Context& context, const SimulateFlags& flags) {
  SW_TRY(CheckOutputs(context, {flags.csv, flags.page}));
  partial::SimulateRequest request = flags.request;
  request.seed = context.flags().seed;
  SW_TRY_ASSIGN(const partial::Simulation simulation,
                partial::SimulateTrace(request, context.sink()));
  context.SetResult(partial::SimulationJson(simulation));
  context.out() << partial::SimulationText(simulation);
  return context.comm().OnRoot([&]() -> Status {
    if (!flags.csv.empty()) {
      SW_TRY(WriteText(context, flags.csv, partial::SimulationCsv(simulation.rows)));
    }
    if (flags.page.empty()) return {};
    const auto page = partial::PageOf(simulation, text::Printable(request.tokens));
    return WriteText(context, flags.page, partial::PageText(page));
  });
}

}  // namespace

int SimulateMain(int argc, const char* const* argv) {
  cli::App app("pec-save simulate",
               "Simulate a trace of token counts with every policy and K, or with the given ones, "
               "and show what each saves, loses and costs.",
               {{"tokens.jsonl --faults 0.02 --interval 10",
                 "Simulates the trace with the sizes of GPT-350M-16E."},
                {"tokens.jsonl store/ --html simulation.html",
                 "Uses the sizes of a store and writes an HTML report."}});
  SimulateFlags flags;
  app.Use({cli::Shared::kForce, cli::Shared::kTakeOver, cli::Shared::kSeed});
  flags.AddTo(app);
  app.Check([&] { return flags.CheckRules(app); });
  return app.Run(argc, argv, [&](cli::Context& context) { return Simulate(context, flags); });
}

}  // namespace shardwright::apps
