// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/sink.h"

namespace shardwright::trainer_torch {

/// Notes the first SIGINT while an operator runs, and hands it on when it ends, to who had it
/// before: Python, which then raises KeyboardInterrupt. A second one is handed on at once. Of
/// several operators at once the first one notes it.
class Interrupts {
 public:
  Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;
  ~Interrupts();

  /// True once there was one. Any thread.
  static bool Seen();

 private:
  bool owns_ = false;
};

/// Keeps warnings, shows nothing, and asks to stop after SIGINT.
class OperatorSink final : public NullSink {
 public:
  OperatorSink();
  ~OperatorSink() override;

  void Warn(std::string message) override;
  bool stop_requested() const override { return Interrupts::Seen(); }

  std::vector<std::string> TakeWarnings();

 private:
  struct Kept;
  std::unique_ptr<Kept> kept_;
};

}  // namespace shardwright::trainer_torch
