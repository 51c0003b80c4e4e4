#include "moe-replace/flags.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "base/limits.h"
#include "moe/cluster_text.h"

namespace shardwright::apps {
namespace {

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

void MoeFlags::AddTo(cli::App& app) {
  app.AddInput(&loads, "token counts: JSONL, JSON, CSV, a dump of SGLang or vLLM, a folder",
               "LOADS");
  AddClusterFlags(app);
  AddLoadFlags(app);
  AddPlanFlags(app);
  AddTaskFlags(app);
  app.Check([this, &app]() { return Check(app); });
}

void MoeFlags::AddClusterFlags(cli::App& app) {
  app.AddText("--cluster", &cluster, "description of nodes, GPUs, slots and bandwidths", "FILE");
  app.AddCount("--nodes", &nodes, 1, limits::kMoeNodes, "number of equal nodes, without --cluster");
  app.AddCount("--gpus", &gpus, 1, limits::kMoeDevices, "GPUs per node");
  app.AddCount("--slots", &slots, 0, limits::kMoeSlots, "expert replicas of one layer per GPU");
  app.AddSize("--expert-bytes", &expert_bytes,
              "what moves with an expert: weights, master weights and moments; 0 is not told");
}

void MoeFlags::AddLoadFlags(cli::App& app) {
  app.AddCount("--at", &at, 0, kNoIteration - 1,
               "plan for the loads up to this iteration, without it for the last ones");
  app.AddCount("--window", &window, 1, limits::kMoeCounts,
               "iterations up to it whose mean is taken");
  app.AddText("--layers", &layers, "layers to plan, as 0-11,14", "LIST");
  app.AddCount("--measured-at", &measured_at, 0, kNoIteration - 1,
               "measure balance on the loads of another iteration: how plans age");
}

void MoeFlags::AddPlanFlags(cli::App& app) {
  std::vector<std::string> names;
  std::string what = "how replicas are placed.";
  for (const moe::Strategy& one : moe::Strategies()) {
    names.emplace_back(one.name);
    what.append(names.size() == 1 ? " " : "; ").append(one.name).append(": ").append(one.summary);
  }
  app.AddChoice("--strategy", &strategy, names, what);
  app.AddText("--old", &old_plan, "plan that the GPUs hold now: what need not move is kept",
              "PLAN");
  app.AddCount("--faults", &faults, 0, limits::kMoeNodes,
               "failures that must be survived, whichever they are");
  app.AddEnum<moe::FailureUnit>(
      "--unit", &options.failure_unit,
      {{"node", moe::FailureUnit::kNode}, {"rack", moe::FailureUnit::kRack}}, "what fails at once");
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
  app.AddFlag("--forward", &forward, "a node may send on an expert that it has just received");
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

void MoeFlags::AddTaskFlags(cli::App& app) {
  app.AddText("-o,--output", &output, "plan to write", "FILE");
  app.AddEnum<moe::PlanFormat>("--format", &format,
                               {{"plan", moe::PlanFormat::kPlan},
                                {"eplb", moe::PlanFormat::kEplb},
                                {"sglang", moe::PlanFormat::kSglang},
                                {"vllm", moe::PlanFormat::kVllm},
                                {"tensorrt-llm", moe::PlanFormat::kTensorrt},
                                {"vllm-ascend", moe::PlanFormat::kAscend}},
                               "who reads the plan");
  app.AddFlag("--compare", &compare, "plan with every strategy and show them in one table");
  app.AddText("--events", &events, "replay nodes that come and go over the run of the loads",
              "FILE");
  app.AddReal("--iteration-seconds", &iteration_seconds, 0, 1e6,
              "time of an iteration in --events; 0 spreads the run over the events");
  app.AddCount("--rebalance-every", &rebalance_every, 0, limits::kMoeTokens,
               "iterations between two plans in --events when no node comes or goes; 0 is never");
  app.AddText("--evaluate", &evaluate, "measure this plan, of any format, instead of making one",
              "PLAN");
  app.AddText("--report", &report, "page to look at, in one HTML file", "FILE");
  app.AddCount("--failures", &failures, 1, 512, "failures up to which survival is worked out");
  app.AddReal("--node-failure", &node_failure, 0, 1,
              "probability that a node fails, for the survival of a plan");
}

Task MoeFlags::task() const {
  if (!evaluate.empty()) return Task::kEvaluate;
  if (!events.empty()) return Task::kEvents;
  return compare ? Task::kCompare : Task::kPlan;
}

Status MoeFlags::CheckTask(const cli::App& app) const {
  const char* const task_flag = !evaluate.empty() ? "--evaluate"
                                : !events.empty() ? "--events"
                                : compare         ? "--compare"
                                                  : nullptr;
  if (task_flag == nullptr) return {};
  const auto refuse = [&](std::initializer_list<const char*> flags) -> Status {
    for (const char* flag : flags) {
      if (app.Given(flag)) return Usage(std::string(flag) + " means nothing with " + task_flag);
    }
    return {};
  };
  SW_TRY(refuse({"--output", "--format"}));
  if (!evaluate.empty()) {
    SW_TRY(refuse({"--compare", "--events", "--strategy", "--old", "--forward"}));
    for (const Known& known : kKnown) SW_TRY(refuse({known.flag}));
    return {};
  }
  if (!events.empty()) {
    SW_TRY(refuse({"--old", "--forward", "--measured-at", "--report", "--at", "--failures",
                   "--node-failure"}));
  }
  if (compare) SW_TRY(refuse({"--strategy"}));
  return {};
}

Status MoeFlags::CheckStrategy(const cli::App& app) const {
  if (objective_ != "mixed" && app.Given("--recovery-loss")) {
    return Usage("--recovery-loss needs --objective mixed");
  }
  if (old_plan.empty() && app.Given("--forward")) return Usage("--forward needs --old");
  if (old_plan.empty() && events.empty() && app.Given("--map")) return Usage("--map needs --old");
  if (app.Given("--overlap") && app.Given("--nonmoe-seconds")) {
    return Usage("--overlap and --nonmoe-seconds exclude each other");
  }
  if (compare || !evaluate.empty()) return {};
  // Whoever wants recovery of best gets the plans of lazarus.
  const bool recovers = objective_ == "recovery" || objective_ == "mixed";
  const std::string planner = strategy == "best" && recovers ? "lazarus" : strategy;
  std::string with = " means nothing with --strategy " + strategy;
  if (!objective_.empty()) with += " --objective " + objective_;
  for (const Known& known : kKnown) {
    const bool written = std::string_view(known.flag) == "--groups" &&
                         format == moe::PlanFormat::kEplb && !output.empty();
    if (app.Given(known.flag) && !written && !Knows(known, planner)) {
      return Usage(known.flag + with);
    }
  }
  for (const Known& known : kKnownInReplays) {
    if (!events.empty() && app.Given(known.flag) && !Knows(known, strategy)) {
      return Usage(known.flag + with + " in --events: it keeps no copies apart");
    }
  }
  return {};
}

Status MoeFlags::Check(const cli::App& app) {
  if (!cluster.empty()) {
    for (const char* flag : {"--nodes", "--gpus", "--slots", "--expert-bytes"}) {
      if (app.Given(flag)) return Usage(std::string(flag) + " and --cluster exclude each other");
    }
  } else if (nodes != 0 || gpus != 0 || slots != kNoSlots || evaluate.empty()) {
    if (nodes == 0 || gpus == 0 || slots == kNoSlots) {
      return Usage("a cluster is missing: give --cluster, or --nodes, --gpus and --slots");
    }
  }
  if (nodes != 0 && gpus > limits::kMoeDevices / nodes) {
    return Usage("--nodes " + std::to_string(nodes) + " --gpus " + std::to_string(gpus) +
                 ": more than " + std::to_string(limits::kMoeDevices) + " gpus");
  }
  if (!layers.empty()) SW_TRY(moe::ParseLayers(layers));
  SW_TRY(CheckTask(app));
  SW_TRY(CheckStrategy(app));
  if (output.empty() && app.Given("--format")) return Usage("--format needs --output");
  if (output.empty() && report.empty() && app.Given("--force")) {
    return Usage("--force needs --output or --report");
  }
  if (events.empty() && (app.Given("--iteration-seconds") || app.Given("--rebalance-every"))) {
    return Usage("--iteration-seconds and --rebalance-every need --events");
  }
  if (objective_ == "balance") options.objective = moe::Objective::kBalance;
  if (objective_ == "recovery") options.objective = moe::Objective::kRecovery;
  if (objective_ == "mixed") options.objective = moe::Objective::kMixed;
  options.copies_min = static_cast<std::uint32_t>(faults + 1);
  options.copies_may_fall = !events.empty();
  options.eplb_groups = static_cast<std::uint32_t>(groups_);
  options.best_effort = static_cast<std::uint32_t>(effort_);
  if (overlap_ != kNoIteration) {
    options.hecate.overlap = static_cast<std::uint32_t>(overlap_);
  }
  if (spare_ != kNoIteration) options.hecate.spare = static_cast<std::uint32_t>(spare_);
  return {};
}

Result<moe::LoadWindow> MoeFlags::Window() const {
  moe::LoadWindow chosen;
  if (at != kNoIteration) chosen.at = at;
  chosen.window = window;
  if (!layers.empty()) {
    SW_TRY_ASSIGN(chosen.layers, moe::ParseLayers(layers));
  }
  return chosen;
}

Result<moe::Cluster> MoeFlags::ReadCluster(std::uint32_t layer_count) const {
  if (!cluster.empty()) return moe::ReadCluster(cluster, layer_count);
  const std::uint64_t most = limits::kMoeSlots / (nodes * gpus);
  if (slots > most) {
    return Fail(Errc::kLimit, std::to_string(nodes * gpus) + " gpus of " + std::to_string(slots) +
                                  " slots: more than " + std::to_string(limits::kMoeSlots) +
                                  " slots");
  }
  moe::Cluster made =
      moe::UniformCluster(static_cast<std::uint32_t>(nodes), static_cast<std::uint32_t>(gpus),
                          static_cast<std::uint32_t>(slots));
  made.expert_bytes = expert_bytes;
  // Mixed precision with Adam keeps 14 bytes of a parameter, 2 of which are the weight.
  made.param_bytes = expert_bytes / 7;
  return made;
}

moe::JudgeOptions MoeFlags::Judging(std::uint64_t seed) const {
  moe::JudgeOptions judging;
  judging.unit = options.failure_unit;
  judging.recovery.failures_max = static_cast<std::uint32_t>(failures);
  judging.recovery.seed = seed;
  judging.forward = forward;
  return judging;
}

}  // namespace shardwright::apps
