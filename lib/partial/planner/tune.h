// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "partial/planner/forecast/auto_config.h"
#include "partial/planner/forecast/bandwidth.h"
#include "partial/planner/job.h"
#include "partial/planner/step_time.h"
#include "partial/select/sizes.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Model of the time of a forward and backward pass, in place of a measured one.
struct StepRequest {
  double gpu_flops = 0;  ///< operations per second that a GPU reaches; 0: use measured times
  std::optional<std::uint64_t> sequence_length;
  std::uint64_t sequences = 1;  ///< of a data-parallel rank in an iteration
  std::uint64_t top_k = 1;
  std::optional<std::uint64_t> hidden_size;  ///< absent: no attention and no token_bytes
  std::uint64_t attention_layers = 0;
  std::uint64_t token_bytes = 0;    ///< 0: two bytes per element of hidden_size
  std::uint64_t gpu_bandwidth = 0;  ///< bytes per second between GPUs of a node; 0: not known
  bool iteration_given = false;     ///< false: an iteration takes as long as both passes
};

/// Input of a tuning; the fields correspond to flags of pec-save tune.
struct TuneRequest {
  JobRequest job;
  double fault_rate = 1e-4;            ///< faults per iteration
  std::uint64_t iterations = 100'000;  ///< length of the whole run
  double plt_limit = 0.0375;
  std::optional<double> lost_share;       ///< as Job::LostShare
  std::optional<std::uint64_t> interval;  ///< absent: choose the best
  std::uint64_t zero_stage = 0;
  std::uint64_t tp = 1;                 ///< tensor-parallel ranks of each data-parallel rank
  std::uint64_t network_bandwidth = 0;  ///< of a rank to other nodes; 0: not known, no Gemini
  StepRequest step;
};

/// A configuration with the size of its checkpoints and the terms of eq 4.
struct TunedNumbers {
  AutoConfig config;
  CheckpointSize snapshot;
  CheckpointSize persist;
  std::uint64_t snapshot_rank_bytes = 0;
  std::uint64_t persist_rank_bytes = 0;
  double stalls_s = 0;
  double restarts_s = 0;
  double repeated_s = 0;
  double rate_s = 0;           ///< overhead per iteration, eq 14 to 16
  double stall_reduction = 0;  ///< share of the stall of blocking checkpoints that is avoided
  double speed_up = 1;         ///< of an iteration with a checkpoint, against a blocking one
  // For a lossless run:
  double log_stalls_s = 0;  ///< copies of gradients in the whole run
  double replays_s = 0;     ///< steps that restores repeat in the whole run
};

/// A lossless run (docs/lossless.md) of the same job.
struct TunedReplay {
  TunedNumbers numbers;
  double replay_s = 0;       ///< per restart
  std::uint64_t window = 0;  ///< iterations until every expert has been saved once
};

/// Best result of a tuning: the least overhead within the limit of lost tokens.
enum class TunedBest : std::uint8_t { kChosen, kFull, kReplay };

/// Chosen partial checkpoints, compared with full ones, a lossless run
/// and the full checkpoints of other systems, for the same job.
struct Tuning {
  AutoInput input;
  TunedNumbers chosen;  ///< or closest to the limit if none is within it
  TunedNumbers full;
  std::optional<TunedReplay> replay;
  std::string no_replay;               ///< reason why `replay` is absent
  std::optional<TunedNumbers> gemini;  ///< with a network bandwidth
  std::optional<StepTime> step;        ///< computed times
  TunedNumbers checkfreq;
  TunedNumbers blocking;
  TunedBest best = TunedBest::kChosen;
  std::optional<Bandwidths> measured;
};

/// Chooses K of snapshots, K of persisted checkpoints and their interval, also with a gradient log.
/// \param measured  bandwidths that replace those of the request
/// \error kUsage  an iteration that is shorter than the computed passes; kStopped; as SavedModelOf,
///        BottleneckByK, ChooseConfig, ChooseReplay, OverheadRate, ForwardBackwardTime and the
///        functions of baselines.h
/// Pure but for `stop`. Source: docs/pec-planning.md sections 3, 8.1, 8.3 and 8.4.
Result<Tuning> Tune(const TuneRequest& request, const Job& job,
                    const std::optional<Bandwidths>& measured, const StopCheck& stop = {});

/// Makes the `result` of the report of pec-save tune.
/// Pure.
nlohmann::json TuningJson(const Tuning& tuning);

/// Formats the answer as text: each number next to that of full checkpoints, and the flags.
/// Pure.
std::string TuningText(const Tuning& tuning);

}  // namespace shardwright::partial
