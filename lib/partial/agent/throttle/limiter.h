// SPDX-License-Identifier: Apache-2.0
// lib/partial/agent/throttle: when and how fast agents send. All threads of an
// agent ask a Limiter before they move bytes. It asks IdleRanks (idle_ranks.h)
// when ranks on its node idle. Source: docs/formats/agent.md, "Idle times".

#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "partial/agent/throttle/idle_ranks.h"

namespace shardwright::partial {

/// Reason why bytes moved at their time.
enum class Sent : std::uint8_t {
  kIdle,    ///< ranks idled
  kBusy,    ///< during computation, at the limited rate
  kDue,     ///< the snapshot would otherwise have missed the next one
  kAnyTime  ///< idle intervals are unknown, or a client waits
};
inline constexpr std::size_t kSentKinds = 4;

/// Returns "idle", "busy", "due" or "any".
const char* Name(Sent kind);

/// Bytes that moved at one time.
struct SentBytes {
  IdleRanks::Time time;
  std::uint64_t bytes = 0;
  Sent kind = Sent::kAnyTime;
};

/// Time at which a snapshot was complete in memory.
struct SnapshotTime {
  std::uint64_t iteration = 0;
  IdleRanks::Time time;
};

/// Clock of a limiter, replaceable in tests.
struct PaceClock {
  using Time = IdleRanks::Time;
  std::function<Time()> now = [] { return std::chrono::steady_clock::now(); };
  std::function<void(Time)> sleep_until;  ///< empty: the thread sleeps
};

/// Delays threads. Without idle intervals it limits the total rate of all threads.
/// With them bytes move at any speed while ranks idle, and at that rate otherwise;
/// at rate 0 only one piece in ten seconds, which keeps connections alive. Jobs
/// that would miss the next snapshot move at any speed too. Thread-safe.
/// Source: MoEtion Algorithm 4; docs/formats/agent.md, "Idle times".
class Limiter {
 public:
  using Time = IdleRanks::Time;

  /// One transfer, from its begin to its end.
  class Job {
   public:
    /// Begins a part of a snapshot, due before the next one. \param bytes  at most
    Job(Limiter& limiter, std::uint64_t bytes);
    /// Begins a transfer that a client waits for, so it does not wait for idle ranks.
    explicit Job(Limiter& limiter);
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;
    ~Job();

    /// Waits until `bytes` more bytes may move.
    void Spend(std::uint64_t bytes);
    /// Returns the number of bytes that have moved, by kind.
    std::array<std::uint64_t, kSentKinds> sent() const;

   private:
    friend Limiter;
    Limiter& limiter_;
    const bool waits_;  // true: waits for idle ranks
    Time due_;
    // Under the limiter's mutex.
    std::uint64_t left_ = 0;
    std::array<std::uint64_t, kSentKinds> sent_{};
  };

  /// While an object exists, nothing is delayed: transfers neither wait for
  /// idle ranks nor obey the rate, because a client waits for all bytes.
  class Hurry {
   public:
    explicit Hurry(Limiter& limiter);
    Hurry(const Hurry&) = delete;
    Hurry& operator=(const Hurry&) = delete;
    ~Hurry();

   private:
    Limiter& limiter_;
  };

  /// \param bytes_per_second  0: unlimited without idle intervals, none while ranks compute
  explicit Limiter(std::uint64_t bytes_per_second, IdleOptions idle = {}, PaceClock clock = {});

  /// Ends an iteration, because a snapshot is in memory. Later jobs are due at the next
  /// expected snapshot, one interval after this one. The interval is the time since the
  /// previous snapshot. A repeated call with the same iteration changes nothing.
  void Begin(std::uint64_t iteration);

  IdleRanks& idle() { return idle_; }
  const IdleRanks& idle() const { return idle_; }

  /// Returns the number of bytes moved, by kind.
  std::array<std::uint64_t, kSentKinds> sent() const;
  /// Counts jobs that moved bytes because they were due.
  std::uint64_t jobs_due() const;
  /// Returns the most recent transfers and snapshots, ordered by time.
  std::vector<SentBytes> History() const;
  std::vector<SnapshotTime> Snapshots() const;
  Time now() const { return clock_.now(); }

 private:
  void Spend(Job& job, std::uint64_t bytes);
  Sent KindOf(const Job& job, Time now) const;
  bool Due(Time now) const;
  std::optional<Time> Ask(Job& job, std::uint64_t bytes, Time asked, Time now);
  void Note(Job& job, std::uint64_t bytes, Sent kind, Time now);
  void Measure(std::uint64_t bytes, Time now);
  void SleepUntil(Time time) const;
  bool hurried() const;

  const std::uint64_t rate_;
  const PaceClock clock_;
  IdleRanks idle_;
  mutable std::mutex mutex_;
  Time free_at_{};
  int hurries_ = 0;
  std::set<Job*> jobs_;  // those that wait for idle ranks
  std::deque<SentBytes> history_;
  std::deque<SnapshotTime> snapshots_;
  Time due_{};
  std::array<std::uint64_t, kSentKinds> sent_{};
  std::uint64_t jobs_due_ = 0;
  // Measured rate of bytes that are not delayed.
  double fast_bytes_ = 0;
  double fast_s_ = 0;
  std::optional<Time> fast_at_;
  std::uint64_t fast_last_ = 0;
};

}  // namespace shardwright::partial
