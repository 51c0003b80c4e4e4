// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "partial/planner/forecast/overhead.h"
#include "partial/planner/forecast/replay_costs.h"
#include "partial/select/sharding/bottleneck.h"
#include "support/base/result.h"
#include "support/base/stop.h"

namespace shardwright::partial {

/// Measurements and targets of a tuning.
struct AutoInput {
  BottleneckTable snapshot;
  BottleneckTable persist;
  double snapshot_bytes_per_s = 0;  ///< per rank or node, as in the table
  double persist_bytes_per_s = 0;
  double forward_backward_s = 0;  ///< T_fb
  double iteration_s = 0;         ///< T_iter
  double fault_rate = 0;          ///< lambda, faults per iteration
  double restart_s = 0;           ///< O_restart
  double iterations = 0;          ///< I_total
  double lost_share = 1;          ///< fraction of experts that lose their memory copies in a fault
  double plt_limit = 0.0375;
  std::optional<std::uint64_t> interval;  ///< required I; absent: the best
  std::uint64_t log_bytes = 0;            ///< LogBytes of the experts
  std::uint32_t ranks = 1;                ///< ranks that log, save and restore
  double replay_elems_per_s = 0;          ///< per rank
};

/// Checks the numbers that every choice needs.
/// \error kUsage  tables that are empty or of different lengths, bandwidths or times that
///        are not positive
/// Pure.
Status Validate(const AutoInput& input);

/// A configuration with the model's predictions.
struct AutoConfig {
  std::uint32_t k_snapshot = 1;
  std::uint32_t k_persist = 1;
  std::uint64_t interval = 1;  ///< I
  double snapshot_s = 0;
  double persist_s = 0;
  double stall_s = 0;        ///< O_save
  double expected_plt = 0;   ///< for the whole run
  bool plt_in_limit = true;  ///< false: no k_persist that fits the interval suffices
  double overhead_s = 0;     ///< expected for the whole run (eq 4)
  double ettr = 0;           ///< effective training time ratio
};

/// Chooses K_snapshot, K_persist and I. K_snapshot is the largest K that lets the snapshot hide
/// behind forward and backward (if none does: 1, with a stall). K_persist is 1, raised while the
/// expected PLT exceeds the limit and the persist still ends within the interval. I is the larger
/// of persist time and best interval. Finally both K are raised while the bottleneck does not grow.
/// \error kStopped; as Validate and the functions of overhead.h and lost_tokens.h
/// Pure but for `stop`. Source: docs/pec-planning.md section 8.1.
Result<AutoConfig> ChooseConfig(const AutoInput& input, const StopCheck& stop = {});

/// Configuration of a run that logs the gradients of all experts and loses nothing. Both
/// K are equal, and the overhead includes the log and the steps that restores repeat.
struct ReplayConfig {
  AutoConfig config;
  double log_stall_s = 0;    ///< per iteration
  double replay_s = 0;       ///< per restart, on average
  std::uint64_t window = 0;  ///< iterations until every expert has been saved once
};

/// Chooses K below N and I for such a run: the K with the least overhead
/// (ties: the smallest), each with its best interval, but not less than
/// the duration of a persist with the bandwidth that the log leaves.
/// \returns nullopt if the log needs the whole bandwidth, or if there is only one expert
/// \error kStopped; as ChooseConfig
/// Pure but for `stop`. Source: docs/pec-planning.md sections 3 and 9.4.
Result<std::optional<ReplayConfig>> ChooseReplay(const AutoInput& input,
                                                 const StopCheck& stop = {});

}  // namespace shardwright::partial
