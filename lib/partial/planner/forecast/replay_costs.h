// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "partial/select/gradient_plan.h"
#include "support/base/result.h"

namespace shardwright::partial {

// What a run of policy gradient-log costs, and a restore that makes the steps of its log again:
// docs/lossless.md.

/// Speeds of one rank. A rate of 0 makes the forecast omit the costs that depend on it.
struct ReplayRates {
  double copy_bytes_per_s = 0;     ///< of gradients, into memory that the agent sees
  double storage_bytes_per_s = 0;  ///< into storage, and out of it
  double elems_per_s = 0;          ///< steps of one element that are made again
};

/// Seconds that training waits in an iteration for its log: one copy of the rank's equal share, and
/// what the write of its share of `logged_bytes` takes longer than the iteration (0: not known).
/// \param iteration_bytes  gradients of all experts, all ranks together
/// \param logged_bytes     of those what is written
/// Pure.
double LogStall(double iteration_bytes, double logged_bytes, std::uint32_t ranks,
                const ReplayRates& rates, double iteration_s);

/// What a restore reads and computes beside the state.
struct ReplayWork {
  double log_bytes = 0;    ///< of the log that is there: every rank proves all of it
  double chain_bytes = 0;  ///< of the gradients that are used; ranks share them
};

/// Seconds of a restore by `ranks` for gradients in float32.
/// Pure.
double ReplaySeconds(const ReplayWork& work, std::uint32_t ranks, const ReplayRates& rates);

/// The work in a steady state, K experts of N in turn every `interval` iterations, of a fault at
/// any moment of an interval: a log of `interval` (p - 1/2) iterations, p = ceil(N/K), each without
/// the K experts of the next checkpoint, and chains as long as SteadyLoss says.
/// \param iteration_bytes  LogBytes
/// \error kUsage  n or k is 0
/// Pure.
Result<ReplayWork> SteadyReplay(std::uint32_t n, std::uint32_t k, double interval,
                                double iteration_bytes);

}  // namespace shardwright::partial
