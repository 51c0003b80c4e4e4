// SPDX-License-Identifier: Apache-2.0
// lib/placement/failure_simulation: a run in which machines come and go, played through.
// For every event the placement of the moment is planned again; what had to move, what was lost and
// what it cost is added up. So strategies can be compared on the same trace and the same events.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "placement/core/node_events.h"
#include "placement/core/types.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "token_counts/window.h"

namespace shardwright::placement {

/// How a run is replayed.
struct SimulationOptions {
  Options plan;
  token_counts::LoadWindow window;    ///< of every plan; `at` is set by the replay
  double iteration_ms = 0;            ///< 0: the trace's iterations fill the time of the events
  std::uint64_t rebalance_every = 0;  ///< iterations between plans without an event; 0: none
  /// True if the cluster's nodes are places that any machine of the events may take, false if
  /// they are the machines of those names.
  bool nodes_are_places = false;
  std::function<double()> seconds;  ///< a clock, for the time of plans
};

/// What happened at one moment of a replay.
struct SimulationStep {
  enum class State : std::uint8_t {
    kStarted,   ///< the first plan
    kMigrated,  ///< replicas were copied between nodes
    kRestored,  ///< state was lost: everything is read from a checkpoint again
    kStalled,   ///< no plan exists for the nodes that are left
  };
  std::uint64_t time_ms = 0;
  std::uint64_t iteration = 0;
  State state = State::kStalled;
  bool failure = false;  ///< nodes went away that held state
  std::uint32_t nodes_added = 0;
  std::uint32_t nodes_removed = 0;
  std::uint32_t nodes_live = 0;
  std::uint64_t experts_lost = 0;  ///< layer and expert pairs without a live holder
  std::uint64_t transfers = 0;     ///< replicas that are copied
  std::uint64_t migrated = 0;      ///< those that enter another node
  std::uint64_t bytes = 0;         ///< of all transfers
  std::uint64_t inter_node_bytes = 0;
  std::uint64_t restored_bytes = 0;  ///< read from a checkpoint: every replica of the new plan
  std::uint32_t rounds = 0;
  double migration_seconds = 0;  ///< 0 if the cluster's bandwidths are unknown
  std::uint32_t copies_min = 0;  ///< the threshold that was kept
  double imbalance_before = 0;   ///< of the placement before, on these loads; 0 without one
  double imbalance = 0;          ///< of the new plan
  double plan_seconds = 0;
  std::string reason;  ///< why there is no plan
};

struct SimulationResult {
  std::string strategy;
  std::vector<SimulationStep> steps;

  std::uint64_t failures = 0;  ///< moments at which nodes went away that held state
  std::uint64_t survived = 0;  ///< of those, with every expert still somewhere
  std::uint64_t restores = 0;  ///< restarts from a checkpoint
  std::uint64_t stalls = 0;    ///< moments without a plan
  std::uint64_t plans = 0;
  std::uint64_t transfers = 0;
  std::uint64_t migrated = 0;
  std::uint64_t bytes = 0;
  std::uint64_t inter_node_bytes = 0;
  std::uint64_t restored_bytes = 0;
  double migration_seconds = 0;
  double plan_seconds_mean = 0;
  double plan_seconds_max = 0;
  double imbalance_mean = 0;  ///< of all plans
  std::uint64_t time_ms = 0;  ///< from the first plan to the last event
  std::uint64_t stalled_ms = 0;
};

/// Replays nodes that come and go over a run: at every moment with an event the strategy plans for
/// the loads of that moment, and what the plan needs is copied from live nodes.
/// \error kBadInput  an unknown node, or more nodes at once than the cluster has places; kUsage
///        layers that the trace lacks; kStopped
/// Collective.
Result<SimulationResult> Replay(comm::Comm& comm, const Strategy& strategy,
                                const token_counts::TokenTrace& trace, const Cluster& cluster,
                                const std::vector<NodeEvent>& events,
                                const SimulationOptions& options, Sink& sink);

}  // namespace shardwright::placement
