// SPDX-License-Identifier: Apache-2.0
// lib/placement/cost: time and memory of a plan.
// traffic.h computes the amounts that pass through each link of a cluster, token_flow.cc those of
// tokens. times.cc turns them into the time of a training iteration, and memory.cc computes the
// memory for experts. docs/placement.md has the formulas. Source: Hecate, sections 3 and 5.

#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "placement/core/types.h"
#include "placement/cost/traffic.h"
#include "support/base/result.h"

namespace shardwright::placement {

/// Inputs of the time model that the cluster does not describe.
struct CostInputs {
  double gpu_flops = 0;           ///< operations per second of a GPU of speed 1; 0: no times
  std::uint64_t token_bytes = 0;  ///< bytes of a token between layers; 0: no times
  double nonmoe_seconds = 0;      ///< forward time of the layers between two MoE layers
  DispatchMethod dispatch = DispatchMethod::kProportional;

  /// Returns true if times can be computed.
  bool given() const { return gpu_flops > 0 && token_bytes > 0; }
};

/// Fails if the cluster lacks the size of an expert or a bandwidth that times require.
/// \error kUsage  names the flag and the member of a cluster file
/// Pure.
Status CheckCost(const CostInputs& inputs, const Cluster& cluster);

/// Times of an MoE layer in a training iteration, in seconds.
struct LayerTimes {
  double experts = 0;     ///< computation of experts, forward and backward
  double all_to_all = 0;  ///< four AllToAll: dispatch and combine, forward and backward
  double gather = 0;      ///< one SparseAllGather, hidden or not
  double reduce = 0;      ///< SparseReduceScatter, or the all-reduce of gradients; hidden or not
  double exposed = 0;     ///< part of `gather` and `reduce` that no computation hides
  double exposed_rematerialized = 0;  ///< the same with a second gather in the backward pass

  /// Returns the time of the MoE layer.
  double seconds() const { return experts + all_to_all + exposed; }
  /// Returns the same if copies are dropped after the forward pass and gathered again.
  double rematerialized() const { return experts + all_to_all + exposed_rematerialized; }
};

/// Times of a model in a training iteration, in seconds.
struct ModelTimes {
  std::vector<LayerTimes> layers;
  double other = 0;  ///< layers between the MoE layers, forward and backward

  double seconds() const;
  double rematerialized() const;
};

/// Computes the times of a plan.
/// \param owners  placement of the state if other replicas are copies for one iteration, or null
/// \param loads  token counts; the mean iteration is timed
/// \pre placement fits `loads` and `cluster`, `inputs.given()`, CheckCost(inputs, cluster)
/// \param stop  ends the computation early
/// Local; layers in parallel on the caller's task arena.
ModelTimes TimesOf(const Placement& placement, const Placement* owners, const TokenCounts& loads,
                   const Cluster& cluster, const CostInputs& inputs, const StopCheck& stop = {});

/// Ratios of the times of one plan to those of another.
struct Speedup {
  std::vector<double> layers;  ///< by MoE layer; 0 if one of the times is 0
  double least = 1;            ///< of the layers
  double most = 1;             ///< of the layers
  double mean = 1;             ///< geometric mean of the layers
  double model = 1;            ///< of whole iterations
};

/// Returns how many times as fast `times` is as `base`.
/// \pre both have the same number of layers
/// Pure.
Speedup SpeedupOf(const ModelTimes& times, const ModelTimes& base);

/// Memory of a GPU for the experts of all layers, in bytes.
struct GpuMemory {
  std::uint64_t optimizer = 0;  ///< master weights and moments
  std::uint64_t gradients = 0;
  std::uint64_t weights = 0;

  std::uint64_t bytes() const { return optimizer + gradients + weights; }
};

/// Peak memory of the fullest GPU.
struct PlanMemory {
  GpuMemory gpu;
  /// The same if copies are dropped after each layer and gathered again; absent without copies.
  std::optional<GpuMemory> rematerialized;
};

/// Returns the memory of a plan. Gradients have the size of the weights. Those of copies exist for
/// one layer at a time, and so do the weights of copies that are dropped after each layer.
/// \param owners  as for TimesOf
/// \error kLimit  more bytes than 64 bits can count
/// Pure.
Result<PlanMemory> MemoryOf(const Placement& placement, const Placement* owners,
                            const Cluster& cluster);

/// Returns the memory of a GPU with its parts, for reports.
/// Pure.
nlohmann::json MemoryJson(const GpuMemory& memory);

/// Time and memory of a placement.
struct PlacementCost {
  std::optional<ModelTimes> times;   ///< absent without the inputs of the request
  std::optional<PlanMemory> memory;  ///< absent without the size of an expert
};

/// Time and memory of a plan.
struct PlannedCost : PlacementCost {
  PlacementCost vanilla;  ///< of plain expert parallelism; empty if it has no plan
};

}  // namespace shardwright::placement
