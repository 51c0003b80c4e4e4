// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "partial/agent/throttle/handed_memory.h"
#include "partial/planner/forecast/bubbles.h"
#include "support/base/result.h"

// Idle intervals of the ranks on the agent's node: docs/formats/agent.md, "Idle times".

namespace shardwright::partial {

/// Layout of the memory in which a trainer's process records idle intervals: the number
/// of marks so far, then a ring of the last marks, 64 bits each. A mark is a time of the
/// steady clock in nanoseconds, times two, plus one at the beginning of an idle interval.
inline constexpr std::uint64_t kIdleMarks = 8191;
inline constexpr std::uint64_t kIdleMarkBytes = (kIdleMarks + 1) * sizeof(std::uint64_t);

/// Idle intervals of the pipeline stages on the node, for trainers that record none.
struct PipelineSchedule {
  struct Stage {
    std::uint32_t number = 0;
    std::vector<IdleTime> idle;  ///< within an iteration
  };
  double iteration_s = 0;
  std::vector<Stage> stages;
};

/// Configuration of IdleRanks that does not depend on connected processes.
struct IdleOptions {
  std::optional<PipelineSchedule> schedule;
  std::uint32_t needed = 0;  ///< ranks that must idle at the same time; 0: all known ones
};

/// \param stages  the stages on the agent's node
/// \param needed  as IdleOptions
/// \error as IdleTimesOf; kUsage  a stage twice or none, or never `needed` idle at once
Result<PipelineSchedule> ScheduleOf(const PipelineTimes& pipeline,
                                    const std::vector<std::uint32_t>& stages, std::uint32_t needed);

/// Knows when the ranks on the agent's node idle: from marks that processes write to
/// shared memory, or else from a schedule that starts at each snapshot. Thread-safe.
class IdleRanks {
 public:
  using Time = std::chrono::steady_clock::time_point;
  struct Interval {
    Time begin, end;
  };
  /// Idle intervals of a rank, or of a stage of the schedule.
  struct Rank {
    std::uint32_t number = 0;
    std::vector<Interval> idle;
  };

  explicit IdleRanks(IdleOptions options) : options_(std::move(options)) {}

  /// Registers and unregisters a process. Its marks are kept until the rank enters again.
  /// \returns the number to pass to Leave
  std::uint64_t Enter(std::uint32_t rank, HandedMemory marks);
  void Leave(std::uint32_t rank, std::uint64_t entered);

  /// Starts the next iteration of the schedule, because a snapshot is in memory.
  void Begin(std::uint64_t iteration, Time now);

  /// Returns true if marks or a schedule are available.
  bool known() const;
  /// Returns true if the needed number of ranks idle. \pre known
  bool idle(Time now) const;
  /// Returns the number of processes that record marks now.
  std::uint32_t marking() const;
  /// Returns idle intervals by rank; those of a schedule by stage.
  std::vector<Rank> Between(Time first, Time last) const;

 private:
  struct Marks {
    HandedMemory memory;
    std::uint64_t entered = 0;
    bool here = true;
  };

  bool scheduled() const { return options_.schedule && begun_; }
  /// Converts a time to seconds since the start of an iteration of the schedule.
  double PlaceOf(Time now) const;

  const IdleOptions options_;
  mutable std::mutex mutex_;
  std::map<std::uint32_t, Marks> marks_;  // by rank
  std::uint64_t entered_ = 0;
  std::optional<Time> begun_;
  std::uint64_t iteration_ = 0;  // the one that ended at begun_
  double period_s_ = 0;          // measured duration of iterations
};

}  // namespace shardwright::partial
