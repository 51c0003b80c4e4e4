// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <array>
#include <string_view>

namespace shardwright::cli {

/// Installs the signal handlers for one run and restores the previous ones when it ends.
///
/// 1. The first SIGINT, SIGTERM or SIGUSR1 sets the stop flag.
/// 2. A further SIGINT or SIGTERM ends the process immediately by that signal.
/// 3. SIGUSR2 requests a line of progress.
/// 4. SIGPIPE is ignored, so that write() returns an error for a closed pipe.
///
/// At most one per process, since signal handlers belong to the process.
class SignalGuard {
 public:
  SignalGuard();
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;
  ~SignalGuard();

  /// Returns the signal that requested a stop, 0 if none did. Any thread.
  static int StopSignal();

  /// Sets the line that is written to stderr if a second signal ends the process; at most 500
  /// bytes. Empty: nothing is written. Any thread, but one at a time.
  static void SetLastWords(std::string_view line);

  /// Returns true once for every batch of SIGUSR2. Any thread.
  static bool TakeProgressRequest();

  /// Returns a descriptor that becomes readable after a signal; -1 if the kernel provided none.
  int wake_fd() const { return wake_fd_; }

  /// Empties wake_fd().
  void Drain() const;

  /// Makes wake_fd() readable, as a signal would.
  void Wake() const;

 private:
  static constexpr std::array<int, 5> kSignals = {SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGPIPE};
  std::array<struct sigaction, kSignals.size()> before_{};
  int wake_fd_ = -1;
};

}  // namespace shardwright::cli
