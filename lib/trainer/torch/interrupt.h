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

/// Records the first SIGINT while an operator runs, and passes it to the previous handler
/// when the operator ends. That is Python's, which raises KeyboardInterrupt. Passes a second
/// SIGINT at once. If several operators run at once, the first one records the signal.
class Interrupts {
 public:
  Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;
  ~Interrupts();

  /// Returns true after a SIGINT. May be called from any thread.
  static bool Seen();

 private:
  bool owns_ = false;
};

/// Collects warnings, shows nothing, and requests a stop after SIGINT.
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
