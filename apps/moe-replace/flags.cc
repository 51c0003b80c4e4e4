#include "moe-replace/flags.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/limits.h"

namespace shardwright::apps {
namespace {

constexpr std::uint64_t kMostIterations = UINT64_MAX - 1;

tl::unexpected<Error> Usage(std::string message) { return Fail(Errc::kUsage, std::move(message)); }

/// Flags that only some strategies know: with others they would silently do nothing.
struct Known {
  const char* flag = nullptr;
  std::array<std::string_view, 5> strategies;
};
constexpr Known kKnown[] = {
    {"--objective", {"best", "lazarus"}},
    {"--recovery-loss", {"lazarus"}},
    {"--distinct", {"lazarus"}},
    {"--map", {"lazarus", "spread", "compact"}},
    {"--policy", {"eplb", "eplb+"}},
    {"--groups", {"eplb", "eplb+"}},
    {"--effort", {"best"}},
    {"--overlap", {"hecate"}},
    {"--spare", {"hecate"}},
    {"--nonmoe-seconds", {"hecate"}},
};
/// Flags whose effect on a single plan is checked afterwards; in a replay nobody would notice.
constexpr Known kKnownInReplays[] = {
    {"--faults", {"best", "lazarus", "spread", "compact", "vanilla"}},
    {"--unit", {"best", "lazarus", "spread", "compact"}},
};

bool Knows(const Known& known, std::string_view strategy) {
  return std::find(known.strategies.begin(), known.strategies.end(), strategy) !=
         known.strategies.end();
}

}  // namespace

void MoeFlags::AddLoadsTo(cli::App& app) {
  app.AddInput(&request.loads, "token counts: JSONL, JSON, CSV, a dump of SGLang or vLLM, a folder",
               "LOADS");
}

void MoeFlags::AddInputTo(cli::App& app, bool at) {
  app.Daily({"--cluster", "--nodes", "--gpus", "--slots"});
  app.Group("Cluster and loads");
  moe::ClusterRequest& cluster = request.cluster;
  app.AddText("--cluster", &cluster.file, "description of nodes, GPUs, slots and bandwidths",
              "FILE");
  app.AddCount("--nodes", &cluster.nodes, 1, limits::kMoeNodes,
               "number of equal nodes, without --cluster");
  app.AddCount("--gpus", &cluster.gpus, 1, limits::kMoeDevices, "GPUs per node");
  app.AddCount("--slots", &slots_, 0, limits::kMoeSlots, "expert replicas of one layer per GPU");
  app.AddSize("--expert-bytes", &cluster.expert_bytes,
              "what moves with an expert: weights, master weights and moments; 0 is not told");
  app.AddCount("--window", &request.window.window, 1, limits::kMoeCounts,
               "iterations whose mean is taken");
  app.AddText("--layers", &layers_, "layers to plan, as 0-11,14", "LIST");
  if (!at) return;
  app.AddCount("--at", &request.window.at, 0, kMostIterations,
               "plan for the loads up to this iteration, without it for the last ones");
  app.AddCount("--measured-at", &request.measured_at, 0, kMostIterations,
               "measure balance on the loads of another iteration: how plans age");
}

void MoeFlags::AddFaultsTo(cli::App& app) {
  app.Daily({"--faults"});
  app.AddCount("--faults", &request.faults, 0, limits::kMoeNodes,
               "failures that must be survived, whichever they are");
  app.AddEnum<moe::FailureUnit>(
      "--unit", &request.options.failure_unit,
      {{"node", moe::FailureUnit::kNode}, {"rack", moe::FailureUnit::kRack}}, "what fails at once");
}

void MoeFlags::AddStrategyOptionsTo(cli::App& app, bool moves) {
  AddFaultsTo(app);
  moe::Options& options = request.options;
  if (moves) {
    app.Daily({"--old"});
    app.AddText("--old", &request.old_plan,
                "plan that the GPUs hold now: what need not move is kept", "PLAN");
    app.AddFlag("--forward", &request.forward,
                "a node may send on an expert that it has just received");
  }
  app.AddChoice("--objective", &objective_, {"balance", "recovery", "mixed"},
                "what decides where both cannot be had, without it what the strategy was made for");
  app.AddReal("--recovery-loss", &options.recovery_loss, 0, 1,
              "recovery probability that mixed may give up for balance");
  app.AddEnum<moe::NodeMap>("--map", &options.node_map,
                            {{"joint", moe::NodeMap::kJoint},
                             {"greedy", moe::NodeMap::kGreedy},
                             {"per-layer", moe::NodeMap::kPerLayer},
                             {"none", moe::NodeMap::kNone}},
                            "how nodes of the plan are matched with those of --old");
  app.AddFlag("--distinct", &options.distinct, "lazarus: no more replicas of an expert than nodes");
  app.AddEnum<moe::EplbPolicy>("--policy", &options.eplb_policy,
                               {{"auto", moe::EplbPolicy::kAuto},
                                {"hierarchical", moe::EplbPolicy::kHierarchical},
                                {"global", moe::EplbPolicy::kGlobal}},
                               "eplb: pack groups of experts to nodes first, or not");
  app.AddCount("--groups", &groups_, 1, limits::kMoeExperts, "expert groups of the model's router");
  app.AddCount("--effort", &effort_, 0, 1000, "best: how long it searches, in steps per slot");
  app.AddCount("--overlap", &overlap_, 0, limits::kMoeExperts,
               "hecate: experts that can be sent while other layers compute (t)");
  app.AddCount("--spare", &spare_, 0, limits::kMoeSlots,
               "hecate: foreign experts that fit on a GPU (m)");
  app.AddReal("--nonmoe-seconds", &options.hecate.nonmoe_seconds, 0, 3600,
              "hecate: time between two MoE layers, from which t follows");
}

void MoeFlags::AddReportTo(cli::App& app) {
  app.Daily({"--report"});
  app.AddText("--report", &report, "page to look at, in one HTML file", "FILE");
  app.AddCount("--failures", &request.failures, 1, 512,
               "failures up to which survival is worked out");
  app.AddReal("--node-failure", &request.node_failure, 0, 1,
              "probability that a node fails, for the survival of a plan");
}

Status MoeFlags::CheckCluster(const cli::App& app, bool needed) const {
  const moe::ClusterRequest& cluster = request.cluster;
  if (!cluster.file.empty()) {
    for (const char* flag : {"--nodes", "--gpus", "--slots", "--expert-bytes"}) {
      if (app.Given(flag)) return Usage(std::string(flag) + " and --cluster exclude each other");
    }
    return {};
  }
  const bool begun = cluster.nodes != 0 || cluster.gpus != 0 || slots_.has_value();
  const bool whole = cluster.nodes != 0 && cluster.gpus != 0 && slots_.has_value();
  if ((begun || needed) && !whole) {
    return Usage("a cluster is missing: give --cluster, or --nodes, --gpus and --slots");
  }
  if (!begun || cluster.gpus <= limits::kMoeDevices / cluster.nodes) return {};
  return Usage("--nodes " + std::to_string(cluster.nodes) + " --gpus " +
               std::to_string(cluster.gpus) + ": more than " + std::to_string(limits::kMoeDevices) +
               " gpus");
}

Status MoeFlags::CheckRules(const cli::App& app, bool cluster_needed) {
  SW_TRY(CheckCluster(app, cluster_needed));
  request.cluster.slots = slots_.value_or(0);
  if (!layers_.empty()) {
    SW_TRY_ASSIGN(request.window.layers, loads::ParseLayers(layers_));
  }
  if (objective_ != "mixed" && app.Given("--recovery-loss")) {
    return Usage("--recovery-loss needs --objective mixed");
  }
  if (request.old_plan.empty() && request.forward) return Usage("--forward needs --old");
  if (overlap_ && app.Given("--nonmoe-seconds")) {
    return Usage("--overlap and --nonmoe-seconds exclude each other");
  }
  moe::Options& options = request.options;
  if (objective_ == "balance") options.objective = moe::Objective::kBalance;
  if (objective_ == "recovery") options.objective = moe::Objective::kRecovery;
  if (objective_ == "mixed") options.objective = moe::Objective::kMixed;
  options.copies_min = static_cast<std::uint32_t>(request.faults + 1);
  options.eplb_groups = static_cast<std::uint32_t>(groups_);
  options.best_effort = static_cast<std::uint32_t>(effort_);
  if (overlap_) options.hecate.overlap = static_cast<std::uint32_t>(*overlap_);
  if (spare_) options.hecate.spare = static_cast<std::uint32_t>(*spare_);
  return {};
}

void MoeFlags::AddShared(const cli::CommonFlags& common) {
  request.options.seed = common.seed;
  request.threads = common.threads;
}

Status MoeFlags::CheckKnown(const cli::App& app, const std::string& strategy, bool replayed,
                            bool writes_eplb) const {
  // Whoever wants recovery of best gets the plans of lazarus.
  const bool recovers = objective_ == "recovery" || objective_ == "mixed";
  const std::string planner = strategy == "best" && recovers ? "lazarus" : strategy;
  std::string with = "with --strategy " + strategy;
  if (!objective_.empty()) with += " --objective " + objective_;
  for (const Known& known : kKnown) {
    if (writes_eplb && std::string_view(known.flag) == "--groups") continue;
    if (!Knows(known, planner)) SW_TRY(app.Refuse({known.flag}, with));
  }
  for (const Known& known : kKnownInReplays) {
    if (!replayed || Knows(known, strategy)) continue;
    SW_TRY(app.Refuse({known.flag}, with + " in a replay: it keeps no copies apart"));
  }
  return {};
}

void AddStrategy(cli::App& app, std::string* strategy) {
  app.Daily({"--strategy"});
  std::vector<std::string> names;
  std::string what = "how replicas are placed.";
  for (const moe::Strategy& one : moe::Strategies()) {
    names.emplace_back(one.name);
    what.append(names.size() == 1 ? " " : "; ").append(one.name).append(": ").append(one.summary);
  }
  app.AddChoice("--strategy", strategy, names, what);
}

}  // namespace shardwright::apps
