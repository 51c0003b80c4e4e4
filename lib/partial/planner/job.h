// SPDX-License-Identifier: Apache-2.0
// lib/partial/planner: what pec-save can say before a run.
// A job (here) is a model, its ranks and its rates, from flags or from a store. plan.h plans the
// next checkpoints of it, simulation.h plays policies over a trace of tokens, tune.h chooses K and
// interval.

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

/// Most ranks that a job may have.
inline constexpr std::uint64_t kMostJobRanks = 1'000'000;

/// What is told of a job whose checkpoints are planned; the fields are flags of pec-save plan,
/// simulate and tune. Sizes are those of a store's newest checkpoint, or those told here.
struct JobRequest {
  std::string store;                       ///< empty: the sizes below
  std::vector<std::string> pattern_files;  ///< of the store's checkpoints
  std::uint64_t experts = 16;              ///< of each MoE layer
  std::uint64_t moe_layers = 12;
  std::uint64_t expert_params = 8'393'728;      ///< of GPT-350M-16E
  std::vector<std::uint64_t> nonexpert_params;  ///< by module
  ComponentBytes param_bytes{2, 4, 8};          ///< of one parameter
  KeptComponents keep{};                        ///< saved of every expert each time
  std::optional<std::uint64_t> ep;              ///< absent: the store's, or as many as experts
  std::optional<std::uint64_t> dp;  ///< absent: the store's where --ep divides them, or ep
  std::uint64_t ranks_per_node = 8;
  std::uint64_t snapshot_bandwidth = std::uint64_t{2} << 30;   ///< bytes per second of a rank
  std::uint64_t persist_bandwidth = std::uint64_t{512} << 20;  ///< bytes per second of a rank
  std::uint64_t replay_speed = 400'000'000;  ///< elements whose step a rank makes in a second
  double forward_backward_s = 1;
  double iteration_s = 1.5;
  double restart_s = 300;
};

/// The model whose checkpoints are planned, and the ranks that save them.
struct Job {
  ModelBytes model;
  ExpertMap map;
  SaveRanks ranks;
  Keep keep;
  std::uint32_t ranks_per_node = 1;
  std::optional<checkpoints::Mesh> mesh;  ///< of the store's newest checkpoint
  std::vector<std::string> names;         ///< of the non-expert modules
  std::vector<std::uint32_t> layer_id;    ///< by MoE layer: its number in the model
  std::optional<Manifest> newest;         ///< of the store that the sizes are from
  SelectionState state;                   ///< of the store; empty tables without one
  std::string no_replay;  ///< why its gradients cannot be replayed; empty: nothing is known

  LayerExperts experts() const { return map.experts(); }
  /// Experts of the layer that has most.
  std::uint32_t most_experts() const;
  std::uint32_t nodes() const;
  /// Share of the memory copies that a fault takes: what is told, else what a node's ranks hold.
  double LostShare(const std::optional<double>& told) const;
};

/// MoE layers and their experts, where a trace says them.
struct TraceShape {
  std::uint32_t experts = 0;
  std::vector<std::uint32_t> layer_id;
};

/// The job of a request.
/// \param trace  shape of the trace that is played; absent: the request's or the store's
/// \error kUsage  ranks that do not fit the experts, a store without experts; kMismatch  a trace of
///        another model than the store, both sides named; kNotFound  a store without checkpoints;
///        kLimit; as Store::Open
/// Local.
Result<Job> ReadJob(const JobRequest& request, const std::optional<TraceShape>& trace);

/// Sum of all components of every module, and of every expert.
/// \error kBadInput  overflow
/// Pure.
Result<std::uint64_t> FullBytes(const ModelBytes& model);

}  // namespace shardwright::partial
