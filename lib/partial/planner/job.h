// SPDX-License-Identifier: Apache-2.0
// lib/partial/planner: forecasts of pec-save before a run. A job is a
// model with its ranks and rates, taken from flags or from a store.
// plan.h plans its next checkpoints, simulation.h simulates policies
// on a trace of tokens, and tune.h chooses K and the interval.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "partial/select/selection.h"
#include "partial/select/sharding/sharding.h"
#include "partial/select/sizes.h"
#include "partial/store/manifest.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Maximum number of ranks of a job.
inline constexpr std::uint64_t kMostJobRanks = 1'000'000;

/// Description of a job. The fields correspond to flags of pec-save plan, simulate and
/// tune. Sizes are those of a store's newest checkpoint, or else those given here.
struct JobRequest {
  std::string store;                       ///< empty: use the sizes below
  std::vector<std::string> pattern_files;  ///< for the store's checkpoints
  std::uint64_t experts = 16;              ///< in each MoE layer
  std::uint64_t moe_layers = 12;
  std::uint64_t expert_params = 8'393'728;      ///< default: GPT-350M-16E
  std::vector<std::uint64_t> nonexpert_params;  ///< by module
  ComponentBytes param_bytes{2, 4, 8};          ///< bytes per parameter
  KeptComponents keep{};                        ///< saved for every expert at every checkpoint
  std::optional<std::uint64_t> ep;              ///< absent: the store's, or the number of experts
  std::optional<std::uint64_t> dp;  ///< absent: the store's if ep divides it, otherwise ep
  std::uint64_t ranks_per_node = 8;
  std::uint64_t snapshot_bandwidth = std::uint64_t{2} << 30;   ///< bytes per second and rank
  std::uint64_t persist_bandwidth = std::uint64_t{512} << 20;  ///< bytes per second and rank
  std::uint64_t replay_speed = 400'000'000;  ///< elements per second and rank of repeated steps
  double forward_backward_s = 1;
  double iteration_s = 1.5;
  double restart_s = 300;
};

/// The model to plan checkpoints for, and its ranks.
struct Job {
  ModelBytes model;
  double params = 0;  ///< number of parameters of the whole model
  ExpertMap map;
  SaveRanks ranks;
  Keep keep;
  std::uint32_t ranks_per_node = 1;
  std::optional<checkpoints::Mesh> mesh;  ///< parallel layout of the store's newest checkpoint
  std::vector<std::string> names;         ///< names of the non-expert modules
  std::vector<std::uint32_t> layer_id;    ///< by MoE layer: its number in the model
  std::optional<Manifest> newest;         ///< checkpoint that the sizes are from
  SelectionState state;                   ///< state of the store; empty tables without one
  std::string no_replay;  ///< reason why gradients cannot be replayed; empty: none known

  LayerExperts experts() const { return map.experts(); }
  /// Returns the number of experts of the largest layer.
  std::uint32_t most_experts() const;
  std::uint32_t nodes() const;
  /// Returns the share of memory copies that a fault destroys: `told`, or by default one node's.
  double LostShare(const std::optional<double>& told) const;
};

/// MoE layers and experts of a trace that specifies them.
struct TraceShape {
  std::uint32_t experts = 0;
  std::vector<std::uint32_t> layer_id;
};

/// Makes the job of a request.
/// \param trace  shape of the simulated trace; absent: use the request or the store
/// \error kUsage  ranks that do not fit the experts, a store without experts;
///        kMismatch  trace and store have different models (names both);
///        kNotFound  a store without checkpoints; kLimit; as Store::Open
/// Local.
Result<Job> ReadJob(const JobRequest& request, const std::optional<TraceShape>& trace);

/// Returns the number of parameters that a token passes: all non-expert modules, and in each layer
/// `top_k` experts of mean size. Modules have parameters in proportion to their bytes.
/// \error kUsage  more experts than a layer has, or a model without bytes; as FullBytes
/// Pure.
Result<double> TokenParams(const Job& job, std::uint64_t top_k);

/// Returns the sum of all components of all modules and experts.
/// \error kBadInput  overflow
/// Pure.
Result<std::uint64_t> FullBytes(const ModelBytes& model);

}  // namespace shardwright::partial
