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

/// What a configuration is chosen for; the fields are the flags of pec-save tune.
struct TuneRequest {
  JobRequest job;
  double fault_rate = 1e-4;            ///< faults per iteration
  std::uint64_t iterations = 100'000;  ///< of the whole run
  double plt_limit = 0.0375;
  std::optional<double> lost_share;       ///< as Job::LostShare
  std::optional<std::uint64_t> interval;  ///< absent: what is best
};

/// A configuration, what its checkpoints hold, and the terms of eq 4.
struct TunedNumbers {
  AutoConfig config;
  CheckpointSize snapshot;
  CheckpointSize persist;
  std::uint64_t snapshot_rank_bytes = 0;
  std::uint64_t persist_rank_bytes = 0;
  double stalls_s = 0;
  double restarts_s = 0;
  double repeated_s = 0;
  double rate_s = 0;  ///< overhead of an iteration, eq 14 to 16
  // Of a lossless run.
  double log_stalls_s = 0;  ///< copies of gradients, of the whole run
  double replays_s = 0;     ///< steps that restores make again, of the whole run
};

/// A lossless run (docs/lossless.md) for the same job.
struct TunedReplay {
  TunedNumbers numbers;
  double replay_s = 0;       ///< of a restart
  std::uint64_t window = 0;  ///< iterations in which every expert is saved once
};

/// What of a tuning is best: the least overhead within the limit of lost tokens.
enum class TunedBest : std::uint8_t { kChosen, kFull, kReplay };

/// What is chosen of partial checkpoints, beside the same job with full ones and a lossless run.
struct Tuning {
  AutoInput input;
  TunedNumbers chosen;  ///< or the closest to the limit, if none is within it
  TunedNumbers full;
  std::optional<TunedReplay> replay;
  std::string no_replay;  ///< why there is none
  TunedBest best = TunedBest::kChosen;
  std::optional<Bandwidths> measured;
};

/// Chooses K of both levels and the interval for a job, with and without a log of gradients.
/// \param measured  bandwidths that stand for those of the request
/// \error kStopped; as SavedModelOf, BottleneckByK, ChooseConfig, ChooseReplay and OverheadRate
/// Pure but for `stop`. Source: docs/pec-planning.md sections 3 and 8.1.
Result<Tuning> Tune(const TuneRequest& request, const Job& job,
                    const std::optional<Bandwidths>& measured, const StopCheck& stop = {});

/// The report's `result` of pec-save tune.
/// Pure.
nlohmann::json TuningJson(const Tuning& tuning);

/// The answer for people: every number beside that of full checkpoints, and the flags to use.
/// Pure.
std::string TuningText(const Tuning& tuning);

}  // namespace shardwright::partial
