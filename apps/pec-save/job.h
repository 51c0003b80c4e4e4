#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/app.h"
#include "dialect/checkpoint.h"
#include "pec/manifest.h"
#include "pec/selection.h"
#include "pec/sharding.h"
#include "pec/sizes.h"

namespace shardwright::apps {

/// The model whose checkpoints are planned, and the ranks that save them.
struct Job {
  pec::ModelBytes model;
  pec::ExpertMap map;
  pec::SaveRanks ranks;
  pec::Keep keep;
  std::uint32_t ranks_per_node = 1;
  std::optional<dialect::Topology> topology;  ///< of the store's newest checkpoint
  std::vector<std::string> names;             ///< of the non-expert modules
  std::vector<std::uint32_t> layer_id;        ///< by MoE layer: its number in the model
  std::optional<pec::Manifest> newest;        ///< of the store that the sizes are from
  pec::SelectionState state;                  ///< of the store; empty tables without one

  pec::LayerExperts experts() const { return map.experts(); }
  std::uint32_t nodes() const;
};

/// MoE layers and their experts, where a trace says them.
struct Shape {
  std::uint32_t experts = 0;
  std::vector<std::uint32_t> layer_id;
};

/// The flags of pec-save that describe a job, for the modes that plan without a checkpoint.
struct JobFlags {
  static constexpr std::uint64_t kFromModel = 0;

  std::vector<std::string> patterns;  ///< of the store's checkpoints
  std::string store;  ///< sizes are those of its newest checkpoint; empty: the flags below
  std::uint64_t experts = 16;
  std::uint64_t moe_layers = 12;
  std::uint64_t expert_params = 8'393'728;
  std::string nonexpert_params = "52428800,2097152,4202496x24,8393728x12,16384x12,2048";
  std::string param_bytes = "2,4,8";
  std::uint64_t ep = kFromModel;
  std::uint64_t dp = kFromModel;
  std::uint64_t ranks_per_node = 8;
  std::uint64_t snapshot_bandwidth = 2ULL << 30;
  double forward_backward_s = 1;
  double iteration_s = 1.5;
  double restart_s = 300;

  void AddTo(cli::App& app);
  /// \param keep  the words of --keep
  /// \param trace  shape of the trace that is played; absent: --experts, --moe-layers or the store
  /// \error kUsage; kMismatch  a trace of another model than the store; as Store::Open
  Result<Job> Read(const cli::App& app, const std::vector<std::string>& keep,
                   const std::optional<Shape>& trace) const;

 private:
  Status ReadStore(Job* job) const;
  Status ReadSizes(Job* job) const;
};

/// "0-3,7" as numbers. \error kUsage  not such a list; kLimit
Result<std::vector<std::uint32_t>> ParseRanks(const std::string& text);

/// Sum of all components of every module, and of every expert.
/// \error kBadInput  overflow
Result<std::uint64_t> FullBytes(const pec::ModelBytes& model);

}  // namespace shardwright::apps
