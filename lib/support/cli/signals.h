// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <array>

namespace shardwright::cli {

/// Takes the process's signals for one run and gives them back when it ends.
///
/// 1. The first SIGINT, SIGTERM or SIGUSR1 sets the stop flag.
/// 2. A SIGINT or SIGTERM after that ends the process at once by that signal.
/// 3. SIGUSR2 asks for a line of progress.
/// 4. SIGPIPE is ignored, so that a closed pipe is an error of write().
///
/// One at a time per process, since signals belong to the process.
class SignalGuard {
 public:
  SignalGuard();
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;
  ~SignalGuard();

  /// The signal that asked to stop, 0 while none did. Any thread.
  static int StopSignal();

  /// True once for every batch of SIGUSR2. Any thread.
  static bool TakeProgressRequest();

  /// Descriptor that becomes readable when a signal has come; -1 if the kernel had none to give.
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
