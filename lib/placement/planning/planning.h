// SPDX-License-Identifier: Apache-2.0
// lib/placement/planning: what moe-replace plans, compares and measures.
// A request holds what the user asked for; the functions here read the files that it names, plan,
// verify and compare; planning_json.h and planning_text.h say what came of it, for programs and for
// people. Flags are of the command.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "placement/core/metrics.h"
#include "placement/core/types.h"
#include "placement/failure_simulation/failure_simulation.h"
#include "placement/io/plan_text.h"
#include "placement/verify/verify.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "token_counts/window.h"

namespace shardwright::placement {

/// A cluster as the flags tell it: a file, or numbers.
struct ClusterRequest {
  std::string file;
  std::uint64_t nodes = 0;  ///< 0: no cluster is told, unless by `file`
  std::uint64_t gpus = 0;   ///< of each node
  std::uint64_t slots = 0;  ///< of each GPU
  std::uint64_t expert_bytes = 0;

  bool told() const { return !file.empty() || nodes != 0; }
};

/// Returns the time of a monotonic clock in seconds, for Options::clock.
double ClockSeconds();

/// The cluster of a request.
/// \pre request.told()
/// \error kLimit  more slots than are handled; as placement::ReadCluster
/// Local.
Result<Cluster> ClusterOf(const ClusterRequest& request, std::uint32_t layers);

/// A limit of the replicas that move from the old plan; at most one of the members is set.
struct MovesLimit {
  std::optional<std::uint64_t> replicas;
  std::optional<std::uint64_t> bytes;
  std::optional<double> share;  ///< of all slots of all layers

  bool given() const { return replicas || bytes || share; }
};

/// Another recording of the same model, whose counts are added.
struct JoinedLoads {
  std::string path;
  double weight = 1;  ///< of its counts; those of the first recording have weight 1
};

/// What is planned from, and how plans are looked at; the fields are the flags of moe-replace.
struct PlanRequest {
  std::string loads;
  std::vector<JoinedLoads> joined;
  token_counts::LoadWindow window;
  std::optional<std::uint64_t> measured_at;  ///< iteration whose loads balance is measured on
  ClusterRequest cluster;
  std::string old_plan;                   ///< file of the plan that the GPUs hold now; empty: none
  MovesLimit max_moves;                   ///< from the old plan
  std::vector<std::uint32_t> everywhere;  ///< experts that every GPU holds; ascending
  std::uint64_t faults = 0;               ///< failures that must be survived
  Options options;
  std::uint64_t failures = 16;  ///< up to which survival is worked out
  double node_failure = 0;      ///< probability that a node fails; 0: it is not told
  bool forward = false;         ///< nodes may send on what they received
  unsigned threads = 1;

  VerifyOptions Judging(const Sink& sink) const;
};

/// What a plan is made from.
struct PlanInput {
  std::vector<token_counts::Recording> recordings;  ///< of the request; at least one
  std::uint64_t idle_records = 0;                   ///< without a token: left out
  TokenCounts loads;
  Cluster cluster;
  std::optional<Placement> current;        ///< the old plan
  std::optional<std::uint64_t> moves_max;  ///< replicas that may move
  std::optional<TokenCounts> later;        ///< of `measured_at`

  /// Numbers of the layers that have no token in `loads`.
  std::vector<std::uint64_t> EmptyLayers() const;
};

/// A plan of one strategy, or why there is none.
struct PlannedRow {
  std::string strategy;              ///< or the format, of a plan that was read
  std::string file;                  ///< of a plan that was read
  std::optional<VerifiedPlan> plan;  ///< on rank 0
  double seconds = 0;                ///< of planning alone
  std::optional<ModelMetrics> later;
  std::string reason;

  /// On the loads that balance is measured on.
  const ModelMetrics& balance() const { return later ? *later : plan->metrics; }
};

/// Reads what the request names, and refuses what no plan can do. Every rank reads.
/// \error kUsage  a strategy's time without the cluster's rates; kInfeasible  more failures than
///        any plan survives; kBadInput  an old plan of another shape; as token_counts::ReadLoads,
///        token_counts::Pick
/// Collective.
Result<PlanInput> ReadPlanInput(comm::Comm& comm, const PlanRequest& request, Sink& sink);

/// Plans with one strategy and measures the plan; that no plan exists is a reason, no error.
/// \error as PlanOnRanks and VerifyPlan
/// Collective.
Result<PlannedRow> PlanWith(comm::Comm& comm, const PlanRequest& request, const PlanInput& input,
                            const Strategy& strategy, Sink& sink);

/// All strategies, in their order.
/// Collective.
Result<std::vector<PlannedRow>> PlanWithAll(comm::Comm& comm, const PlanRequest& request,
                                            const PlanInput& input, Sink& sink);

/// A plan that was read, and what it was measured on.
struct EvaluatedPlan {
  PlanInput input;
  PlannedRow row;
};

/// Reads loads and a plan of any format, and measures the plan on the loads. The cluster is the
/// request's, else the plan's own.
/// \error kUsage  neither tells a cluster; kBadInput  a plan that does not fit loads and cluster
/// Local.
Result<EvaluatedPlan> EvaluatePlan(const PlanRequest& request, const std::string& plan_file,
                                   Sink& sink);

/// Refuses a plan that was read and survives less than asked.
/// \error kMismatch  names the file and both numbers
/// Pure.
Status CheckEvaluated(const PlanRequest& request, const PlannedRow& row);

/// The text of a plan for a reader; what the format cannot say is a warning.
/// \error kUnsupported  the format cannot hold the plan
/// Local.
Result<std::string> PlanBytes(PlanFormat format, const PlanRequest& request, const PlanInput& input,
                              const VerifiedPlan& plan, Sink& sink);

/// The page to look at. What was there before is the old plan, or one replica of each expert.
/// \param chosen  what the page is about; has a plan
/// \param rows  its table
/// Pure.
std::string PlanPage(const PlanRequest& request, const PlanInput& input, const PlannedRow& chosen,
                     const std::vector<PlannedRow>& rows, Sink& sink);

/// The plan that a comparison's page is about, since strategies come in their order of merit; null
/// if there is none.
/// Pure.
const PlannedRow* FirstPlan(const std::vector<PlannedRow>& rows);

/// How node events are played.
struct EventsRequest {
  std::string events;            ///< file of nodes that come and go
  double iteration_seconds = 0;  ///< 0: the run fills the time of the events
  std::uint64_t rebalance_every = 0;
  std::string strategy;  ///< empty: all, in their order
};

/// A replay with each strategy asked for.
struct Replays {
  Cluster cluster;
  std::vector<SimulationResult> results;
};

/// Reads loads, cluster and events, refuses what not even the whole cluster could hold, and
/// replays.
/// \error as Replay, CheckFaults and the readers
/// Collective.
Result<Replays> ReplayEvents(comm::Comm& comm, const PlanRequest& request,
                             const EventsRequest& events, Sink& sink);

}  // namespace shardwright::placement
