// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "placement/failure_simulation/throughput.h"
#include "placement/planning/planning.h"

namespace shardwright::placement {

/// Options of a simulation with node events.
struct EventsRequest {
  std::string events;            ///< file of nodes that join and leave
  double iteration_seconds = 0;  ///< 0: the run is as long as the events
  std::uint64_t rebalance_every = 0;
  std::string strategy;               ///< empty: all, in their order
  ThroughputOptions throughput;       ///< without step_seconds no throughput is computed
  std::uint64_t expert_parallel = 0;  ///< GPUs of a group of the DeepSpeed baselines; 0: none
  /// Steps between two checkpoints of the baseline ds; absent: as of the others.
  std::optional<std::uint64_t> ds_checkpoint_every;
};

/// A simulation with each requested strategy.
struct FailureSimulations {
  Cluster cluster;
  std::vector<SimulationResult> results;
  /// One per result, then the baselines "ds-ft" and "ds" if requested; empty: not requested.
  std::vector<Throughput> throughput;
};

/// Reads token counts, cluster and events, fails if the experts do not fit the whole cluster,
/// and simulates the run.
/// \error as SimulateFailures, CheckExpertParallel, CheckFaults and the readers
/// Collective.
Result<FailureSimulations> SimulateEvents(comm::Comm& comm, const PlanRequest& request,
                                          const EventsRequest& events, Sink& sink);

}  // namespace shardwright::placement
