// SPDX-License-Identifier: Apache-2.0
#include "trainer/torch/interrupt.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

namespace shardwright::trainer_torch {
namespace {

// A signal handler can only access global variables.
std::atomic<bool> taken = false;
std::atomic<bool> seen = false;
std::atomic<bool> handed_on = false;
struct sigaction before;

void OnInterrupt(int number, siginfo_t* info, void* context) {
  // Delay the first SIGINT until the operator ends, because Python would interrupt a collective
  // of the trainer in the middle. A second one means that the user does not want to wait.
  if (!seen.exchange(true)) return;
  handed_on.store(true);
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  }
}

}  // namespace

Interrupts::Interrupts() {
  if (taken.exchange(true)) return;
  owns_ = true;
  seen.store(false);
  handed_on.store(false);
  struct sigaction ours = {};
  ours.sa_sigaction = OnInterrupt;
  ours.sa_flags = SA_SIGINFO;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGINT, nullptr, &before);
  sigaction(SIGINT, &ours, nullptr);
}

Interrupts::~Interrupts() {
  if (!owns_) return;
  sigaction(SIGINT, &before, nullptr);
  taken.store(false);
  if (seen.load() && !handed_on.load()) raise(SIGINT);
}

bool Interrupts::Seen() { return seen.load(std::memory_order_relaxed); }

struct OperatorSink::Kept {
  std::mutex mutex;
  std::vector<std::string> warnings;
};

OperatorSink::OperatorSink() : kept_(std::make_unique<Kept>()) {}
OperatorSink::~OperatorSink() = default;

void OperatorSink::Warn(std::string message) {
  const std::lock_guard lock(kept_->mutex);
  std::vector<std::string>& all = kept_->warnings;
  if (std::find(all.begin(), all.end(), message) == all.end()) all.push_back(std::move(message));
}

std::vector<std::string> OperatorSink::TakeWarnings() {
  const std::lock_guard lock(kept_->mutex);
  return std::exchange(kept_->warnings, {});
}

}  // namespace shardwright::trainer_torch
