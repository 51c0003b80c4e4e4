// SPDX-License-Identifier: Apache-2.0
// lib/placement/planning: the operations of moe-replace: plan, compare and measure.
// A request contains the options of the user. The functions here read the files that it names,
// plan, verify and compare; simulate_events.h simulates node failures. planning_json.h and
// planning_text.h format the results for programs and for people. plan_page.cc makes the HTML
// report. The command in apps parses the flags.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "placement/affinity/affinity.h"
#include "placement/core/metrics.h"
#include "placement/core/types.h"
#include "placement/cost/cost.h"
#include "placement/io/plan_text.h"
#include "placement/verify/verify.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "token_counts/window.h"

namespace shardwright::placement {

/// A cluster as specified by the flags: a file or numbers.
struct ClusterRequest {
  std::string file;
  std::uint64_t nodes = 0;  ///< 0: no cluster specified, unless by `file`
  std::uint64_t gpus = 0;   ///< of each node
  std::uint64_t slots = 0;  ///< of each GPU
  std::uint64_t expert_bytes = 0;
  std::uint64_t gpu_bytes_per_s = 0;   ///< between GPUs of a node; 0: unknown
  std::uint64_t node_bytes_per_s = 0;  ///< between nodes; 0: unknown

  bool told() const { return !file.empty() || nodes != 0; }
};

/// Returns the time of a monotonic clock in seconds, for Options::clock.
double ClockSeconds();

/// Returns the cluster of a request.
/// \pre `request.told()`
/// \error kLimit  more slots than the limits allow; other errors as placement::ReadCluster
/// Local.
Result<Cluster> ClusterOf(const ClusterRequest& request, std::uint32_t layers);

/// A limit of the replicas that move from the old plan. At most one member is set.
struct MovesLimit {
  std::optional<std::uint64_t> replicas;
  std::optional<std::uint64_t> bytes;
  std::optional<double> share;  ///< share of all slots of all layers

  bool given() const { return replicas || bytes || share; }
};

/// Another recording of the same model. Its counts are added to the first recording.
struct JoinedLoads {
  std::string path;
  double weight = 1;  ///< factor of its counts; the first recording has weight 1
};

/// Input and options of planning. The fields correspond to the flags of moe-replace.
struct PlanRequest {
  std::string loads;
  std::vector<JoinedLoads> joined;
  token_counts::LoadWindow window;
  std::optional<std::uint64_t> measured_at;  ///< iteration of the counts that measure balance
  ClusterRequest cluster;
  std::string affinity;                   ///< file of transitions between layers; empty: none
  std::string old_plan;                   ///< file of the plan on the GPUs now; empty: none
  MovesLimit max_moves;                   ///< from the old plan
  std::vector<std::uint32_t> everywhere;  ///< experts with a replica on every GPU; ascending
  std::uint64_t faults = 0;               ///< failures that must be survived
  Options options;
  /// Times of a plan. Their `nonmoe_seconds` are those of `options`.
  CostInputs cost;
  std::uint64_t failures = 16;  ///< largest number of failures in the survival table
  double node_failure = 0;      ///< probability that a node fails; 0: not specified
  bool forward = false;         ///< nodes may forward experts that they received
  unsigned threads = 1;

  VerifyOptions Judging(const Sink& sink) const;
};

/// Data that a plan is computed from.
struct PlanInput {
  std::vector<token_counts::Recording> recordings;  ///< recordings of the request; at least one
  std::uint64_t idle_records = 0;                   ///< records without tokens, which are skipped
  TokenCounts loads;
  Cluster cluster;
  std::optional<Placement> current;        ///< the old plan
  std::optional<std::uint64_t> moves_max;  ///< replicas that may move
  std::optional<TokenCounts> later;        ///< token counts at `measured_at`
  std::optional<Affinity> affinity;        ///< transitions between layers
  PlacementCost vanilla;                   ///< cost of plain expert parallelism; on rank 0

  /// Returns the numbers of all layers of the recording, ascending; `loads` has those of --layers.
  const std::vector<std::uint32_t>& RecordedLayers() const {
    return recordings.front().trace.layer_id;
  }
  /// Returns the numbers of the layers that have no token in `loads`.
  std::vector<std::uint64_t> EmptyLayers() const;
};

/// Transitions between the layers of a plan.
struct PlannedTransitions {
  std::optional<Transitions> before;  ///< before GPUs were exchanged; absent: they were not
  Transitions after;
};

/// A plan of one strategy, or the reason for a missing plan.
struct PlannedRow {
  std::string strategy;              ///< strategy, or the format of a plan from a file
  std::string file;                  ///< path of a plan from a file
  std::optional<VerifiedPlan> plan;  ///< on rank 0
  double seconds = 0;                ///< planning time without reading
  std::optional<ModelMetrics> later;
  std::optional<PlannedTransitions> affinity;  ///< on rank 0, with --affinity
  PlannedCost cost;                            ///< on rank 0
  std::string reason;

  /// Returns the metrics on the token counts for measuring balance.
  const ModelMetrics& balance() const { return later ? *later : plan->metrics; }
};

/// Reads the files of the request and fails for requests that no plan meets. Every rank reads.
/// \error kUsage  times without the cluster's rates; kInfeasible  more failures
///        than any plan survives; kBadInput  an old plan of another shape; kUnsupported  an
///        option that requires the same number of experts in all layers; other errors as
///        token_counts::ReadLoads, token_counts::Pick
/// Collective.
Result<PlanInput> ReadPlanInput(comm::Comm& comm, const PlanRequest& request, Sink& sink);

/// Plans with one strategy and measures the plan. A row without a plan is not an error. Layers
/// with different numbers of experts are planned as by PlanEachSize.
/// \error as PlanOnRanks and VerifyPlan
/// Collective.
Result<PlannedRow> PlanWith(comm::Comm& comm, const PlanRequest& request, const PlanInput& input,
                            const Strategy& strategy, Sink& sink);

/// Plans with all strategies, in their order.
/// Collective.
Result<std::vector<PlannedRow>> PlanWithAll(comm::Comm& comm, const PlanRequest& request,
                                            const PlanInput& input, Sink& sink);

/// A plan from a file, and the input that it was measured on.
struct EvaluatedPlan {
  PlanInput input;
  PlannedRow row;
};

/// Reads token counts and a plan of any format, and measures the plan on the counts. Uses the
/// cluster of the request, or otherwise the cluster in the plan's file.
/// \error kUsage  neither specifies a cluster, or it lacks rates for times; kBadInput  the plan
///        does not fit counts or cluster
/// Local.
Result<EvaluatedPlan> EvaluatePlan(const PlanRequest& request, const std::string& plan_file,
                                   Sink& sink);

/// Fails for a plan from a file that survives fewer failures than requested.
/// \error kMismatch  names the file and both numbers
/// Pure.
Status CheckEvaluated(const PlanRequest& request, const PlannedRow& row);

/// Returns the text of a plan in a format. Warns about data that the format cannot represent.
/// \error kUnsupported  the format cannot represent the plan
/// Local.
Result<std::string> PlanBytes(PlanFormat format, const PlanRequest& request, const PlanInput& input,
                              const VerifiedPlan& plan, Sink& sink);

/// Returns the HTML report. Its "before" is the old plan, or the plan of the strategy vanilla.
/// \param chosen  row that the report shows in detail; has a plan
/// \param rows  rows of the comparison table
/// Pure.
std::string PlanPage(const PlanRequest& request, const PlanInput& input, const PlannedRow& chosen,
                     const std::vector<PlannedRow>& rows, Sink& sink);

/// Returns the first row with a plan, which a comparison's HTML report shows in detail; null if
/// no row has one. Strategies come in order of merit.
/// Pure.
const PlannedRow* FirstPlan(const std::vector<PlannedRow>& rows);

}  // namespace shardwright::placement
