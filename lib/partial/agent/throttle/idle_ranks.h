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

// When the ranks beside an agent idle: docs/formats/agent.md, "Idle times".

namespace shardwright::partial {

/// Memory in which a trainer's process marks when it idles: how many marks it has made, and behind
/// that the last of them in a ring, 64 bits each. A mark is a time of the steady clock in
/// nanoseconds, doubled, plus one where idling begins.
inline constexpr std::uint64_t kIdleMarks = 8191;
inline constexpr std::uint64_t kIdleMarkBytes = (kIdleMarks + 1) * sizeof(std::uint64_t);

/// When the stages beside an agent idle, where nobody marks it.
struct PipelineSchedule {
  struct Stage {
    std::uint32_t number = 0;
    std::vector<IdleTime> idle;  ///< in an iteration
  };
  double iteration_s = 0;
  std::vector<Stage> stages;
};

/// What is known of the ranks beside an agent before any of them is there.
struct IdleOptions {
  std::optional<PipelineSchedule> schedule;
  std::uint32_t needed = 0;  ///< ranks that have to idle at once; 0: all that are known
};

/// \param stages  those beside the agent
/// \param needed  as IdleOptions
/// \error as IdleTimesOf; kUsage  a stage twice or none, or so many never idle at once
Result<PipelineSchedule> ScheduleOf(const PipelineTimes& pipeline,
                                    const std::vector<std::uint32_t>& stages, std::uint32_t needed);

/// Knows when the ranks beside an agent idle: what their processes mark in memory that they share,
/// else a schedule that begins with each snapshot. Every call may come from any thread.
class IdleRanks {
 public:
  using Time = std::chrono::steady_clock::time_point;
  struct Stretch {
    Time begin, end;
  };
  /// What is known of a rank, or of a stage of the schedule.
  struct Rank {
    std::uint32_t number = 0;
    std::vector<Stretch> idle;
  };

  explicit IdleRanks(IdleOptions options) : options_(std::move(options)) {}

  /// A process begins to mark, and ends; what it has marked is kept until the rank enters again.
  /// \returns what Leave is given
  std::uint64_t Enter(std::uint32_t rank, HandedMemory marks);
  void Leave(std::uint32_t rank, std::uint64_t entered);

  /// A snapshot of an iteration is in memory: the next iteration begins.
  void Begin(std::uint64_t iteration, Time now);

  /// Whether anybody says when ranks idle.
  bool known() const;
  /// Whether as many idle as have to. \pre known
  bool idle(Time now) const;
  /// Processes that mark now.
  std::uint32_t marking() const;
  /// When ranks idled, by rank; of a schedule, by stage.
  std::vector<Rank> Between(Time first, Time last) const;

 private:
  struct Marks {
    HandedMemory memory;
    std::uint64_t entered = 0;
    bool here = true;
  };

  bool scheduled() const { return options_.schedule && begun_; }
  /// Seconds into an iteration of the schedule.
  double PlaceOf(Time now) const;

  const IdleOptions options_;
  mutable std::mutex mutex_;
  std::map<std::uint32_t, Marks> marks_;  // by rank
  std::uint64_t entered_ = 0;
  std::optional<Time> begun_;
  std::uint64_t iteration_ = 0;  // that ended at begun_
  double period_s_ = 0;          // of iterations as they are
};

}  // namespace shardwright::partial
