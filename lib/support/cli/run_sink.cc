// SPDX-License-Identifier: Apache-2.0
#include "support/cli/run_sink.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "support/base/bytes.h"
#include "support/base/system.h"
#include "support/cli/resources.h"
#include "support/text/text.h"

namespace shardwright::cli {
namespace {

/// Returns the milliseconds between two progress updates, -1 for updates on SIGUSR2 only.
int PeriodMs(ProgressMode mode) {
  switch (mode) {
    case ProgressMode::kTty:
      return 170;  // at most six repaints per second
    case ProgressMode::kJson:
      return 1000;
    case ProgressMode::kPlain:
      return 30'000;
    default:
      return -1;
  }
}

/// Seconds that interruptible work has to end by itself after a stop.
constexpr double kGraceSeconds = 0.5;
/// Milliseconds between two checks for the end of this work.
constexpr int kLookMs = 50;

/// Prefixes a message with the rank that it comes from.
std::string OfRank(int rank, const std::string& message) {
  return text::RankList({&rank, 1}) + ": " + message;
}

}  // namespace

ProgressMode DecideProgress(const CommonFlags& flags) {
  if (flags.progress != ProgressMode::kAuto) return flags.progress;
  if (flags.verbosity < 0) return ProgressMode::kOff;
  return IsTerminal(STDERR_FILENO) ? ProgressMode::kTty : ProgressMode::kPlain;
}

RunSink::RunSink(Options options, Console& console, const SignalGuard& signals)
    : options_(std::move(options)), console_(console), signals_(signals) {
  ticker_ = std::thread([this] { Tick(); });
  clockid_t clock{};
  if (::pthread_getcpuclockid(ticker_.native_handle(), &clock) == 0) ticker_clock_ = clock;
}

RunSink::~RunSink() { Finish(); }

void RunSink::Pass(std::string_view name) {
  const std::lock_guard lock(mutex_);
  EndPassLocked();
  pass_ = name;
  pass_start_seconds_ = Now();
  bytes_done_ = 0;
  bytes_total_ = 0;
  files_done_ = 0;
  files_total_ = 0;
  meter_.Start(pass_, pass_start_seconds_);
  console_.Log("pass", pass_);
}

void RunSink::Progress(std::uint64_t bytes_done, std::uint64_t bytes_total) {
  bytes_total_.store(bytes_total, std::memory_order_relaxed);
  bytes_done_.store(bytes_done, std::memory_order_relaxed);
}

void RunSink::Files(std::uint64_t done, std::uint64_t total) {
  if (files_total_.exchange(total, std::memory_order_relaxed) != total) files_done_ = 0;
  // Threads report out of order.
  std::uint64_t before = files_done_.load(std::memory_order_relaxed);
  while (done > before &&
         !files_done_.compare_exchange_weak(before, done, std::memory_order_relaxed)) {
  }
}

void RunSink::AddRead(std::uint64_t bytes, std::uint64_t files) {
  bytes_read_.fetch_add(bytes, std::memory_order_relaxed);
  files_read_.fetch_add(files, std::memory_order_relaxed);
}

void RunSink::AddWritten(std::uint64_t bytes, std::uint64_t files) {
  bytes_written_.fetch_add(bytes, std::memory_order_relaxed);
  files_written_.fetch_add(files, std::memory_order_relaxed);
}

void RunSink::Warn(std::string message) {
  {
    const std::lock_guard lock(mutex_);
    if (warned_.size() >= kWarningsKept) {
      if (!warned_.contains(message)) ++facts_.warnings_omitted;
      return;
    }
    if (!warned_.insert(message).second) return;
    facts_.warnings.push_back(message);
  }
  // With several ranks, warnings are merged at the end of the run. A single rank prints them now.
  if (options_.ranks == 1) {
    console_.Warning(message);
  } else {
    console_.Log("warning", message);
  }
}

void RunSink::Note(std::string message, int level) {
  if (options_.rank == 0) {
    console_.Note(message, level);
  } else if (level >= 2) {
    console_.Note(OfRank(options_.rank, message), level);
  } else {
    console_.Log("note", message);
  }
}

void RunSink::Waits(std::string message) {
  const bool several = options_.ranks > 1;
  console_.Note(several ? OfRank(options_.rank, message) : message, 0);
}

RankStats RunSink::StatsLocked() const {
  RankStats facts = facts_;
  facts.bytes_read = bytes_read_;
  facts.bytes_written = bytes_written_;
  facts.files_read = files_read_;
  facts.files_written = files_written_;
  facts.peak_memory_bytes = PeakMemoryBytes();
  return facts;
}

RankStats RunSink::StatsNow() {
  const std::lock_guard lock(mutex_);
  EndPassLocked();
  console_.ClearPaint();
  return StatsLocked();
}

std::int64_t RunSink::ProcessorTime() const {
  return ClockNanoseconds(CLOCK_PROCESS_CPUTIME_ID) -
         (ticker_clock_ ? ClockNanoseconds(*ticker_clock_) : 0);
}

RankStats RunSink::Finish() {
  finished_ = true;
  signals_.Wake();
  if (ticker_.joinable()) ticker_.join();
  return StatsNow();
}

void RunSink::BeginInterruptible() {
  const std::lock_guard lock(interruptible_mutex_);
  ++interruptible_;
}

void RunSink::EndInterruptible() {
  const std::lock_guard lock(interruptible_mutex_);
  --interruptible_;
}

void RunSink::LeaveIfStuck() {
  if (!stop_requested() || !options_.leave) return;
  if (stop_seconds_ == 0) stop_seconds_ = Now();
  if (Now() - stop_seconds_ < kGraceSeconds) return;
  const std::lock_guard lock(interruptible_mutex_);
  if (interruptible_ > 0 && !finished_) options_.leave();
}

void RunSink::Tick() {
  const bool shows = options_.rank == 0 && options_.progress != ProgressMode::kOff;
  const int period_ms = shows ? PeriodMs(options_.progress) : -1;
  // Without a wake-up descriptor the thread has to poll.
  const bool wakes = signals_.wake_fd() >= 0;
  const double period_seconds = period_ms / 1000.0;
  double due_seconds = Now() + period_seconds;
  while (!finished_) {
    int wait_ms = -1;
    if (period_ms >= 0) wait_ms = std::max(0, static_cast<int>((due_seconds - Now()) * 1000) + 1);
    if (!wakes) wait_ms = wait_ms < 0 ? 200 : std::min(wait_ms, 200);
    if (stop_requested()) wait_ms = wait_ms < 0 ? kLookMs : std::min(wait_ms, kLookMs);
    pollfd entry{signals_.wake_fd(), POLLIN, 0};
    const int ready = poll(&entry, wakes ? 1 : 0, wait_ms);
    if (ready > 0) signals_.Drain();
    if (finished_) return;
    AnswerSignals();
    LeaveIfStuck();
    if (period_ms >= 0 && Now() >= due_seconds) {
      ShowProgress(false);
      due_seconds = Now() + period_seconds;
    }
  }
}

void RunSink::AnswerSignals() {
  if (stop_requested() && !std::exchange(stop_told_, true) && options_.rank == 0) {
    console_.Note("stopping: finishing the current unit; interrupt again to exit immediately", 0);
  }
  if (SignalGuard::TakeProgressRequest()) ShowProgress(true);
}

void RunSink::ShowProgress(bool asked_for) {
  const std::lock_guard lock(mutex_);
  if (pass_.empty()) {
    if (asked_for) console_.Say("no pass has started yet");
    return;
  }
  const double now = Now();
  UpdateMeterLocked(now);
  if (options_.progress == ProgressMode::kJson) {
    console_.Raw(meter_.Json(now));
    return;
  }
  std::string text = meter_.Text();
  if (options_.ranks > 1) {
    text +=
        " (rank " + std::to_string(options_.rank) + " of " + std::to_string(options_.ranks) + ")";
  }
  if (asked_for || options_.progress != ProgressMode::kTty) {
    console_.Say(text);
    return;
  }
  const std::size_t columns = TerminalColumns(STDERR_FILENO);
  console_.Paint(columns > 40 ? text::Truncate(text, columns - 21) : text);
}

void RunSink::UpdateMeterLocked(double now) {
  meter_.Update(bytes_done_, bytes_total_, now);
  meter_.UpdateFiles(files_done_, files_total_, now);
}

void RunSink::EndPassLocked() {
  if (pass_.empty()) return;
  const double now = Now();
  const double seconds = now - pass_start_seconds_;
  auto same = std::find_if(facts_.passes.begin(), facts_.passes.end(),
                           [&](const PassTime& pass) { return pass.name == pass_; });
  if (same == facts_.passes.end()) {
    facts_.passes.push_back({pass_, seconds});
  } else {
    same->seconds += seconds;
  }
  std::string text = pass_ + ": " + text::FormatSeconds(seconds);
  if (const std::uint64_t bytes = bytes_done_; bytes != 0) text += ", " + FormatBytes(bytes);
  if (options_.rank == 0) console_.Note(text, 1);
  if (options_.rank == 0 && options_.progress == ProgressMode::kJson) {
    UpdateMeterLocked(now);
    console_.Raw(meter_.Json(now));
  }
  pass_.clear();
}

double RunSink::Now() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

}  // namespace shardwright::cli
