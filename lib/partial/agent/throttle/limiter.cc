// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/throttle/limiter.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace shardwright::partial {
namespace {

using std::chrono::duration;
using std::chrono::duration_cast;
using Time = Limiter::Time;

/// Interval at which waiting jobs check for idle ranks: a bubble lasts at least milliseconds.
constexpr std::chrono::milliseconds kLook(1);
/// Interval at which delayed threads check if a client waits for all bytes.
constexpr std::chrono::milliseconds kLookForHurry(100);
/// Longest time without a byte, because receivers close silent connections after 30 s.
constexpr std::chrono::seconds kLongest(10);
/// Due time of a first snapshot, when the interval to the next one is unknown.
constexpr std::chrono::seconds kFirstDue(30);
/// Remaining bytes are sent at once when less than this multiple of their time remains.
constexpr double kHaste = 2;
/// A longer gap between two sends means that other work was in between.
constexpr std::chrono::milliseconds kApart(50);
constexpr double kFastSeconds = 4;  // over which the speed is averaged
constexpr std::size_t kHistory = std::size_t{1} << 14;
constexpr std::size_t kSnapshots = 64;

Time::duration TimeOf(double seconds) {
  return duration_cast<Time::duration>(duration<double>(seconds));
}

double SecondsOf(Time::duration time) { return duration<double>(time).count(); }

}  // namespace

const char* Name(Sent kind) {
  switch (kind) {
    case Sent::kIdle:
      return "idle";
    case Sent::kBusy:
      return "busy";
    case Sent::kDue:
      return "due";
    case Sent::kAnyTime:
      break;
  }
  return "any";
}

Limiter::Limiter(std::uint64_t bytes_per_second, IdleOptions idle, PaceClock clock)
    : rate_(bytes_per_second), clock_(std::move(clock)), idle_(std::move(idle)) {}

Limiter::Job::Job(Limiter& limiter, std::uint64_t bytes)
    : limiter_(limiter), waits_(true), left_(bytes) {
  const Time now = limiter.clock_.now();
  const std::lock_guard lock(limiter.mutex_);
  due_ = limiter.snapshots_.empty() ? now + kFirstDue : limiter.due_;
  limiter.jobs_.insert(this);
}

Limiter::Job::Job(Limiter& limiter) : limiter_(limiter), waits_(false) {}

Limiter::Job::~Job() {
  const std::lock_guard lock(limiter_.mutex_);
  limiter_.jobs_.erase(this);
}

void Limiter::Job::Spend(std::uint64_t bytes) { limiter_.Spend(*this, bytes); }

std::array<std::uint64_t, kSentKinds> Limiter::Job::sent() const {
  const std::lock_guard lock(limiter_.mutex_);
  return sent_;
}

Limiter::Hurry::Hurry(Limiter& limiter) : limiter_(limiter) {
  const std::lock_guard lock(limiter_.mutex_);
  ++limiter_.hurries_;
}

Limiter::Hurry::~Hurry() {
  const std::lock_guard lock(limiter_.mutex_);
  --limiter_.hurries_;
}

void Limiter::Begin(std::uint64_t iteration) {
  const Time now = clock_.now();
  idle_.Begin(iteration, now);
  const std::lock_guard lock(mutex_);
  if (!snapshots_.empty() && snapshots_.back().iteration == iteration) return;
  due_ = now + (snapshots_.empty() ? Time::duration(kFirstDue) : now - snapshots_.back().time);
  snapshots_.push_back({iteration, now});
  if (snapshots_.size() > kSnapshots) snapshots_.pop_front();
}

/// Returns true if the remaining bytes of all jobs would be late if they waited longer.
/// \pre the caller has locked mutex_
bool Limiter::Due(Time now) const {
  Time due = Time::max();
  std::uint64_t left = 0;
  for (const Job* job : jobs_) {
    due = std::min(due, job->due_);
    left += job->left_;
  }
  if (jobs_.empty()) return false;
  if (now >= due) return true;
  if (fast_s_ > 0) {
    const double need_s = static_cast<double>(left) * fast_s_ / fast_bytes_;
    return now + TimeOf(std::min(kHaste * need_s, 1e9)) >= due;
  }
  // The duration is unknown, so half of the time must suffice.
  const Time from = snapshots_.empty() ? due - kFirstDue : snapshots_.back().time;
  return now - from >= (due - from) / 2;
}

/// Returns the kind of the bytes that a job may move now; kBusy: subject to the rate.
/// \pre the caller has locked mutex_, and idle intervals are known
Sent Limiter::KindOf(const Job& job, Time now) const {
  if (!job.waits_ || hurries_ > 0) return Sent::kAnyTime;
  if (idle_.idle(now)) return Sent::kIdle;
  return Due(now) ? Sent::kDue : Sent::kBusy;
}

void Limiter::Note(Job& job, std::uint64_t bytes, Sent kind, Time now) {
  const auto index = static_cast<std::size_t>(kind);
  if (kind == Sent::kDue && job.sent_[index] == 0) ++jobs_due_;
  job.sent_[index] += bytes;
  job.left_ -= std::min(job.left_, bytes);
  sent_[index] += bytes;
  history_.push_back({now, bytes, kind});
  if (history_.size() > kHistory) history_.pop_front();
}

/// Measures the speed from one send to the next. \pre mutex_ is locked, nothing is delayed
void Limiter::Measure(std::uint64_t bytes, Time now) {
  if (fast_at_ && now - *fast_at_ < kApart) {
    fast_s_ += SecondsOf(now - *fast_at_);
    fast_bytes_ += static_cast<double>(fast_last_);
    if (fast_s_ > kFastSeconds) {
      fast_s_ /= 2;
      fast_bytes_ /= 2;
    }
  }
  fast_at_ = now;
  fast_last_ = bytes;
}

/// Lets bytes move, or returns when to retry. \pre mutex_ is locked, idle intervals are known
std::optional<Time> Limiter::Ask(Job& job, std::uint64_t bytes, Time asked, Time now) {
  const Sent kind = KindOf(job, now);
  if (kind != Sent::kBusy) {
    Measure(bytes, now);
  } else if (rate_ > 0 && now >= free_at_) {
    free_at_ = now + TimeOf(static_cast<double>(bytes) / static_cast<double>(rate_));
  } else if (now - asked < kLongest) {
    return rate_ > 0 ? std::min(free_at_, now + kLook) : now + kLook;
  }
  Note(job, bytes, kind, now);
  return std::nullopt;
}

void Limiter::Spend(Job& job, std::uint64_t bytes) {
  const Time asked = clock_.now();
  for (bool moves = false; !moves;) {
    Time wait{};
    {
      const std::lock_guard lock(mutex_);
      const Time now = clock_.now();
      if (idle_.known()) {
        const std::optional<Time> again = Ask(job, bytes, asked, now);
        if (!again) return;
        wait = *again;
      } else {
        moves = true;
        wait = now;
        if (rate_ > 0 && hurries_ == 0) {
          free_at_ = std::max(free_at_, now) +
                     TimeOf(static_cast<double>(bytes) / static_cast<double>(rate_));
          wait = free_at_;
        }
        Note(job, bytes, Sent::kAnyTime, wait);
      }
      if (moves && wait == now) return;
    }
    if (!moves) {
      SleepUntil(wait);
      continue;
    }
    for (Time now = clock_.now(); now < wait && !hurried(); now = clock_.now()) {
      SleepUntil(std::min(wait, now + kLookForHurry));
    }
  }
}

bool Limiter::hurried() const {
  const std::lock_guard lock(mutex_);
  return hurries_ > 0;
}

void Limiter::SleepUntil(Time time) const {
  if (clock_.sleep_until) return clock_.sleep_until(time);
  std::this_thread::sleep_until(time);
}

std::array<std::uint64_t, kSentKinds> Limiter::sent() const {
  const std::lock_guard lock(mutex_);
  return sent_;
}

std::uint64_t Limiter::jobs_due() const {
  const std::lock_guard lock(mutex_);
  return jobs_due_;
}

std::vector<SentBytes> Limiter::History() const {
  const std::lock_guard lock(mutex_);
  return {history_.begin(), history_.end()};
}

std::vector<SnapshotTime> Limiter::Snapshots() const {
  const std::lock_guard lock(mutex_);
  return {snapshots_.begin(), snapshots_.end()};
}

}  // namespace shardwright::partial
