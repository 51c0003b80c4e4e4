// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "common/outputs.h"
#include "common/pec.h"
#include "partial/planner/agent_bandwidths.h"
#include "partial/planner/plan.h"
#include "pec-save/agent_plan.h"
#include "pec-save/ask_agent.h"
#include "pec-save/job_flags.h"
#include "pec-save/save_flags.h"
#include "pec-save/subcommands.h"

namespace shardwright::apps {
namespace {

constexpr std::uint64_t kMostCheckpoints = 100'000;
constexpr std::uint64_t kMostWorkers = 1'000'000;
constexpr std::uint64_t kMostStages = 10'000;

/// A flag that requires at least one of several other flags.
struct Need {
  const char* flag;
  std::array<const char*, 4> any;  // null: unused
};

constexpr Need kNeeds[] = {
    {"--pp", {"--copies", "--micro-batches"}},
    {"--copy-bandwidth", {"--copies"}},
    {"--full-every", {"--gradients"}},
    {"--gradient-budget", {"--gradients"}},
    {"--forward-time", {"--micro-batches"}},
    {"--backward-time", {"--micro-batches"}},
    {"--chunks", {"--micro-batches"}},
    {"--micro-batches", {"--forward-time"}},
    {"--micro-batches", {"--backward-time"}},
    {"--capacity", {"--lost-tokens"}},
    {"--lost-tokens", {"--capacity"}},
    {"--checkpoint-time", {"--retrieval-time"}},
    {"--iteration-time", {"--retrieval-time", "--host-bandwidth", "--agent"}},
    {"--host-bandwidth", {"--iteration-time"}},
    {"--agent", {"--iteration-time"}},
    {"--snapshot-bandwidth", {"--micro-batches", "--retrieval-time"}},
    {"--interval", {"--gradients", "--retrieval-time", "--dynamic-k"}},
    {"--ranks-per-node", {"--copies", "--dynamic-k", "--network-bandwidth", "--agent"}},
    {"--agents", {"--copies"}},
    {"--agents", {"--output"}},
    {"--output", {"--agents"}},
    {"--force", {"--output"}},
    {"--lost-share", {"--dynamic-k"}}};

Status CheckNeeds(const cli::App& app, partial::Policy policy) {
  for (const Need& need : kNeeds) {
    if (!app.IsSet(need.flag)) continue;
    // With gradient-log, the gradients of every iteration in between are logged.
    const std::string_view name = need.flag;
    const bool of_log = name == "--interval" || name == "--full-every";
    if (policy == partial::Policy::kReplay && of_log) continue;
    bool there = false;
    std::string names;
    for (const char* flag : need.any) {
      if (flag == nullptr) continue;
      there = there || app.IsSet(flag);
      names += (names.empty() ? "" : " or ") + std::string(flag);
    }
    if (there) continue;
    return Fail(Errc::kUsage, need.flag, " requires ", names);
  }
  return {};
}

struct PlanFlags {
  partial::PlanRequest request;
  SelectionFlags selection;
  JobFlags job;
  std::string agent;
  KeyFlags key;
  std::string dead_ranks;
  std::vector<std::string> agents;
  std::string output;
  std::optional<double> forward_s;
  std::optional<double> backward_s;
  std::optional<std::uint64_t> lost_tokens;

  void AddTo(cli::App& app);
  /// Checks rules that combine several flags, and completes `request`.
  Status CheckRules(const cli::App& app);
  /// Asks the agent for its bandwidths, if there is one, and sets them in `request`.
  /// \error as ConnectAgent, AskStatus, partial::BandwidthsOf and CheckMeasured
  Status AskAgent(cli::Context& context);

 private:
  Status CheckPairs(const cli::App& app) const;
  Status CheckBandwidths(const cli::App& app) const;
  Status CheckAgent(const cli::App& app);
};

void PlanFlags::AddTo(cli::App& app) {
  app.ShowInShortHelp({"--k", "--policy", "--tokens", "--checkpoints", "--zero", "--copies"});
  app.Group("Plan");
  app.AddCount("--checkpoints", &request.checkpoints, 1, kMostCheckpoints,
               "checkpoints to plan, each complete before the next");
  app.AddCount("--zero", &request.zero_stage, 0, 3,
               "ZeRO stage. From stage 1, each rank saves its part of the optimizer state; with "
               "stage 3, also of the weights");
  app.AddSize("--split-above", &request.split_above,
              "split larger non-expert modules evenly; 0: never");
  app.AddText("--dead-ranks", &dead_ranks, "data-parallel ranks that save nothing, such as 0-3,7",
              "LIST");
  app.AddCount("--interval", &request.interval, 1, kMany, "iterations between checkpoints");
  selection.AddTo(app);
  app.AddCount("--iterations", &request.iterations, 1, kMany,
               "dynamic K: length of the run in iterations");
  app.AddReal("--lost-share", &request.lost_share, 0, 1,
              "dynamic K: share of copies that a fault destroys [default: one node]");
  job.AddTo(app, &request.job, true);
  app.Group("Budgets from bandwidths");
  app.AddBandwidth("--host-bandwidth", &request.host_bandwidth,
                   "bytes per second from a device to host memory. With --iteration-time it "
                   "replaces --budget; 0: off (docs/pec-planning.md)");
  app.AddBandwidth("--network-bandwidth", &request.network_bandwidth,
                   "bytes per second from a rank to other nodes. Selects which experts of a "
                   "snapshot are sent there in the same iteration; 0: none");
  app.AddText("--agent", &agent,
              "take both bandwidths from the copies that a running agent has made", "ADDRESS");
  key.AddTo(app);
  app.Group("Copies on other nodes");
  app.AddCount("--copies", &request.copies, 1, kMostWorkers,
               "number of copies of each worker's part of a snapshot on other nodes");
  app.AddCount(
      "--pp", &request.pipeline_stages, 1, kMostStages,
      "number of pipeline stages of --dp workers each; sizes and layers apply to one stage");
  app.AddBandwidth("--copy-bandwidth", &request.copy_bandwidth,
                   "bytes per second of a worker to other nodes; 0: no times");
  app.AddList("--agents", &agents,
              "write an agent plan for these agents, one for each node in the order of ranks, "
              "separated by commas",
              "[NAME=]ADDRESS");
  app.AddText("-o,--output", &output, "file for the agent plan", "FILE");
  app.Group("Gradients instead of state");
  app.AddFlag("--gradients", &request.gradients,
              "send gradients, not state, for experts sent in the iteration before");
  app.AddCount("--full-every", &request.full_every, 1, kMany,
               "consecutive gradients of an expert between two states");
  app.AddSize("--gradient-budget", &request.gradient_budget,
              "bytes per iteration. The rule of least bytes decides what to send; the rest of the "
              "budget is used for the states of experts with the longest chains of gradients "
              "(docs/pec-planning.md)");
  app.Group("Pipeline bubbles");
  app.AddCount("--micro-batches", &request.micro_batches, 1, kMostWorkers,
               "micro-batches per iteration; shows how much data fits into the bubbles");
  app.AddReal("--forward-time", &forward_s, 0, 1e6,
              "seconds of the forward pass of a micro-batch through a stage");
  app.AddReal("--backward-time", &backward_s, 0, 1e6,
              "seconds of the backward pass of a micro-batch through a stage");
  app.AddCount("--chunks", &request.chunks, 1, kMostWorkers,
               "number of interleaved model chunks per stage");
  app.Group("Cost of a failure");
  app.AddCount("--capacity", &request.capacity, 1, kMany,
               "number of tokens that an expert can process per iteration");
  app.AddCount("--lost-tokens", &lost_tokens, 0, kMany,
               "tokens that an expert lost, made up for with 10 % more capacity");
  app.AddReal("--checkpoint-time", &request.checkpoint_s, 0, 1e7,
              "seconds per checkpoint [default: time to copy the largest share]");
  app.AddReal("--retrieval-time", &request.retrieval_s, 0, 1e7,
              "seconds to load a checkpoint; shows the time that a failure wastes");
}

Status PlanFlags::CheckPairs(const cli::App& app) const {
  if (app.IsSet("--dead-ranks") && request.copies) {
    return Fail(Errc::kUsage,
                "--copies cannot be combined with --dead-ranks: copies are placed on all workers");
  }
  if (request.checkpoint_s && !request.micro_batches) {
    SW_TRY(app.Exclude({"--snapshot-bandwidth"}, "--checkpoint-time"));
  }
  if (request.pipeline_stages > 1 && !request.job.store.empty()) {
    SW_TRY(app.Exclude({"--pp"},
                       "the store " + request.job.store + ": its modules are those of all stages"));
  }
  if (selection.tokens.empty()) return {};
  return app.Exclude({"--experts", "--moe-layers"}, "--tokens: the file provides them");
}

Status PlanFlags::CheckBandwidths(const cli::App& app) const {
  if (selection.policy != partial::Policy::kBudget &&
      selection.policy != partial::Policy::kBudgetGlobal) {
    SW_TRY(app.Require({"--host-bandwidth", "--agent"}, "--policy budget or budget-global"));
  }
  if (request.network_bandwidth > 0) {
    if (request.host_bandwidth == 0 && agent.empty()) {
      return Fail(Errc::kUsage,
                  "--network-bandwidth requires --host-bandwidth or --agent: only experts in host "
                  "memory are sent to other nodes");
    }
    SW_TRY(app.Exclude({"--dead-ranks"}, "--network-bandwidth: all workers send"));
  }
  if (request.host_bandwidth == 0 && agent.empty()) return {};
  return app.Exclude({"--k", "--k-persist", "--budget", "--dynamic-k"},
                     std::string(agent.empty() ? "--host-bandwidth" : "--agent") +
                         ", which determines the number of experts");
}

Status PlanFlags::CheckAgent(const cli::App& app) {
  if (agent.empty()) return app.Require({"--key", "--insecure", "--trust-user"}, "--agent");
  SW_TRY(app.Exclude({"--host-bandwidth"}, "--agent, which has measured it"));
  SW_TRY(app.Exclude({"--dead-ranks"}, "--agent, which copies for all ranks"));
  if (request.network_bandwidth == 0) {
    SW_TRY(
        app.Exclude({"--copies"}, "--agent without --network-bandwidth: copies go to its peers"));
  }
  return key.CheckRules(app, {agent});
}

Status PlanFlags::AskAgent(cli::Context& context) {
  if (agent.empty()) return {};
  SW_TRY_ASSIGN(const auto client, ConnectAgent(context, agent, key));
  SW_TRY_ASSIGN(const nlohmann::json status, AskStatus(*client, agent));
  SW_TRY_ASSIGN(request.agent, partial::BandwidthsOf(status, agent));
  return partial::CheckMeasured(*request.agent, request.network_bandwidth == 0, agent);
}

Status PlanFlags::CheckRules(const cli::App& app) {
  SW_TRY(selection.CheckRules(app));
  SW_TRY(job.Complete(app, &request.job));
  SW_TRY(CheckNeeds(app, selection.policy));
  SW_TRY(CheckPairs(app));
  SW_TRY(CheckBandwidths(app));
  SW_TRY(CheckAgent(app));
  request.policy = selection.policy;
  request.k = selection.k;
  request.k_persist = selection.k_persist;
  request.max_age = selection.max_age;
  request.budget_bytes = selection.budget;
  request.tokens = selection.tokens;
  request.dynamic_limit = selection.dynamic_k;
  request.dynamic_predicts = selection.dynamic_k_mode == "predict";
  request.forward_s = forward_s.value_or(0);
  request.backward_s = backward_s.value_or(0);
  request.lost_tokens = lost_tokens.value_or(0);
  if (auto places = ParsePlaces(agents); !places) {
    return Within("--agents", std::move(places).error());
  }
  if (dead_ranks.empty()) return {};
  auto dead = ParseRanks(dead_ranks);
  if (!dead) return Within("--dead-ranks", std::move(dead).error());
  request.dead_ranks = *std::move(dead);
  return {};
}

}  // namespace

int PlanMain(int argc, const char* const* argv) {
  cli::App app(
      "pec-save plan",
      "Show the next checkpoints of a store, or of a model with the given sizes: bytes, experts, "
      "and the share of each rank.",
      {{"store/ --ep 8 --dp 16 --checkpoints 4", "Plans the next four checkpoints of a store."},
       {"--k 2 --dp 16 --ep 8", "Plans a checkpoint with the sizes of GPT-350M-16E."}});
  PlanFlags flags;
  app.Use({cli::Shared::kForce});
  flags.AddTo(app);
  app.Check([&] { return flags.CheckRules(app); });
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    SW_TRY(CheckOutputs(context, {flags.output}));
    SW_TRY_ASSIGN(const std::vector<partial::AgentPlace> places, ParsePlaces(flags.agents));
    SW_TRY(flags.AskAgent(context));
    SW_TRY_ASSIGN(const partial::PlanAnswer answer,
                  partial::PlanCheckpoints(flags.request, context.sink()));
    SW_TRY_ASSIGN(nlohmann::json result, partial::PlanJson(answer));
    context.out() << partial::PlanText(answer);
    if (!places.empty()) {
      SW_TRY(WriteAgentPlan(context, answer, places, flags.output, &result));
    }
    context.SetResult(std::move(result));
    return {};
  });
}

}  // namespace shardwright::apps
