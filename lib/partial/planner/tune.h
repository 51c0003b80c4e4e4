// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "partial/planner/forecast/auto_config.h"
#include "partial/planner/forecast/bandwidth.h"
#include "partial/planner/job.h"
#include "partial/select/sizes.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Input of a tuning; the fields correspond to flags of pec-save tune.
struct TuneRequest {
  JobRequest job;
  double fault_rate = 1e-4;            ///< faults per iteration
  std::uint64_t iterations = 100'000;  ///< length of the whole run
  double plt_limit = 0.0375;
  std::optional<double> lost_share;       ///< as Job::LostShare
  std::optional<std::uint64_t> interval;  ///< absent: choose the best
  std::uint64_t zero_stage = 0;
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
  std::string no_replay;  ///< reason why `replay` is absent
  TunedNumbers checkfreq;
  TunedNumbers blocking;
  TunedBest best = TunedBest::kChosen;
  std::optional<Bandwidths> measured;
};

/// Chooses K of snapshots, K of persisted checkpoints and their interval, also with a gradient log.
/// \param measured  bandwidths that replace those of the request
/// \error kStopped; as SavedModelOf, BottleneckByK, ChooseConfig, ChooseReplay, OverheadRate,
///        BlockingConfig and CheckFreqConfig
/// Pure but for `stop`. Source: docs/pec-planning.md sections 3, 8.1 and 8.3.
Result<Tuning> Tune(const TuneRequest& request, const Job& job,
                    const std::optional<Bandwidths>& measured, const StopCheck& stop = {});

/// Makes the `result` of the report of pec-save tune.
/// Pure.
nlohmann::json TuningJson(const Tuning& tuning);

/// Formats the answer as text: each number next to that of full checkpoints, and the flags.
/// Pure.
std::string TuningText(const Tuning& tuning);

}  // namespace shardwright::partial
