// SPDX-License-Identifier: Apache-2.0
// lib/partial/agent/throttle: when and how fast agents send.
// A Limiter is what all threads of an agent ask before they move bytes; it asks IdleRanks
// (idle_ranks.h) whether the ranks beside it idle. Source: docs/formats/agent.md, "Idle times".

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

/// Why bytes moved when they did.
enum class Sent : std::uint8_t {
  kIdle,    ///< ranks idled
  kBeside,  ///< beside computation, at the rate that is allowed there
  kDue,     ///< else the snapshot would not have been complete before the next one
  kAnyTime  ///< nobody says when ranks idle, or somebody waits for the bytes
};
inline constexpr std::size_t kSentKinds = 4;

/// "idle", "beside", "due", "any".
const char* Name(Sent kind);

/// Bytes that moved at a time.
struct SentBytes {
  IdleRanks::Time time;
  std::uint64_t bytes = 0;
  Sent kind = Sent::kAnyTime;
};

/// A snapshot that was complete in memory.
struct SnapshotTime {
  std::uint64_t iteration = 0;
  IdleRanks::Time time;
};

/// Where time comes from, and what waits.
struct PaceClock {
  using Time = IdleRanks::Time;
  std::function<Time()> now = [] { return std::chrono::steady_clock::now(); };
  std::function<void(Time)> sleep_until;  ///< empty: the thread sleeps
};

/// Holds threads back. As long as nobody says when ranks idle: to a number of bytes per second, all
/// of them together. Else they move at any speed while ranks idle, and beside that at this number;
/// with 0 not at all, but for a piece in ten seconds, so that no connection is taken for dead. What
/// would not be complete before the next snapshot moves at any speed too. Thread-safe.
/// Source: MoEtion Algorithm 4; docs/formats/agent.md, "Idle times".
class Limiter {
 public:
  using Time = IdleRanks::Time;

  /// Something that is sent, from its begin to its end.
  class Job {
   public:
    /// A part of a snapshot, to be there before the next one. \param bytes  at most
    Job(Limiter& limiter, std::uint64_t bytes);
    /// Bytes that somebody waits for: ranks need not idle.
    explicit Job(Limiter& limiter);
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;
    ~Job();

    /// Waits until `bytes` more may move.
    void Spend(std::uint64_t bytes);
    /// Bytes that have moved, by kind.
    std::array<std::uint64_t, kSentKinds> sent() const;

   private:
    friend Limiter;
    Limiter& limiter_;
    const bool waits_;  // for ranks that idle
    Time due_;
    // Under the limiter's mutex.
    std::uint64_t left_ = 0;
    std::array<std::uint64_t, kSentKinds> sent_{};
  };

  /// As long as it is there somebody waits for all bytes: nothing waits for ranks to idle, or is
  /// held back by the rate.
  class Hurry {
   public:
    explicit Hurry(Limiter& limiter);
    Hurry(const Hurry&) = delete;
    Hurry& operator=(const Hurry&) = delete;
    ~Hurry();

   private:
    Limiter& limiter_;
  };

  /// \param bytes_per_second  0: any number where nobody says when ranks idle, else none
  explicit Limiter(std::uint64_t bytes_per_second, IdleOptions idle = {}, PaceClock clock = {});

  /// A snapshot is in memory: an iteration ends, and jobs that begin from now on are due when the
  /// next snapshot is expected, as long after this one as this one is after the one before. One of
  /// the same iteration once more changes nothing of that.
  void Begin(std::uint64_t iteration);

  IdleRanks& idle() { return idle_; }
  const IdleRanks& idle() const { return idle_; }

  /// What has moved, by kind.
  std::array<std::uint64_t, kSentKinds> sent() const;
  /// Jobs of which something moved because they were due.
  std::uint64_t jobs_due() const;
  /// The last sends and snapshots, by time.
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
  std::set<Job*> jobs_;  // those that wait for ranks that idle
  std::deque<SentBytes> history_;
  std::deque<SnapshotTime> snapshots_;
  Time due_{};
  std::array<std::uint64_t, kSentKinds> sent_{};
  std::uint64_t jobs_due_ = 0;
  // How fast bytes move that nothing holds back.
  double fast_bytes_ = 0;
  double fast_s_ = 0;
  std::optional<Time> fast_at_;
  std::uint64_t fast_last_ = 0;
};

}  // namespace shardwright::partial
