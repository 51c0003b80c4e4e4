// SPDX-License-Identifier: Apache-2.0
#include "support/cli/signals.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace shardwright::cli {
namespace {

// State that the handler sets. A handler has no context argument, so it is global and lock-free.
std::atomic<int> stop_signal{0};
std::atomic<bool> progress_wanted{false};
std::atomic<int> handler_wake_fd{-1};
// Two buffers: the handler may read one while a thread fills the other.
constexpr std::size_t kWordsBytes = 512;
std::array<std::array<char, kWordsBytes>, 2> last_words{};
std::atomic<std::size_t> words_in_use{0};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free &&
              std::atomic<std::size_t>::is_always_lock_free);

void Poke(int fd) {
  if (fd < 0) return;
  const std::uint64_t one = 1;
  // Ignores a failure: if the counter is full, the descriptor is already readable.
  [[maybe_unused]] const ssize_t written = write(fd, &one, sizeof one);
}

void EndBySignal(int signal_number) {
  const std::array<char, kWordsBytes>& words = last_words[words_in_use.load()];
  std::size_t length = 0;
  while (length < words.size() && words[length] != '\0') ++length;
  if (length > 0) {
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, words.data(), length);
  }
  signal(signal_number, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal_number);
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
  raise(signal_number);
  // The first process of a container has no default action for signals, so it exits with the code.
  _exit(128 + signal_number);
}

void OnSignal(int signal_number) {
  const int saved_errno = errno;
  if (signal_number == SIGUSR2) {
    progress_wanted.store(true);
  } else {
    int none = 0;
    const bool first = stop_signal.compare_exchange_strong(none, signal_number);
    if (!first && signal_number != SIGUSR1) EndBySignal(signal_number);
  }
  Poke(handler_wake_fd.load());
  errno = saved_errno;
}

}  // namespace

SignalGuard::SignalGuard() : wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  stop_signal.store(0);
  progress_wanted.store(false);
  handler_wake_fd.store(wake_fd_);
  struct sigaction action {};
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    if (kSignals[i] == SIGPIPE) {
      action.sa_handler = SIG_IGN;
    } else {
      action.sa_handler = OnSignal;
    }
    sigaction(kSignals[i], &action, &before_[i]);
    // nohup and background shells ignore SIGINT on purpose, so it stays ignored.
    if (kSignals[i] == SIGINT && before_[i].sa_handler == SIG_IGN) {
      sigaction(SIGINT, &before_[i], nullptr);
    }
  }
}

SignalGuard::~SignalGuard() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  handler_wake_fd.store(-1);
  if (wake_fd_ >= 0) close(wake_fd_);
}

int SignalGuard::StopSignal() { return stop_signal.load(std::memory_order_relaxed); }

void SignalGuard::SetLastWords(std::string_view line) {
  const std::size_t next = 1 - words_in_use.load();
  std::array<char, kWordsBytes>& words = last_words[next];
  words.fill('\0');
  line = line.substr(0, kWordsBytes - 2);
  std::copy(line.begin(), line.end(), words.begin());
  if (!line.empty()) words[line.size()] = '\n';
  words_in_use.store(next);
}

bool SignalGuard::TakeProgressRequest() { return progress_wanted.exchange(false); }

void SignalGuard::Drain() const {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(wake_fd_, &count, sizeof count);
}

void SignalGuard::Wake() const { Poke(wake_fd_); }

}  // namespace shardwright::cli
