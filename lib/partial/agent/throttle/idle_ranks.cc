// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/throttle/idle_ranks.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <utility>

namespace shardwright::partial {
namespace {

/// Above this number, marks of ranks that have disconnected are discarded.
constexpr std::size_t kRanksKept = 1024;
/// Maximum number of iterations of a schedule in an answer.
constexpr double kIterations = 4096;

using Time = IdleRanks::Time;

std::span<const std::uint64_t> WordsIn(const HandedMemory& memory) {
  return {reinterpret_cast<const std::uint64_t*>(memory.bytes().data()), kIdleMarks + 1};
}

/// Reads a word that another process writes atomically.
std::uint64_t WordAt(std::span<const std::uint64_t> words, std::uint64_t at) {
  return __atomic_load_n(&words[at], __ATOMIC_ACQUIRE);
}

bool MarksIdle(const HandedMemory& memory) {
  const auto words = WordsIn(memory);
  const std::uint64_t count = WordAt(words, 0);
  return count > 0 && WordAt(words, 1 + (count - 1) % kIdleMarks) % 2 == 1;
}

Time MarkedTime(std::uint64_t mark) {
  return Time(std::chrono::nanoseconds(static_cast<std::int64_t>(mark / 2)));
}

Time Later(Time from, double seconds) {
  return from + std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(seconds));
}

void AddByteRange(Time begin, Time end, Time first, Time last,
                  std::vector<IdleRanks::Interval>* stretches) {
  begin = std::max(begin, first);
  end = std::min(end, last);
  if (begin < end) stretches->push_back({begin, end});
}

/// Returns the idle intervals that a process has marked. Marks that are overwritten
/// during the call, or use another clock, are out of order and end an interval.
std::vector<IdleRanks::Interval> ByteRangesOf(const HandedMemory& memory, Time first, Time last) {
  const auto words = WordsIn(memory);
  const std::uint64_t count = WordAt(words, 0);
  std::vector<IdleRanks::Interval> stretches;
  std::optional<Time> begun;
  Time before{};
  for (std::uint64_t i = count - std::min(count, kIdleMarks); i < count; ++i) {
    const std::uint64_t mark = WordAt(words, 1 + i % kIdleMarks);
    const Time time = MarkedTime(mark);
    if (time < before) {
      begun.reset();
      continue;
    }
    before = time;
    if (mark % 2 == 1) {
      if (!begun) begun = time;
    } else if (begun) {
      AddByteRange(*begun, time, first, last, &stretches);
      begun.reset();
    }
  }
  if (begun) AddByteRange(*begun, last, first, last, &stretches);
  return stretches;
}

bool Covers(const std::vector<IdleTime>& idle, double at_s) {
  return std::any_of(idle.begin(), idle.end(),
                     [&](const IdleTime& one) { return one.begin_s <= at_s && at_s < one.end_s; });
}

std::uint32_t NeededOf(std::uint32_t needed, std::size_t known) {
  return needed == 0 ? static_cast<std::uint32_t>(known) : needed;
}

}  // namespace

Result<PipelineSchedule> ScheduleOf(const PipelineTimes& pipeline,
                                    const std::vector<std::uint32_t>& stages,
                                    std::uint32_t needed) {
  PipelineSchedule schedule;
  std::vector<double> begins;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    if (std::find(stages.begin(), stages.begin() + static_cast<std::ptrdiff_t>(i), stages[i]) !=
        stages.begin() + static_cast<std::ptrdiff_t>(i)) {
      return Fail(Errc::kUsage, "stage ", stages[i], " is given twice");
    }
    SW_TRY_ASSIGN(const BubbleTimes times, BubblesOf(pipeline, stages[i]));
    schedule.iteration_s = times.iteration_s;
    PipelineSchedule::Stage& stage = schedule.stages.emplace_back();
    stage.number = stages[i];
    SW_TRY_ASSIGN(stage.idle, IdleTimesOf(pipeline, stages[i]));
    for (const IdleTime& one : stage.idle) begins.push_back(one.begin_s);
  }
  // If enough stages ever idle together, they do so when one of them begins to.
  const std::uint32_t enough = NeededOf(needed, stages.size());
  const bool any = std::any_of(begins.begin(), begins.end(), [&](double at_s) {
    return std::count_if(schedule.stages.begin(), schedule.stages.end(), [&](const auto& stage) {
             return Covers(stage.idle, at_s);
           }) >= static_cast<std::ptrdiff_t>(enough);
  });
  if (any) return schedule;
  return Fail(Errc::kUsage, enough, " of the ", stages.size(),
              " given stages never idle at once in a pipeline of ", pipeline.stages, " stages");
}

std::uint64_t IdleRanks::Enter(std::uint32_t rank, HandedMemory marks) {
  const std::lock_guard lock(mutex_);
  marks_.erase(rank);
  if (marks_.size() >= kRanksKept) {
    std::erase_if(marks_, [](const auto& one) { return !one.second.here; });
  }
  marks_.emplace(rank, Marks{std::move(marks), ++entered_, true});
  return entered_;
}

void IdleRanks::Leave(std::uint32_t rank, std::uint64_t entered) {
  const std::lock_guard lock(mutex_);
  const auto found = marks_.find(rank);
  if (found != marks_.end() && found->second.entered == entered) found->second.here = false;
}

void IdleRanks::Begin(std::uint64_t iteration, Time now) {
  const std::lock_guard lock(mutex_);
  if (options_.schedule) {
    // Time of an iteration outside the pipeline, mainly the optimizer's step, is at its end.
    double took_s = 0;
    if (begun_ && iteration > iteration_) {
      took_s = std::chrono::duration<double>(now - *begun_).count() /
               static_cast<double>(iteration - iteration_);
    }
    period_s_ = std::max(options_.schedule->iteration_s, took_s);
  }
  begun_ = now;
  iteration_ = iteration;
}

bool IdleRanks::known() const {
  const std::lock_guard lock(mutex_);
  return scheduled() ||
         std::any_of(marks_.begin(), marks_.end(), [](const auto& one) { return one.second.here; });
}

std::uint32_t IdleRanks::marking() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::uint32_t>(
      std::count_if(marks_.begin(), marks_.end(), [](const auto& one) { return one.second.here; }));
}

double IdleRanks::PlaceOf(Time now) const {
  const double since_s = std::chrono::duration<double>(now - *begun_).count();
  return period_s_ > 0 ? std::fmod(std::max(0.0, since_s), period_s_) : 0;
}

bool IdleRanks::idle(Time now) const {
  const std::lock_guard lock(mutex_);
  std::uint32_t here = 0;
  std::uint32_t idle = 0;
  for (const auto& [rank, marks] : marks_) {
    if (!marks.here) continue;
    ++here;
    if (MarksIdle(marks.memory)) ++idle;
  }
  if (here == 0 && scheduled()) {
    const double at_s = PlaceOf(now);
    const std::vector<PipelineSchedule::Stage>& stages = options_.schedule->stages;
    here = static_cast<std::uint32_t>(stages.size());
    for (const auto& stage : stages) idle += Covers(stage.idle, at_s) ? 1 : 0;
  }
  return here > 0 && idle >= std::min(here, NeededOf(options_.needed, here));
}

std::vector<IdleRanks::Rank> IdleRanks::Between(Time first, Time last) const {
  const std::lock_guard lock(mutex_);
  std::vector<Rank> ranks;
  for (const auto& [rank, marks] : marks_) {
    ranks.push_back({rank, ByteRangesOf(marks.memory, first, last)});
  }
  if (!ranks.empty() || !scheduled() || period_s_ <= 0) return ranks;
  for (const PipelineSchedule::Stage& stage : options_.schedule->stages) {
    Rank& rank = ranks.emplace_back();
    rank.number = stage.number;
    // Idle times before the last snapshot are computed from the period measured after it.
    const auto since = [&](Time time) {
      return std::floor(std::chrono::duration<double>(time - *begun_).count() / period_s_);
    };
    for (double i = std::max(since(first), since(last) - kIterations);; ++i) {
      const double at_s = i * period_s_;
      const Time begin = Later(*begun_, at_s);
      if (begin >= last) break;
      for (const IdleTime& one : stage.idle) {
        AddByteRange(Later(begin, one.begin_s), Later(begin, one.end_s), first, last, &rank.idle);
      }
    }
  }
  return ranks;
}

}  // namespace shardwright::partial
