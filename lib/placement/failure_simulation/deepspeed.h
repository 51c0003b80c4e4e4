// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "placement/failure_simulation/failure_simulation.h"

namespace shardwright::placement {

/// Verifies that a group of `size` GPUs can share the experts of a layer equally.
/// \param size  GPUs of an expert-parallel group; above 0
/// \error kUsage  more GPUs than the cluster has, a size that does not divide the experts, or too
///        few slots on a GPU
/// Pure.
Status CheckExpertParallel(std::uint64_t size, std::uint32_t experts, const Cluster& cluster);

/// Simulates training with plain expert parallelism in groups of `size` GPUs. The number of used
/// GPUs is a multiple of `size`; the others are idle. kSurvivors gives the result the name "ds-ft",
/// kRestart the name "ds".
/// Source: the baselines DS(FT) and DS of the Lazarus paper (arXiv 2407.04656, section 6.1).
/// \pre CheckExpertParallel; `recovery` is kSurvivors or kRestart
/// \error as SimulateFailures
/// Collective.
Result<SimulationResult> SimulateDeepSpeed(comm::Comm& comm, std::uint32_t size, Recovery recovery,
                                           const token_counts::TokenTrace& trace,
                                           const Cluster& cluster,
                                           const std::vector<NodeEvent>& events,
                                           const SimulationOptions& options, Sink& sink);

}  // namespace shardwright::placement
