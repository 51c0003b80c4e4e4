// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "support/base/sink.h"
#include "support/cli/console.h"
#include "support/cli/flags.h"
#include "support/cli/meter.h"
#include "support/cli/signals.h"

namespace shardwright::cli {

/// Name and duration of one pass.
struct PassTime {
  std::string name;
  double seconds = 0;
};

/// Measurements and warnings of one rank at the end of its run.
struct RankStats {
  std::vector<PassTime> passes;  ///< in the order of their first start
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t files_read = 0;
  std::uint64_t files_written = 0;
  std::uint64_t peak_memory_bytes = 0;
  std::vector<std::string> warnings;  ///< without duplicates, at most kWarningsKept
  std::uint64_t warnings_omitted = 0;
};

/// Number of different warnings that a rank stores. Further ones are only counted.
inline constexpr std::size_t kWarningsKept = 1000;

/// Resolves --progress=auto for this terminal.
/// \returns kTty, kPlain, kJson or kOff
/// Local.
ProgressMode DecideProgress(const CommonFlags& flags);

/// The sink of a command: times passes, collects warnings and shows progress. Its own thread
/// repaints and handles signals, so that progress appears even while the work is blocked in a call.
class RunSink final : public Sink {
 public:
  struct Options {
    ProgressMode progress = ProgressMode::kOff;  ///< kAuto is resolved; kOff except on rank 0
    int rank = 0;
    int ranks = 1;
    /// Ends the process with the exit code of a stop. The sink's thread calls it. If it is
    /// empty, the sink waits until interruptible work has ended.
    std::function<void()> leave = {};
  };

  /// \pre console and signals outlive the sink
  RunSink(Options options, Console& console, const SignalGuard& signals);
  ~RunSink() override;

  void Pass(std::string_view name) override;
  void Progress(std::uint64_t bytes_done, std::uint64_t bytes_total) override;
  void Files(std::uint64_t done, std::uint64_t total) override;
  void AddRead(std::uint64_t bytes, std::uint64_t files) override;
  void AddWritten(std::uint64_t bytes, std::uint64_t files) override;
  void Warn(std::string message) override;
  void Note(std::string message, int level) override;
  void Waits(std::string message) override;
  bool stop_requested() const override { return SignalGuard::StopSignal() != 0; }
  void SetLastWords(std::string_view line) override { SignalGuard::SetLastWords(line); }
  void BeginInterruptible() override;
  void EndInterruptible() override;

  /// Returns the statistics so far, for a process that exits without Finish.
  RankStats StatsNow();

  /// Returns the processor time in nanoseconds of all threads of this process but the sink's own.
  std::int64_t ProcessorTime() const;

  /// Ends the current pass and the progress display. The statistics are final afterwards.
  RankStats Finish();

 private:
  using Clock = std::chrono::steady_clock;

  void Tick();
  void AnswerSignals();
  void LeaveIfStuck();
  RankStats StatsLocked() const;
  void ShowProgress(bool asked_for);
  void UpdateMeterLocked(double now);
  void EndPassLocked();
  double Now() const;

  const Options options_;
  Console& console_;
  const SignalGuard& signals_;
  const Clock::time_point start_ = Clock::now();

  std::atomic<std::uint64_t> bytes_done_{0};
  std::atomic<std::uint64_t> bytes_total_{0};
  std::atomic<std::uint64_t> files_done_{0};
  std::atomic<std::uint64_t> files_total_{0};
  std::atomic<std::uint64_t> bytes_read_{0};
  std::atomic<std::uint64_t> bytes_written_{0};
  std::atomic<std::uint64_t> files_read_{0};
  std::atomic<std::uint64_t> files_written_{0};
  std::atomic<bool> finished_{false};

  std::mutex mutex_;  // protects everything below
  RankStats facts_;
  std::set<std::string, std::less<>> warned_;
  ProgressMeter meter_;
  std::string pass_;
  double pass_start_seconds_ = 0;
  bool stop_told_ = false;

  // Locked while the process exits, so that interruptible work cannot start to write at that time.
  std::mutex interruptible_mutex_;
  int interruptible_ = 0;
  double stop_seconds_ = 0;  // time at which the ticker first saw the stop

  std::thread ticker_;
  std::optional<clockid_t> ticker_clock_;
};

}  // namespace shardwright::cli
