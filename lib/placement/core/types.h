// SPDX-License-Identifier: Apache-2.0
// lib/placement/core: the data types of expert placement.
// There are three plain records: TokenCounts (lib/token_counts), a Cluster of GPUs with slots,
// and a Placement, which assigns an expert to every slot. A Strategy is a pure function from these
// records and options to a Placement. metrics.h measures a placement on token counts, dispatch.h
// distributes tokens over replicas, parallel.h drafts layers on several ranks and threads at once,
// layer_groups.h plans layers with different numbers of experts, and node_events.h reads the times
// at which machines join and leave.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/base/result.h"
#include "support/base/stop.h"
#include "token_counts/token_counts.h"

namespace shardwright::placement {

/// Marks an empty slot.
inline constexpr std::int32_t kNoExpert = -1;

using token_counts::TokenCounts;

/// A GPU.
struct Device {
  std::uint32_t node = 0;
  std::uint32_t slots = 0;  ///< expert replicas of one layer that fit; the same for every layer
  bool alive = true;        ///< a dead GPU has no slots, and nothing is copied from it
  double speed = 1;         ///< tokens per time, relative to other GPUs; 0.01 to 100
};

/// A machine, which fails as a unit.
struct Node {
  std::string name;
  std::uint32_t rack = 0;
  bool alive = true;  ///< nothing is placed on or copied from a dead node
};

/// Nodes and GPUs that can store experts. Devices are numbered consecutively, node after node.
struct Cluster {
  std::vector<Node> nodes;
  std::vector<Device> devices;  ///< ascending node
  std::vector<std::string> racks;
  /// Bytes copied when an expert moves to another GPU: parameters, master weights and moments.
  std::uint64_t expert_bytes = 0;
  /// Bytes copied when an expert is replicated for one iteration: parameters only.
  std::uint64_t param_bytes = 0;
  double device_bytes_per_s = 0;  ///< from a GPU to another of its node; 0: unknown
  double node_bytes_per_s = 0;    ///< from a node to another of its rack; 0: unknown
  double rack_bytes_per_s = 0;    ///< from a rack to another; 0: unknown

  std::uint32_t node_count() const { return static_cast<std::uint32_t>(nodes.size()); }
  std::uint32_t device_count() const { return static_cast<std::uint32_t>(devices.size()); }
  bool alive(std::uint32_t device) const {
    return devices[device].alive && nodes[devices[device].node].alive;
  }
  /// Returns true if a device can store experts: it is alive and has slots.
  bool holds(std::uint32_t device) const { return alive(device) && devices[device].slots > 0; }
  /// Returns a node's first device; its end is device_first(n + 1). \pre node <= node_count()
  std::uint32_t device_first(std::uint32_t node) const;
  /// Returns the slots of all GPUs of a node, including dead nodes.
  std::uint64_t node_slots(std::uint32_t node) const;
  /// Returns the slots of all GPUs of live nodes. Dead GPUs have no slots.
  std::uint64_t live_slots() const;
  std::uint32_t live_nodes() const;
  /// Returns the number of devices that can store experts. The mean load is taken over these.
  std::uint32_t live_devices() const;
};

/// Returns the speed of each device over the mean speed of those that can store experts. The load
/// of a device is its tokens divided by this, so the busiest device is the one that takes longest.
/// Local.
std::vector<double> RelativeSpeeds(const Cluster& cluster);

/// Returns the name of a GPU for messages, for example: node "a" gpu 3.
std::string GpuName(const Cluster& cluster, std::uint32_t device);

/// Makes a cluster of `nodes` equal nodes in one rack, all alive.
/// Local.
Cluster UniformCluster(std::uint32_t nodes, std::uint32_t devices_per_node,
                       std::uint32_t slots_per_device);

/// Experts that are kept on certain nodes only, in every layer. Every layer has them.
struct Pin {
  std::vector<std::uint32_t> experts;  ///< ascending
  std::vector<std::uint32_t> nodes;    ///< numbers in the cluster, ascending
};

/// Verifies that a cluster is well-formed: devices ascend by node, racks exist, names and counts
/// are within limits, and at least one live GPU has a slot.
/// \error kBadInput  names the node or device; kLimit  too many nodes, devices or slots
Status Validate(const Cluster& cluster);

/// Verifies counts and cluster, and that a placement of both together stays within the size limits.
/// \error as Validate of each; kLimit  too many slots over all layers; kInfeasible  fewer
///        live slots than experts
Status Validate(const TokenCounts& loads, const Cluster& cluster);

/// Verifies that the experts and nodes of pins exist.
/// \error kUsage  names an expert or node that does not exist
Status Validate(std::span<const Pin> pins, const TokenCounts& loads, const Cluster& cluster);

/// Assigns an expert to every slot of all layers. A device has the same range of slots in every
/// layer. A slot may be empty (kNoExpert).
struct Placement {
  std::uint32_t layers = 0;
  std::uint32_t experts = 0;                 ///< the largest number in a layer
  std::vector<std::uint32_t> layer_experts;  ///< by layer; empty: all have `experts`
  std::vector<std::uint32_t> slot_begin;     ///< by device, plus one past the last: its first slot
  std::vector<std::int32_t> slot_expert;     ///< [layers][slot_count()]

  /// Returns the number of experts of a layer.
  std::uint32_t ExpertsOf(std::size_t layer) const {
    return layer_experts.empty() ? experts : layer_experts[layer];
  }
  std::uint32_t device_count() const {
    return slot_begin.empty() ? 0 : static_cast<std::uint32_t>(slot_begin.size() - 1);
  }
  std::uint32_t slot_count() const { return slot_begin.empty() ? 0 : slot_begin.back(); }
  std::span<const std::int32_t> layer(std::uint32_t l) const {
    return std::span(slot_expert).subspan(std::size_t{l} * slot_count(), slot_count());
  }
  std::span<std::int32_t> layer(std::uint32_t l) {
    return std::span(slot_expert).subspan(std::size_t{l} * slot_count(), slot_count());
  }
  /// Returns the slots of a device in a layer.
  std::span<const std::int32_t> slots(std::uint32_t l, std::uint32_t device) const {
    return layer(l).subspan(slot_begin[device], slot_begin[device + 1] - slot_begin[device]);
  }
  std::span<std::int32_t> slots(std::uint32_t l, std::uint32_t device) {
    return layer(l).subspan(slot_begin[device], slot_begin[device + 1] - slot_begin[device]);
  }
};

/// Makes a placement with the slots of the cluster's devices, all empty.
/// Local.
Placement EmptyPlacement(const TokenCounts& loads, const Cluster& cluster);

/// Rules that Validate checks a placement against.
struct Rules {
  bool cluster_slots = true;          ///< no device has more slots than the cluster gives it
  bool all_experts = true;            ///< every expert of every layer has a live replica
  std::uint32_t copies_min = 1;       ///< least number of distinct live nodes per expert
  bool no_device_duplicates = false;  ///< no expert twice on one device
};

/// Verifies that a placement fits the cluster, follows the rules and leaves dead nodes empty.
/// \error kMismatch  another number of layers, experts or devices; kBadInput  an expert id that
///        does not exist, too many experts on a device; kInfeasible  a violated rule
Status Validate(const Placement& placement, const TokenCounts& loads, const Cluster& cluster,
                const Rules& rules);

/// Part of a cluster that fails as a whole.
enum class FailureUnit : std::uint8_t { kNode, kRack };

/// Method that maps the nodes of a plan to the nodes of the current placement.
enum class NodeMap : std::uint8_t {
  kJoint,     ///< one assignment for all layers with the fewest transfers
  kGreedy,    ///< one assignment for all layers, each node in ascending order takes the cheapest
  kPerLayer,  ///< an assignment for every layer: fewer transfers, worse recovery of the model
  kNone,      ///< plan node i is node i
};

/// Goal of a plan, for strategies that support several goals.
enum class Objective : std::uint8_t {
  kBalance,   ///< least imbalance (recovery: only the requested number of failures)
  kRecovery,  ///< greatest recovery probability
  kMixed,     ///< least imbalance within Options::recovery_loss of the greatest recovery
};

enum class EplbPolicy : std::uint8_t { kAuto, kHierarchical, kGlobal };

/// Options of the strategies. Each strategy uses the options that apply to it.
struct Options {
  /// Least number of distinct failure units with a replica of each expert (the fault threshold
  /// f). The plan survives any copies_min - 1 failures.
  std::uint32_t copies_min = 1;
  /// If copies_min does not fit: false fails, true takes the largest number that fits.
  bool copies_may_fall = false;
  FailureUnit failure_unit = FailureUnit::kNode;
  std::optional<Objective> objective;  ///< absent: the strategy's own goal
  double recovery_loss = 0.02;  ///< kMixed: accepted absolute loss of mean recovery probability
  NodeMap node_map = NodeMap::kJoint;
  bool distinct = false;  ///< lazarus: no more replicas of an expert than nodes
  std::uint64_t seed = 0;

  /// vanilla: GPUs that share the experts of a layer (the EP size). All GPUs beyond a multiple of
  /// it stay empty. 0: the largest size that fits.
  std::uint32_t expert_parallel = 0;
  EplbPolicy eplb_policy = EplbPolicy::kAuto;  ///< best, eplb: if groups stay on a node
  std::uint32_t eplb_groups = 1;               ///< expert groups of the model's router
  /// best, eplb: group of each expert, if groups have different sizes; empty: ranges of equal size.
  std::vector<std::uint32_t> expert_group;

  /// best: search effort for each layer as a number of steps, so the same input gives the same
  /// plan.
  std::uint32_t best_effort = 4;
  /// best: search time for each layer in seconds, used instead of best_effort; 0: use best_effort.
  double best_seconds = 0;
  std::vector<Pin> pins;  ///< best: no expert occurs twice
  /// Numbers of the experts for messages, if they differ from those of the token counts.
  std::vector<std::uint32_t> expert_names;
  /// Returns the time in seconds; required only with best_seconds. Strategies do not read a clock
  /// themselves.
  double (*clock)() = nullptr;

  /// best, with a current placement: limit of the replicas that move in all layers together.
  std::optional<std::uint64_t> moves_max;
  /// best, with a current placement: imbalance that each layer reaches with the fewest moves;
  /// 0: the least imbalance found.
  double target_imbalance = 0;

  struct Hecate {
    std::optional<std::uint32_t> overlap;  ///< t; absent: from nonmoe_seconds, or as many as fit
    std::optional<std::uint32_t> spare;    ///< m; absent: slots left by the owned experts
    double nonmoe_seconds = 0;             ///< forward time of the layers between two MoE layers
    bool reshard = true;                   ///< heterogeneous sharding of the owners
  } hecate;

  struct Model {             ///< time model of FasterMoE and FlexMoE
    double hidden = 1024;    ///< H
    double inner_ratio = 4;  ///< a: hidden size of an expert divided by H
    double flops = 1e14;     ///< P, of a device per second
    double network_bytes_per_s = 12.5e9;
    double value_bytes = 2;       ///< b
    double shadow_kappa = 2;      ///< transfers of a shadowed expert: parameters and gradients
    double flex_threshold = 1.1;  ///< FlexMoE acts above this max/mean
  } model;

  StopCheck stop = {};  ///< ends planning with kStopped
};

/// Reason why the search for the best plan of a layer ended.
enum class SearchEnd : std::uint8_t {
  kNone,    ///< nothing was searched
  kBound,   ///< the largest load is at, or within 0.1 % of, the lower bound
  kBudget,  ///< the steps or the time were used up
  kNoGain,  ///< most of the steps so far found nothing better
};

/// Notes of a strategy on one layer of its plan.
struct LayerNotes {
  bool cut = false;              ///< lazarus: segments did not fit, optimality not guaranteed
  std::uint32_t copies_min = 0;  ///< the threshold that the plan meets
  SearchEnd search_end = SearchEnd::kNone;  ///< best
  double bound = 0;  ///< best: lower bound of the imbalance in as many slots; 0: unknown
};

/// A placement of one layer that a finish may choose, made from a current placement.
struct LayerChoice {
  std::uint64_t moves = 0;          ///< replicas that devices do not have now
  double imbalance = 1;             ///< of the worst window
  std::vector<std::int32_t> slots;  ///< slots of the live devices, device after device
};

/// Balance reached with a number of moves in all layers together.
struct MovesPoint {
  std::uint64_t moves = 0;
  double imbalance_mean = 1;
  double imbalance_max = 1;
};

/// Output of a strategy.
struct StrategyResult {
  /// Every replica that tokens may be sent to.
  Placement placement;
  /// hecate, fastermoe: placement of the state, one replica per expert. Other replicas in
  /// `placement` exist for one iteration and may exceed the cluster's slots.
  std::optional<Placement> owners;
  std::vector<LayerNotes> notes;  ///< by layer
  /// best, for a draft with a current placement: by layer, ascending moves.
  std::vector<std::vector<LayerChoice>> choices;
  std::vector<MovesPoint> moves_curve;  ///< best, with a current placement: ascending moves
  std::vector<std::string> warnings;    ///< for the report; they start in lower case
};

/// A strategy: a pure function of its arguments. The same input gives the same bytes.
/// `current` is the placement on the devices now, or nullptr if they are empty. It has the shape of
/// `loads` and the devices of `cluster`, some of which may have died since.
/// \pre all layers have the same number of experts (layer_groups.h plans others);
///      Validate(loads), Validate(cluster); current validated with Rules{false, false, 0, false}
/// \error kInfeasible  no plan exists: names a feasible request; kUsage  options that contradict
///        each other; kStopped
using PlanFunction = Result<StrategyResult> (*)(const TokenCounts& loads, const Cluster& cluster,
                                                const Placement* current, const Options& options);

/// One strategy, by name. `plan` is `draft` followed by `finish`. A draft treats each layer
/// separately, so that layers can be drafted in parallel with the same result. A finish considers
/// all layers together (owners over all layers, one node order, fewest moves).
struct Strategy {
  std::string_view name;
  std::string_view summary;  ///< one line for --help
  PlanFunction draft;
  Result<StrategyResult> (*finish)(StrategyResult draft, const TokenCounts& loads,
                                   const Cluster& cluster, const Placement* current,
                                   const Options& options);

  Result<StrategyResult> plan(const TokenCounts& loads, const Cluster& cluster,
                              const Placement* current, const Options& options) const {
    SW_TRY_ASSIGN(StrategyResult drafted, draft(loads, cluster, current, options));
    return finish(std::move(drafted), loads, cluster, current, options);
  }
};

/// Returns all strategies, in the order of a comparison table.
std::span<const Strategy> Strategies();

/// Returns the strategy of that name.
/// \error kUsage  no such strategy: lists the names that exist
Result<const Strategy*> FindStrategy(std::string_view name);

/// Returns some layers of token counts or of a placement, by position, in the given order.
/// \pre at least one layer; they have the same number of experts
/// Local.
TokenCounts LayersOf(const TokenCounts& loads, std::span<const std::uint32_t> layers);
Placement LayersOf(const Placement& placement, std::span<const std::uint32_t> layers);

/// Returns layers [first, last) of token counts or of a placement.
/// \pre as above
/// Local.
TokenCounts LayersOf(const TokenCounts& loads, std::uint32_t first, std::uint32_t last);
Placement LayersOf(const Placement& placement, std::uint32_t first, std::uint32_t last);

/// Joins results of consecutive layer ranges. Inverse of LayersOf.
/// \pre at least one part
/// Local.
StrategyResult Join(std::vector<StrategyResult> parts);

}  // namespace shardwright::placement
