// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "partial/planner/forecast/overhead.h"
#include "partial/planner/forecast/replay_costs.h"
#include "partial/select/sharding/sharding.h"
#include "partial/select/types.h"
#include "support/base/result.h"
#include "support/base/stop.h"

namespace shardwright::partial {

/// What a checkpoint of K experts per layer costs, for every K. Bytes are those of the rank that
/// saves most, or of the node that does, as the bandwidths they are compared with.
struct BottleneckTable {
  std::vector<std::uint64_t> bytes;  ///< [K - 1], K = 1 .. N
};

/// Bottlenecks from real shard plans of sequential selections: for each K the largest of the first
/// `checkpoints` checkpoints (with equal experts PhaseCount(K, ep) of them show everything).
/// \param ranks_per_node  consecutive data-parallel ranks that share a link; 1: a link for each
/// \error kUsage  0 checkpoints or ranks per node; kStopped; as PlanSave
/// Pure but for `stop`. Source: docs/pec-planning.md section 8.1.
Result<BottleneckTable> BottleneckByK(const SavedModel& model, std::uint32_t checkpoints,
                                      std::uint32_t ranks_per_node, const StopCheck& stop = {});

/// What is measured, and what is wished.
struct AutoInput {
  BottleneckTable snapshot;
  BottleneckTable persist;
  double snapshot_bytes_per_s = 0;  ///< of a rank, or of a node, as the table
  double persist_bytes_per_s = 0;
  double forward_backward_s = 0;  ///< T_fb
  double iteration_s = 0;         ///< T_iter
  double fault_rate = 0;          ///< lambda, faults per iteration
  double restart_s = 0;           ///< O_restart
  double iterations = 0;          ///< I_total
  double lost_share = 1;          ///< share of the experts whose memory copies a fault takes
  double plt_limit = 0.0375;
  std::optional<std::uint64_t> interval;  ///< wanted I; absent: as short as pays
  std::uint64_t log_bytes = 0;            ///< LogBytes of the experts
  std::uint32_t ranks = 1;                ///< that log, save and restore
  double replay_elems_per_s = 0;          ///< of a rank
};

/// A configuration and the model's numbers for it.
struct AutoConfig {
  std::uint32_t k_snapshot = 1;
  std::uint32_t k_persist = 1;
  std::uint64_t interval = 1;  ///< I
  double snapshot_s = 0;
  double persist_s = 0;
  double stall_s = 0;        ///< O_save
  double expected_plt = 0;   ///< of the whole run
  bool plt_in_limit = true;  ///< false: no k_persist that fits the interval is enough
  double overhead_s = 0;     ///< expected, of the whole run (eq 4)
  double ettr = 0;           ///< effective training time ratio
};

/// Chooses K_snapshot, K_persist and I: K_snapshot is the largest K whose snapshot hides behind
/// forward and backward (none: 1, with a stall); K_persist is 1, raised while the expected PLT is
/// above the limit and the persist still ends within the interval; I is what the persist takes, or
/// the best interval if that is longer. Then both K are raised while the bottleneck does not grow.
/// \error kUsage  tables of no or different lengths, bandwidths or times that are not positive;
///        kStopped; as the functions of overhead.h and lost_tokens.h
/// Pure but for `stop`. Source: docs/pec-planning.md section 8.1.
Result<AutoConfig> ChooseConfig(const AutoInput& input, const StopCheck& stop = {});

/// A run that logs the gradients of all experts, and loses nothing: both K of its configuration are
/// equal, and its overhead has the log and the steps that restores make again.
struct ReplayConfig {
  AutoConfig config;
  double log_stall_s = 0;    ///< of an iteration
  double replay_s = 0;       ///< of a restart, on average
  std::uint64_t window = 0;  ///< iterations in which every expert is saved once
};

/// Chooses K below N and I for such a run: of all K that with the least overhead (ties: the
/// smallest), each with the interval that is best for it, but not shorter than a persist takes with
/// what the log leaves of the bandwidth.
/// \returns nothing where the log alone takes all of the bandwidth, or there is one expert
/// \error kStopped; as ChooseConfig
/// Pure but for `stop`. Source: docs/pec-planning.md sections 3 and 9.4.
Result<std::optional<ReplayConfig>> ChooseReplay(const AutoInput& input,
                                                 const StopCheck& stop = {});

}  // namespace shardwright::partial
