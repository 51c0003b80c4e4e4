// SPDX-License-Identifier: Apache-2.0
// lib/placement/core: the words of expert placement.
// Three plain records: TokenCounts (lib/token_counts), a Cluster of GPUs with slots, and a
// Placement, which says which expert every slot holds. A Strategy is a pure function from these and
// options to a Placement. metrics.h measures a placement on loads, dispatch.h deals tokens to
// replicas, parallel.h lets ranks and threads draft layers at once, node_events.h says when
// machines come and go.

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

/// What an empty slot holds.
inline constexpr std::int32_t kNoExpert = -1;

using token_counts::TokenCounts;

/// A GPU.
struct Device {
  std::uint32_t node = 0;
  std::uint32_t slots = 0;  ///< expert replicas of one layer that fit; the same for every layer
  bool alive = true;        ///< a dead GPU has no slots, and nothing is fetched from it
  double speed = 1;         ///< tokens per time, relative to other GPUs; 0.01 to 100
};

/// A machine: what fails at once.
struct Node {
  std::string name;
  std::uint32_t rack = 0;
  bool alive = true;  ///< nothing is placed on a dead node and nothing is fetched from it
};

/// Where experts can live. Devices are numbered through, node after node.
struct Cluster {
  std::vector<Node> nodes;
  std::vector<Device> devices;  ///< ascending node
  std::vector<std::string> racks;
  /// What moves when an expert changes its home: parameters, master weights and moments.
  std::uint64_t expert_bytes = 0;
  /// What moves when an expert is copied for an iteration: parameters only.
  std::uint64_t param_bytes = 0;
  double device_bytes_per_s = 0;  ///< of a GPU to another of its node; 0: unknown
  double node_bytes_per_s = 0;    ///< of a node to another of its rack; 0: unknown
  double rack_bytes_per_s = 0;    ///< of a rack to another; 0: unknown

  std::uint32_t node_count() const { return static_cast<std::uint32_t>(nodes.size()); }
  std::uint32_t device_count() const { return static_cast<std::uint32_t>(devices.size()); }
  bool alive(std::uint32_t device) const {
    return devices[device].alive && nodes[devices[device].node].alive;
  }
  /// Whether a device can hold experts: alive and with slots.
  bool holds(std::uint32_t device) const { return alive(device) && devices[device].slots > 0; }
  /// Devices of a node: [device_first(n), device_first(n + 1)). \pre node <= node_count()
  std::uint32_t device_first(std::uint32_t node) const;
  /// Slots of a node, dead or alive.
  std::uint64_t node_slots(std::uint32_t node) const;
  /// Slots of all live nodes.
  std::uint64_t live_slots() const;
  std::uint32_t live_nodes() const;
  /// Devices that can hold experts: what the mean load is taken over.
  std::uint32_t live_devices() const;
};

/// Returns the speed of each device over the mean speed of those that can hold experts. A load is
/// the tokens of a device over this, so that the busiest device is the one that takes longest.
/// Local.
std::vector<double> RelativeSpeeds(const Cluster& cluster);

/// Returns the name of a GPU for messages: node "a" gpu 3.
std::string GpuName(const Cluster& cluster, std::uint32_t device);

/// A cluster of `nodes` equal nodes in one rack, all alive.
/// Local.
Cluster UniformCluster(std::uint32_t nodes, std::uint32_t devices_per_node,
                       std::uint32_t slots_per_device);

/// Proves that a cluster is well-formed: devices ascend by node, racks exist, names and counts are
/// within limits, some live slot exists.
/// \error kBadInput  names the node or device; kLimit  too many nodes, devices or slots
Status Validate(const Cluster& cluster);

/// Both of the above, and that a placement of these loads on this cluster has a sane size.
/// \error as above; kLimit  too many slots over all layers; kInfeasible  fewer live slots than
///        experts
Status Validate(const TokenCounts& loads, const Cluster& cluster);

/// Which expert every slot holds, for all layers. The slots of a device are the same range for
/// every layer; a slot may be empty (kNoExpert).
struct Placement {
  std::uint32_t layers = 0;
  std::uint32_t experts = 0;
  std::vector<std::uint32_t> slot_begin;  ///< by device, plus one past the last: its first slot
  std::vector<std::int32_t> slot_expert;  ///< [layers][slot_count()]

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
  /// What a device holds for a layer.
  std::span<const std::int32_t> slots(std::uint32_t l, std::uint32_t device) const {
    return layer(l).subspan(slot_begin[device], slot_begin[device + 1] - slot_begin[device]);
  }
  std::span<std::int32_t> slots(std::uint32_t l, std::uint32_t device) {
    return layer(l).subspan(slot_begin[device], slot_begin[device + 1] - slot_begin[device]);
  }
};

/// A placement whose slots are those of the cluster's devices, all empty.
/// Local.
Placement EmptyPlacement(const TokenCounts& loads, const Cluster& cluster);

/// What a placement must keep.
struct Rules {
  bool cluster_slots = true;          ///< no device has more slots than the cluster gives it
  bool all_experts = true;            ///< every expert of every layer lives somewhere
  std::uint32_t copies_min = 1;       ///< distinct live failure units per expert
  bool no_device_duplicates = false;  ///< no expert twice on one device
};

/// Proves that a placement fits the cluster and keeps the rules; nothing lies on dead nodes.
/// \error kMismatch  another number of layers, experts or devices; kBadInput  an expert id that
///        does not exist, a device that holds more than fits; kInfeasible  a rule that is not kept
Status Validate(const Placement& placement, const TokenCounts& loads, const Cluster& cluster,
                const Rules& rules);

/// What fails at once.
enum class FailureUnit : std::uint8_t { kNode, kRack };

/// Who goes where when a plan's nodes are named after the nodes of the current placement.
enum class NodeMap : std::uint8_t {
  kJoint,     ///< one assignment for all layers, least transfers
  kGreedy,    ///< one assignment for all layers, nodes in ascending order take the cheapest
  kPerLayer,  ///< an assignment for every layer: fewer transfers, worse recovery of the model
  kNone,      ///< plan node i is node i
};

/// What a plan is to be good at, where a strategy has the choice.
enum class Objective : std::uint8_t {
  kBalance,   ///< least imbalance (recovery: only the asked number of failures)
  kRecovery,  ///< greatest recovery probability
  kMixed,     ///< least imbalance within Options::recovery_loss of the greatest recovery
};

enum class EplbPolicy : std::uint8_t { kAuto, kHierarchical, kGlobal };

/// Knobs of the strategies. Each strategy uses what it knows.
struct Options {
  /// Every expert lives on at least so many distinct failure units (the fault threshold f): any
  /// copies_min - 1 failures are survived.
  std::uint32_t copies_min = 1;
  /// What to do when copies_min does not fit: false refuses, true takes the largest that fits.
  bool copies_may_fall = false;
  FailureUnit failure_unit = FailureUnit::kNode;
  std::optional<Objective> objective;  ///< absent: what the strategy was made for
  double recovery_loss = 0.02;  ///< kMixed: absolute loss of mean recovery probability that is fine
  NodeMap node_map = NodeMap::kJoint;
  bool distinct = false;  ///< lazarus: no more replicas of an expert than nodes
  std::uint64_t seed = 0;

  EplbPolicy eplb_policy = EplbPolicy::kAuto;  ///< best, eplb: whether groups stay on a node
  std::uint32_t eplb_groups = 1;               ///< expert groups of the model's router

  /// best: search effort for each layer as a number of steps, so the same input gives the same
  /// plan.
  std::uint32_t best_effort = 4;
  /// best: search time for each layer in seconds, used instead of best_effort; 0: use best_effort.
  double best_seconds = 0;
  /// Returns the time in seconds; required only with best_seconds. Strategies do not read a clock
  /// themselves.
  double (*clock)() = nullptr;

  /// best, with a current placement: replicas that all layers together may move at most.
  std::optional<std::uint64_t> moves_max;
  /// best, with a current placement: imbalance that each layer reaches with the fewest moves; 0:
  /// the least one found.
  double target_imbalance = 0;

  struct Hecate {
    std::optional<std::uint32_t> overlap;  ///< t; absent: from nonmoe_seconds, else what fits
    std::optional<std::uint32_t> spare;    ///< m; absent: slots beside the owned experts
    double nonmoe_seconds = 0;             ///< forward time of the layers between two MoE layers
    bool reshard = true;                   ///< heterogeneous sharding of the owners
  } hecate;

  struct Model {             ///< FasterMoE's and FlexMoE's time model
    double hidden = 1024;    ///< H
    double inner_ratio = 4;  ///< a: hidden size of an expert over H
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

/// What a strategy says of one layer.
struct LayerNotes {
  bool cut = false;              ///< lazarus: segments did not fit, no claim of optimality
  std::uint32_t copies_min = 0;  ///< the threshold that was kept
  SearchEnd search_end = SearchEnd::kNone;  ///< best
  double bound = 0;  ///< best: no placement in as many slots has a lower imbalance; 0: not known
};

/// A placement of one layer that a finish may choose, made from a current placement.
struct LayerChoice {
  std::uint64_t moves = 0;          ///< replicas that devices do not hold now
  double imbalance = 1;             ///< of the worst window
  std::vector<std::int32_t> slots;  ///< of the live devices, device after device
};

/// Balance that so many moves of all layers together buy.
struct MovesPoint {
  std::uint64_t moves = 0;
  double imbalance_mean = 1;
  double imbalance_max = 1;
};

/// What a strategy made.
struct StrategyResult {
  /// What computes: every replica that tokens may be sent to.
  Placement placement;
  /// hecate, fastermoe: where state lives, once per expert. Other replicas in `placement` are made
  /// for an iteration and dropped; they may exceed the cluster's slots.
  std::optional<Placement> owners;
  std::vector<LayerNotes> notes;  ///< by layer
  /// best, of a draft with a current placement: by layer, ascending moves.
  std::vector<std::vector<LayerChoice>> choices;
  std::vector<MovesPoint> moves_curve;  ///< best, with a current placement: ascending moves
  std::vector<std::string> warnings;    ///< for the report; lower case
};

/// A strategy: a pure function of its arguments; same input, same bytes.
/// `current` is what lies on the devices now, nullptr if nothing; it has the shape of `loads` and
/// the devices of `cluster`, some of which may be dead by now.
/// \pre Validate(loads), Validate(cluster); current validated with Rules{false, false, 0, false}
/// \error kInfeasible  no plan exists: says what would; kUsage  options that contradict each other;
///        kStopped
using PlanFunction = Result<StrategyResult> (*)(const TokenCounts& loads, const Cluster& cluster,
                                                const Placement* current, const Options& options);

/// One strategy, by name. `plan` = `finish` after `draft`. Drafting some layers alone gives what
/// drafting all of them gives for those layers, so that layers can be drafted in parallel;
/// finishing looks at all layers together (owners over all layers, one node order, fewest moves).
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

/// All strategies, in the order of a comparison table.
std::span<const Strategy> Strategies();

/// The strategy of that name.
/// \error kUsage  lists the names that exist
Result<const Strategy*> FindStrategy(std::string_view name);

/// Layers [first, last) of loads, of a placement.
/// Local.
TokenCounts LayersOf(const TokenCounts& loads, std::uint32_t first, std::uint32_t last);
Placement LayersOf(const Placement& placement, std::uint32_t first, std::uint32_t last);

/// Puts results of consecutive layer ranges together again.
/// \pre at least one part
/// Local.
StrategyResult Join(std::vector<StrategyResult> parts);

}  // namespace shardwright::placement
