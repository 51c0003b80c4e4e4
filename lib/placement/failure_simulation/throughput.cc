// SPDX-License-Identifier: Apache-2.0
#include "placement/failure_simulation/throughput.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace shardwright::placement {
namespace {

using State = SimulationStep::State;

/// Tolerance for added times, so that rounding does not move a checkpoint past an event.
constexpr double kTolerance = 1e-9;
constexpr double kMostCycles = 1e18;  // fits in the counter

class Job {
 public:
  Job(const SimulationResult& result, const ThroughputOptions& options)
      : steps_(result.steps), options_(options) {
    out_.strategy = result.strategy;
  }

  Throughput Run() {
    std::size_t first = 0;
    while (first < steps_.size() && steps_[first].state == State::kStalled) ++first;
    for (std::size_t i = first; i + 1 < steps_.size(); ++i) {
      const double end = Seconds(steps_[i + 1]);
      now_ = Seconds(steps_[i]);
      if (steps_[i].state == State::kStalled) {
        Pass(Activity::kStalled, end);
      } else {
        if (i > first) React(steps_[i]);
        Pause(end);
        Train(steps_[i], end);
      }
    }
    out_.total_seconds =
        first < steps_.size() ? Seconds(steps_.back()) - Seconds(steps_[first]) : 0;
    return std::move(out_);
  }

 private:
  static double Seconds(const SimulationStep& step) {
    return static_cast<double>(step.time_ms) / 1e3;
  }

  double& of(Activity activity) { return out_.seconds[static_cast<std::size_t>(activity)]; }

  /// Spends the time until `end` without training.
  void Pass(Activity activity, double end) {
    if (end <= now_) return;
    out_.spans.push_back({now_, end, activity, 0, 0});
    of(activity) += end - now_;
    now_ = end;
  }

  /// Queues the pauses that a new plan causes.
  void React(const SimulationStep& step) {
    const bool changed = step.failure || step.transfers > 0 || step.gpus_used != gpus_;
    gpus_ = step.gpus_used;
    if (step.state == State::kRestored) {
      pauses_.clear();  // a restart begins again
      Discard();
    } else if (!changed) {
      return;
    }
    if (step.failure) pauses_.emplace_back(Activity::kDetection, options_.detection_seconds);
    if (step.state == State::kRestored) {
      pauses_.emplace_back(Activity::kRestart, options_.restart_seconds);
      pauses_.emplace_back(Activity::kRestore, options_.restore_seconds);
      ++out_.restores;
    } else {
      pauses_.emplace_back(Activity::kRebalance, options_.rebalance_seconds);
      pauses_.emplace_back(Activity::kMigration, step.migration_seconds);
    }
  }

  /// Discards the steps since the last checkpoint.
  void Discard() {
    out_.samples_lost += out_.samples - saved_samples_;
    out_.samples = saved_samples_;
    of(Activity::kRecompute) += of(Activity::kTrain) - saved_seconds_;
    of(Activity::kTrain) = saved_seconds_;
    open_steps_ = 0;
  }

  /// Spends queued pauses. What does not end before `end` remains queued.
  void Pause(double end) {
    while (!pauses_.empty() && now_ < end) {
      auto& [activity, seconds] = pauses_.front();
      const double spent = std::min(seconds, end - now_);
      seconds -= spent;
      const bool over = seconds <= kTolerance;
      Pass(activity, now_ + spent);
      if (over) pauses_.erase(pauses_.begin());
    }
  }

  /// Adds training time.
  void Compute(double seconds, double step_seconds, double samples_per_step) {
    const double steps = seconds / step_seconds;
    of(Activity::kTrain) += seconds;
    out_.samples += steps * samples_per_step;
    out_.spans.back().samples += steps * samples_per_step;
    open_steps_ += steps;
  }

  void WriteCheckpoints(double seconds, std::uint64_t count) {
    of(Activity::kCheckpoint) += seconds;
    out_.checkpoints += count;
    if (count == 0) return;
    saved_samples_ = out_.samples;
    saved_seconds_ = of(Activity::kTrain);
    open_steps_ = 0;
  }

  /// Trains until `end`, with checkpoints. One that `end` interrupts begins again afterwards.
  void Train(const SimulationStep& step, double end) {
    gpus_ = step.gpus_used;
    double left = end - now_;
    if (left <= 0) return;
    out_.spans.push_back({now_, end, Activity::kTrain, gpus_, 0});
    now_ = end;
    const double x = options_.expert_share;
    const double step_seconds = options_.step_seconds * (1 - x + x * step.imbalance_used);
    const double samples = options_.samples_per_gpu * gpus_;
    const auto every = static_cast<double>(options_.checkpoint_every);
    const double write = options_.checkpoint_seconds;
    const double due = (every - open_steps_) * step_seconds;  // until the next checkpoint
    if (every == 0 || left + kTolerance < due) return Compute(left, step_seconds, samples);
    Compute(std::max(due, 0.0), step_seconds, samples);
    left = std::max(left - due, 0.0);
    if (left + kTolerance < write) return WriteCheckpoints(left, 0);
    WriteCheckpoints(write, 1);
    left = std::max(left - write, 0.0);
    // Whole cycles of `every` steps and a checkpoint, then the start of a cycle.
    const double compute = every * step_seconds;
    const double cycles = std::floor((left + kTolerance) / (compute + write));
    Compute(cycles * compute, step_seconds, samples);
    WriteCheckpoints(cycles * write, static_cast<std::uint64_t>(std::min(cycles, kMostCycles)));
    left = std::max(left - cycles * (compute + write), 0.0);
    Compute(std::min(left, compute), step_seconds, samples);
    WriteCheckpoints(std::max(left - compute, 0.0), 0);
  }

  const std::vector<SimulationStep>& steps_;
  const ThroughputOptions& options_;
  Throughput out_;
  double now_ = 0;
  std::vector<std::pair<Activity, double>> pauses_;
  std::uint32_t gpus_ = 0;    // GPUs of the last plan
  double saved_samples_ = 0;  // samples in the last checkpoint
  double saved_seconds_ = 0;  // training time until the last checkpoint
  double open_steps_ = 0;     // steps since then
};

}  // namespace

std::string_view ActivityName(Activity activity) {
  constexpr std::array<std::string_view, kActivities> kNames = {
      "train",     "recompute", "checkpoint", "detection", "rebalance",
      "migration", "restart",   "restore",    "stalled"};
  return kNames[static_cast<std::size_t>(activity)];
}

Throughput ComputeThroughput(const SimulationResult& result, const ThroughputOptions& options) {
  return Job(result, options).Run();
}

const Throughput* BaselineOf(const std::vector<Throughput>& runs) {
  const auto at = std::find_if(runs.begin(), runs.end(),
                               [](const Throughput& run) { return run.strategy == "ds"; });
  return at == runs.end() ? nullptr : &*at;
}

}  // namespace shardwright::placement
