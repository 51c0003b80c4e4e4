// SPDX-License-Identifier: Apache-2.0
// lib/placement/failure_simulation: simulates a run in which machines join and leave.
// Every event causes a new plan. The results add up moved experts, lost experts and times, so
// that strategies can be compared on the same trace and the same events. deepspeed.h simulates
// baselines, throughput.h computes the samples that are trained, incidents.h picks times with
// losses, and failures_page.h makes the HTML report.

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

/// Ways in which a job resumes after nodes left or joined.
enum class Recovery : std::uint8_t {
  kElastic,    ///< on all live nodes, from replicas; from a checkpoint only if an expert is lost
  kSurvivors,  ///< as kElastic, but idle nodes are used only after a join or a lost expert
  kRestart,    ///< from a checkpoint if a used node failed or if more GPUs can be used
};

/// Options of a simulation.
struct SimulationOptions {
  Options plan;
  token_counts::LoadWindow window;    ///< window of every plan; the simulation sets `at`
  double iteration_ms = 0;            ///< 0: the trace's iterations fill the time of the events
  std::uint64_t rebalance_every = 0;  ///< iterations between plans without an event; 0: none
  /// True if any machine of the events may take any node of the cluster. False if the nodes
  /// are the machines of the same names.
  bool nodes_are_places = false;
  Recovery recovery = Recovery::kElastic;
  std::function<double()> seconds;  ///< a clock to measure planning time
};

/// Result of one step of a simulation.
struct SimulationStep {
  enum class State : std::uint8_t {
    kStarted,   ///< the first plan
    kMigrated,  ///< replicas were copied between nodes
    kRestored,  ///< state was lost: all state is read from a checkpoint
    kStalled,   ///< no plan exists for the remaining nodes
  };
  std::uint64_t time_ms = 0;
  std::uint64_t iteration = 0;
  State state = State::kStalled;
  bool failure = false;  ///< nodes that had state left the cluster
  std::uint32_t nodes_added = 0;
  std::uint32_t nodes_removed = 0;
  std::uint32_t nodes_live = 0;
  std::uint64_t experts_lost = 0;  ///< layer and expert pairs without a live replica
  std::uint64_t transfers = 0;     ///< replicas that are copied
  std::uint64_t migrated = 0;      ///< replicas that enter another node
  std::uint64_t bytes = 0;         ///< total of all transfers
  std::uint64_t inter_node_bytes = 0;
  std::uint64_t restored_bytes = 0;  ///< read from a checkpoint: every replica of the new plan
  std::uint32_t rounds = 0;
  double migration_seconds = 0;  ///< 0 if the cluster's bandwidths are unknown
  std::uint32_t copies_min = 0;  ///< the threshold that the plan meets
  double imbalance_before = 0;   ///< of the previous placement, with these counts; 0 without one
  double imbalance = 0;          ///< of the new plan
  double imbalance_used = 0;     ///< busiest GPU over the mean of the GPUs that have experts
  std::uint32_t gpus_used = 0;   ///< GPUs that have experts
  double plan_seconds = 0;
  std::string reason;  ///< reason for a missing plan
};

struct SimulationResult {
  std::string strategy;
  std::vector<SimulationStep> steps;

  std::uint64_t failures = 0;  ///< steps at which nodes that had state left the cluster
  std::uint64_t survived = 0;  ///< failures after which every expert still had a replica
  std::uint64_t restores = 0;  ///< restarts from a checkpoint
  std::uint64_t stalls = 0;    ///< steps without a plan
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

/// Simulates a run with nodes that join and leave. At every time with an event the strategy plans
/// for the token counts of that time, and replicas that the plan needs are copied from live nodes.
/// \error kBadInput  an unknown node, or more nodes at once than the cluster has places; kUsage
///        layers that the trace lacks; kStopped
/// Collective.
Result<SimulationResult> SimulateFailures(comm::Comm& comm, const Strategy& strategy,
                                          const token_counts::TokenTrace& trace,
                                          const Cluster& cluster,
                                          const std::vector<NodeEvent>& events,
                                          const SimulationOptions& options, Sink& sink);

}  // namespace shardwright::placement
