// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "placement/failure_simulation/failure_simulation.h"

namespace shardwright::placement {

/// Durations that turn a simulation into samples trained (docs/placement.md, "Throughput"). All
/// numbers are finite and not negative.
struct ThroughputOptions {
  double step_seconds = 0;             ///< of a training step with balance 1; above 0
  double samples_per_gpu = 1;          ///< in a step, of each GPU that has experts
  double expert_share = 0;             ///< part of step_seconds that grows with balance; 0 to 1
  double detection_seconds = 0;        ///< from a failure until the job reacts
  double rebalance_seconds = 0;        ///< pause for a new placement, without copies
  double restart_seconds = 0;          ///< pause for new processes, without reading the checkpoint
  double restore_seconds = 0;          ///< pause for reading a checkpoint
  double checkpoint_seconds = 0;       ///< pause for writing a checkpoint
  std::uint64_t checkpoint_every = 0;  ///< steps between two checkpoints; 0: none
};

/// Use of time in a run.
enum class Activity : std::uint8_t {
  kTrain,
  kRecompute,   ///< training since the last checkpoint that a restart discards
  kCheckpoint,  ///< writing checkpoints
  kDetection,
  kRebalance,
  kMigration,  ///< copies between nodes
  kRestart,
  kRestore,
  kStalled,  ///< no plan exists for the live nodes
};
inline constexpr std::size_t kActivities = 9;

/// Returns the name of an activity in JSON reports.
/// Pure.
std::string_view ActivityName(Activity activity);

/// A time during which the job does one thing.
struct ThroughputSpan {
  double begin_seconds = 0;  ///< in the time of the events
  double end_seconds = 0;
  Activity activity = Activity::kTrain;  ///< kTrain includes its checkpoints and discarded steps
  std::uint32_t gpus = 0;                ///< GPUs that train; 0 in a pause
  double samples = 0;                    ///< trained, including those that a restart discards
};

/// Samples trained in a simulated run.
struct Throughput {
  std::string strategy;
  double samples = 0;       ///< without discarded samples
  double samples_lost = 0;  ///< discarded by restarts
  std::uint64_t checkpoints = 0;
  std::uint64_t restores = 0;                 ///< restarts from a checkpoint
  double total_seconds = 0;                   ///< from the first plan to the last event
  std::array<double, kActivities> seconds{};  ///< by activity; their sum is total_seconds
  std::vector<ThroughputSpan> spans;          ///< ascending time, without gaps

  double of(Activity activity) const { return seconds[static_cast<std::size_t>(activity)]; }
  /// Returns samples per second of the whole run; 0 for a run without time.
  double rate() const { return total_seconds > 0 ? samples / total_seconds : 0; }
};

/// Computes the samples that a simulated run trains. The run starts with the first plan and
/// ends at the last event, without the costs of that event. Every GPU that has experts trains
/// samples_per_gpu samples in a step. Steps are a continuous quantity.
/// Source: the comparison of the Lazarus paper (arXiv 2407.04656, section 6).
/// Pure.
Throughput ComputeThroughput(const SimulationResult& result, const ThroughputOptions& options);

/// Returns the run of the baseline "ds", to which ratios refer; null if there is none.
/// Pure.
const Throughput* BaselineOf(const std::vector<Throughput>& runs);

}  // namespace shardwright::placement
