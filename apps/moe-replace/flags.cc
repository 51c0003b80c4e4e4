// SPDX-License-Identifier: Apache-2.0
#include "moe-replace/flags.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <set>
#include <string_view>
#include <utility>

#include "support/base/bytes.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"

namespace shardwright::apps {
namespace {

constexpr std::uint64_t kMostIterations = UINT64_MAX - 1;

template <class... Parts>
tl::unexpected<Error> Usage(const Parts&... parts) {
  return Fail(Errc::kUsage, parts...);
}

/// Flags that only some strategies use. Others would silently ignore them.
struct Known {
  const char* flag = nullptr;
  std::array<std::string_view, 5> strategies;
};
constexpr Known kKnown[] = {
    {"--objective", {"best", "lazarus"}},
    {"--recovery-loss", {"lazarus"}},
    {"--distinct", {"lazarus"}},
    {"--map", {"lazarus", "spread", "compact"}},
    {"--policy", {"best", "eplb", "eplb+"}},
    {"--groups", {"best", "eplb", "eplb+"}},
    {"--effort", {"best"}},
    {"--everywhere", {"best", "eplb+"}},
    {"--pin", {"best"}},
    {"--affinity", {"best"}},
    {"--max-moves", {"best"}},
    {"--target-balance", {"best"}},
    {"--overlap", {"hecate"}},
    {"--spare", {"hecate"}},
    {"--nonmoe-seconds", {"hecate"}},
};
/// Flags with an effect on a single plan that is checked later. A simulated run has no such check.
constexpr Known kKnownInSimulations[] = {
    {"--faults", {"best", "lazarus", "spread", "compact", "vanilla"}},
    {"--unit", {"best", "lazarus", "spread", "compact"}},
};

/// Parses --max-moves: a count, a size or a share.
/// \error kUsage
Result<placement::MovesLimit> ParseMaxMoves(const std::string& text) {
  placement::MovesLimit limit;
  const char* const end = text.data() + text.size();
  std::uint64_t count = 0;
  const auto [rest, code] = std::from_chars(text.data(), end, count);
  double share = 0;
  const auto [unit, wrong] = std::from_chars(text.data(), end, share, std::chars_format::fixed);
  if (code == std::errc() && rest == end && count > 0) {
    limit.replicas = count;
  } else if (wrong == std::errc() && std::string_view(unit, end) == "%" && share > 0 &&
             share <= 100) {
    limit.share = share / 100;
  } else if (const auto bytes = ParseBytes(text); bytes && *bytes > 0 && rest != end) {
    limit.bytes = *bytes;
  } else {
    return Usage("--max-moves \"", text,
                 "\": expected a number of replicas above 0 such as 200, "
                 "a size such as 40GB or a share such as 5%; moe-replace evaluate measures a plan "
                 "without moves");
  }
  return limit;
}

/// Parses EXPERTS:NODES.
/// \error kUsage
Result<placement::Pin> ParsePin(const std::string& text) {
  const std::size_t colon = text.find(':');
  if (colon != std::string::npos) {
    auto experts = token_counts::ParseLayers(text.substr(0, colon));
    auto nodes = token_counts::ParseLayers(text.substr(colon + 1));
    if (experts && nodes) return placement::Pin{*std::move(experts), *std::move(nodes)};
  }
  return Usage("--pin \"", text, "\": expected numbers of experts and of nodes such as 0-3,7:0,1");
}

/// Parses all --pin flags. \error kUsage  also if two name one expert
Result<std::vector<placement::Pin>> ParsePins(const std::vector<std::string>& texts) {
  std::vector<placement::Pin> pins;
  std::set<std::uint32_t> seen;
  for (const std::string& text : texts) {
    SW_TRY_ASSIGN(placement::Pin pin, ParsePin(text));
    for (const std::uint32_t e : pin.experts) {
      if (!seen.insert(e).second) return Usage("--pin: expert ", e, " is pinned twice");
    }
    pins.push_back(std::move(pin));
  }
  return pins;
}

/// Parses --join: a path, or a path and a weight.
/// \error kUsage
Result<placement::JoinedLoads> ParseJoined(const std::string& text) {
  placement::JoinedLoads joined;
  const std::size_t equals = text.rfind('=');
  joined.path = text.substr(0, equals);
  if (equals == std::string::npos) return joined;
  const std::string_view weight = std::string_view(text).substr(equals + 1);
  joined.weight = NumberIn<double>(weight).value_or(0);
  const bool fits = joined.weight > 0 && joined.weight <= 1e9;
  if (!joined.path.empty() && fits) return joined;
  return Usage("--join \"", text,
               "\": expected FILE or FILE=WEIGHT with a weight above 0, up to 1e9; found \"",
               weight, "\"");
}

/// Parses --effort: a number of steps, or a time with its unit.
/// \error kUsage
Status SetEffort(const std::string& text, placement::Options* options) {
  constexpr double kMostSeconds = 3600;
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, code] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  const std::string_view unit(rest, static_cast<std::size_t>(end - rest));
  const double seconds = unit == "ms" ? number / 1e3 : unit == "s" ? number : 0;
  if (code == std::errc() && unit.empty() && number <= 1000 && std::floor(number) == number &&
      number >= 0) {
    options->best_effort = static_cast<std::uint32_t>(number);
    return {};
  }
  if (code != std::errc() || !(seconds > 0) || seconds > kMostSeconds) {
    return Usage("--effort \"", text,
                 "\": expected a count from 0 to 1000 or a time up to 3600s, such as 500ms or 2s");
  }
  options->best_seconds = seconds;
  options->clock = placement::ClockSeconds;
  return {};
}

bool Knows(const Known& known, std::string_view strategy) {
  return std::find(known.strategies.begin(), known.strategies.end(), strategy) !=
         known.strategies.end();
}

}  // namespace

void MoeFlags::AddLoadsTo(cli::App& app) {
  app.AddInput(&request.loads,
               "token counts: a JSONL, JSON or CSV file, a dump from SGLang or vLLM, or a folder",
               "LOADS");
}

void MoeFlags::AddInputTo(cli::App& app, bool at) {
  app.ShowInShortHelp({"--cluster", "--nodes", "--gpus", "--slots"});
  app.Group("Cluster and token counts");
  placement::ClusterRequest& cluster = request.cluster;
  app.AddText("--cluster", &cluster.file, "file that describes nodes, GPUs, slots and bandwidths",
              "FILE");
  app.AddCount("--nodes", &cluster.nodes, 1, limits::kMoeNodes,
               "number of equal nodes, instead of --cluster");
  app.AddCount("--gpus", &cluster.gpus, 1, limits::kMoeDevices, "GPUs per node");
  app.AddCount("--slots", &slots_, 0, limits::kMoeSlots, "expert replicas per GPU in each layer");
  app.AddSize("--expert-bytes", &cluster.expert_bytes,
              "bytes of an expert: weights, master weights and moments");
  app.AddBandwidth("--gpu-bandwidth", &cluster.gpu_bytes_per_s,
                   "bandwidth of a GPU in its node, in each direction");
  app.AddBandwidth("--node-bandwidth", &cluster.node_bytes_per_s,
                   "bandwidth of a node, in each direction");
  app.AddText("--window", &windows_,
              "number of iterations over which token counts are added up, or all. With several "
              "values, such as 1,100,all, the worst balance counts. Without the flag: all "
              "iterations if a serving engine made the recording, otherwise 1",
              "N|all");
  app.AddReal("--half-life", &request.window.half_life, 0, 1e9,
              "iterations after which a count in the window has half its weight; 0: counts keep "
              "their weight");
  app.AddText("--layers", &layers_, "layers to plan, such as 0-11,14", "LIST");
  if (!at) return;
  app.AddList("--join", &joined_, "recording to add, with its counts times WEIGHT",
              "FILE[=WEIGHT]");
  app.AddCount("--at", &request.window.at, 0, kMostIterations,
               "plan for the counts up to this iteration instead of the last ones");
  app.AddCount("--measured-at", &request.measured_at, 0, kMostIterations,
               "measure the balance on the counts of another iteration");
  app.AddText(
      "--affinity", &request.affinity,
      "tokens from each expert to each expert of the next layer (docs/placement.md). best then "
      "keeps more of them on their GPU or node",
      "FILE");
}

void MoeFlags::AddFaultsTo(cli::App& app) {
  app.ShowInShortHelp({"--faults"});
  app.AddCount("--faults", &request.faults, 0, limits::kMoeNodes,
               "number of failures that the plan must survive");
  app.AddEnum<placement::FailureUnit>(
      "--unit", &request.options.failure_unit,
      {{"node", placement::FailureUnit::kNode}, {"rack", placement::FailureUnit::kRack}},
      "unit that fails as a whole");
}

void MoeFlags::AddStrategyOptionsTo(cli::App& app, bool moves) {
  AddFaultsTo(app);
  placement::Options& options = request.options;
  if (moves) {
    app.ShowInShortHelp({"--old"});
    app.AddText("--old", &request.old_plan,
                "plan that the GPUs use now; replicas move only if needed", "PLAN");
    app.AddText("--max-moves", &max_moves_,
                "best with --old: limit on the replicas that move, as a count (200), a size (40GB) "
                "or a share of all slots (5%)",
                "N|SIZE|SHARE");
    app.AddReal("--target-balance", &options.target_imbalance, 1, 1000,
                "best with --old: reach this balance with the fewest moves");
    app.AddText("--everywhere", &everywhere_,
                "experts that every GPU stores, such as shared ones: 256 or 0-3,7", "LIST");
    app.AddList("--pin", &pins_, "experts to keep on some nodes only, as 0-3,7:0,1",
                "EXPERTS:NODES");
    app.AddFlag("--forward", &request.forward,
                "allow a node to forward an expert that it has just received");
  }
  app.AddChoice("--objective", &objective_, {"balance", "recovery", "mixed"},
                "goal to prefer where balance and recovery conflict; without the flag, the goal of "
                "the strategy");
  app.AddReal("--recovery-loss", &options.recovery_loss, 0, 1,
              "recovery probability that mixed may trade for balance");
  app.AddEnum<placement::NodeMap>(
      "--map", &options.node_map,
      {{"joint", placement::NodeMap::kJoint},
       {"greedy", placement::NodeMap::kGreedy},
       {"per-layer", placement::NodeMap::kPerLayer},
       {"none", placement::NodeMap::kNone}},
      "how nodes of the new plan are matched with nodes of the old plan");
  app.AddFlag("--distinct", &options.distinct,
              "lazarus: at most as many replicas of an expert as nodes");
  app.AddEnum<placement::EplbPolicy>(
      "--policy", &options.eplb_policy,
      {{"auto", placement::EplbPolicy::kAuto},
       {"hierarchical", placement::EplbPolicy::kHierarchical},
       {"global", placement::EplbPolicy::kGlobal}},
      "best, eplb: whether the experts of a group stay on one node. hierarchical: yes; global: no; "
      "auto: yes if the number of nodes divides the number of groups");
  app.AddCount("--groups", &groups_, 1, limits::kMoeExperts, "expert groups of the model's router");
  app.AddText("--effort", &effort_,
              "best: search effort per layer, from 0 to 1000, or a time such as 2s. With a time, "
              "plans differ from run to run",
              "N|TIME");
  app.AddCount("--overlap", &overlap_, 0, limits::kMoeExperts,
               "hecate: experts that can be sent while other layers compute (t)");
  app.AddCount("--spare", &spare_, 0, limits::kMoeSlots,
               "hecate: experts owned by other GPUs that fit on a GPU (m)");
  if (!moves) AddNonmoeTo(app);
}

void MoeFlags::AddNonmoeTo(cli::App& app) {
  app.AddReal("--nonmoe-seconds", &request.options.hecate.nonmoe_seconds, 0, 3600,
              "forward time of the layers between two MoE layers in seconds; hecate computes t "
              "from it unless --overlap is given");
}

void MoeFlags::AddTimesTo(cli::App& app) {
  app.Group("Time of an iteration");
  placement::CostInputs& cost = request.cost;
  app.AddReal("--gpu-flops", &cost.gpu_flops, 0, 1e18,
              "operations per second of a GPU in experts, such as 1.2e14; computes the times of "
              "training iterations; 0: no times");
  app.AddSize("--token-bytes", &cost.token_bytes,
              "bytes of a token: hidden size times bytes per value");
  AddNonmoeTo(app);
  app.AddEnum<placement::DispatchMethod>(
      "--dispatch", &cost.dispatch,
      {{"proportional", placement::DispatchMethod::kProportional},
       {"topology", placement::DispatchMethod::kTopology}},
      "how replicas share tokens. proportional: equally; topology: on the same GPU if possible, "
      "otherwise on the same node");
}

void MoeFlags::AddReportTo(cli::App& app) {
  app.ShowInShortHelp({"--html"});
  app.AddText("--html", &report, "HTML report to write, as a single file", "FILE");
  app.AddCount("--failures", &request.failures, 1, 512,
               "largest number of failures to compute survival for");
  app.AddReal("--node-failure", &request.node_failure, 0, 1,
              "probability that a node fails, for the survival");
}

Status MoeFlags::CheckCluster(const cli::App& app, bool needed) const {
  const placement::ClusterRequest& cluster = request.cluster;
  if (!cluster.file.empty()) {
    for (const char* flag : {"--nodes", "--gpus", "--slots", "--expert-bytes", "--gpu-bandwidth",
                             "--node-bandwidth"}) {
      if (app.IsSet(flag)) return Usage(flag, " cannot be combined with --cluster");
    }
    return {};
  }
  const bool begun = cluster.nodes != 0 || cluster.gpus != 0 || slots_.has_value();
  const bool whole = cluster.nodes != 0 && cluster.gpus != 0 && slots_.has_value();
  if (begun && !whole) {
    std::vector<std::string> missing;
    if (cluster.nodes == 0) missing.emplace_back("--nodes");
    if (cluster.gpus == 0) missing.emplace_back("--gpus (GPUs of each node)");
    if (!slots_) missing.emplace_back("--slots (expert replicas that fit on each GPU)");
    return Usage("the cluster is incomplete: add ", Joined(missing, " and "),
                 ", or pass --cluster FILE instead");
  }
  if (needed && !begun) {
    return Usage(
        "no cluster: pass --cluster FILE, or --nodes, --gpus and --slots (expert replicas that fit "
        "on each GPU)");
  }
  for (const char* flag : {"--gpu-bandwidth", "--node-bandwidth"}) {
    if (!begun && app.IsSet(flag)) return Usage(flag, " requires --nodes, --gpus and --slots");
  }
  if (!begun || cluster.gpus <= limits::kMoeDevices / cluster.nodes) return {};
  return Usage("--nodes ", cluster.nodes, " --gpus ", cluster.gpus, ": expected at most ",
               limits::kMoeDevices, " GPUs, found ", cluster.nodes * cluster.gpus);
}

Status MoeFlags::CheckTimes(const cli::App& app) const {
  const placement::CostInputs& cost = request.cost;
  if (cost.given()) return {};
  if (cost.gpu_flops > 0) return Usage("--gpu-flops requires --token-bytes");
  for (const char* flag : {"--token-bytes", "--dispatch"}) {
    if (app.IsSet(flag)) return Usage(flag, " requires --gpu-flops");
  }
  if (overlap_ && app.IsSet("--nonmoe-seconds")) {
    return Usage("--overlap cannot be combined with --nonmoe-seconds");
  }
  return {};
}

Status MoeFlags::CheckRules(const cli::App& app, bool cluster_needed) {
  SW_TRY(CheckCluster(app, cluster_needed));
  request.cluster.slots = slots_.value_or(0);
  if (!windows_.empty()) {
    SW_TRY_ASSIGN(request.window.windows, token_counts::ParseWindows(windows_));
  }
  for (const std::string& joined : joined_) {
    SW_TRY_ASSIGN(placement::JoinedLoads one, ParseJoined(joined));
    request.joined.push_back(std::move(one));
  }
  if (!layers_.empty()) {
    SW_TRY_ASSIGN(request.window.layers, token_counts::ParseLayers(layers_));
  }
  if (objective_ != "mixed" && app.IsSet("--recovery-loss")) {
    return Usage("--recovery-loss requires --objective mixed");
  }
  if (!max_moves_.empty()) {
    SW_TRY_ASSIGN(request.max_moves, ParseMaxMoves(max_moves_));
  }
  for (const char* flag : {"--max-moves", "--target-balance"}) {
    if (request.old_plan.empty() && app.IsSet(flag)) return Usage(flag, " requires --old");
  }
  if (!request.affinity.empty() && !request.old_plan.empty()) {
    return Usage(
        "--affinity cannot be combined with --old: exchanging GPUs would move replicas; leave one "
        "of them out");
  }
  if (!everywhere_.empty()) {
    if (app.IsSet("--target-balance")) {
      return Usage("--everywhere cannot be combined with --target-balance");
    }
    auto experts = token_counts::ParseLayers(everywhere_);
    if (!experts) {
      return Usage("--everywhere \"", everywhere_,
                   "\": expected numbers of experts such as 256 or 0-3,7");
    }
    request.everywhere = *std::move(experts);
  }
  SW_TRY_ASSIGN(request.options.pins, ParsePins(pins_));
  if (!max_moves_.empty() && app.IsSet("--target-balance")) {
    return Usage("--max-moves cannot be combined with --target-balance");
  }
  if (request.old_plan.empty() && request.forward) return Usage("--forward requires --old");
  SW_TRY(CheckTimes(app));
  placement::Options& options = request.options;
  if (objective_ == "balance") options.objective = placement::Objective::kBalance;
  if (objective_ == "recovery") options.objective = placement::Objective::kRecovery;
  if (objective_ == "mixed") options.objective = placement::Objective::kMixed;
  options.copies_min = static_cast<std::uint32_t>(request.faults + 1);
  options.eplb_groups = static_cast<std::uint32_t>(groups_);
  SW_TRY(SetEffort(effort_, &options));
  if (overlap_) options.hecate.overlap = static_cast<std::uint32_t>(*overlap_);
  if (spare_) options.hecate.spare = static_cast<std::uint32_t>(*spare_);
  return {};
}

void MoeFlags::AddShared(const cli::CommonFlags& common) {
  request.options.seed = common.seed;
  request.threads = common.threads;
}

Status MoeFlags::CheckKnown(const cli::App& app, const std::string& strategy, bool simulated,
                            bool writes_eplb) const {
  // For recovery, `best` plans like `lazarus`.
  const bool recovers = objective_ == "recovery" || objective_ == "mixed";
  const std::string planner = strategy == "best" && recovers ? "lazarus" : strategy;
  std::string other = "--strategy " + strategy;
  if (!objective_.empty()) other += " --objective " + objective_;
  for (const Known& known : kKnown) {
    if (writes_eplb && std::string_view(known.flag) == "--groups") continue;
    if (request.cost.given() && std::string_view(known.flag) == "--nonmoe-seconds") continue;
    if (!Knows(known, planner)) SW_TRY(app.Exclude({known.flag}, other));
  }
  for (const Known& known : kKnownInSimulations) {
    if (!simulated || Knows(known, strategy)) continue;
    SW_TRY(app.Exclude({known.flag}, other + " in moe-replace simulate-failures: this strategy "
                                             "does not place copies on different units"));
  }
  return {};
}

void AddStrategy(cli::App& app, std::string* strategy) {
  app.ShowInShortHelp({"--strategy"});
  std::vector<std::string> names;
  std::string what = "placement strategy.";
  for (const placement::Strategy& one : placement::Strategies()) {
    names.emplace_back(one.name);
    what.append(names.size() == 1 ? " " : ". ").append(one.name).append(": ").append(one.summary);
  }
  app.AddChoice("--strategy", strategy, names, what);
}

}  // namespace shardwright::apps
