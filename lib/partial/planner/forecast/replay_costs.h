// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "partial/select/gradient_plan.h"
#include "support/base/result.h"

namespace shardwright::partial {

// Cost of a run with policy gradient-log, and of a restore
// that repeats the steps of its log: docs/lossless.md.

/// Speeds of one rank. A rate of 0 makes the forecast omit the costs that depend on it.
struct ReplayRates {
  double copy_bytes_per_s = 0;     ///< gradients into memory that the agent maps
  double storage_bytes_per_s = 0;  ///< to storage, and from it
  double elems_per_s = 0;          ///< elements of repeated steps
};

/// Returns the seconds per iteration that training waits for its log: one copy of the rank's
/// share, and the time by which writing `logged_bytes` exceeds the iteration (0: unknown).
/// \param iteration_bytes  gradients of all experts and all ranks
/// \param logged_bytes     part of them that is written
/// Pure.
double LogStall(double iteration_bytes, double logged_bytes, std::uint32_t ranks,
                const ReplayRates& rates, double iteration_s);

/// Work of a restore in addition to reading the state.
struct ReplayWork {
  double log_bytes = 0;    ///< existing log, which every rank verifies completely
  double chain_bytes = 0;  ///< gradients that are used, divided over ranks
};

/// Returns the seconds of a restore by `ranks` ranks, for float32 gradients.
/// Pure.
double ReplaySeconds(const ReplayWork& work, std::uint32_t ranks, const ReplayRates& rates);

/// Returns the work in a steady state, saving K of N experts in turn every `interval` iterations,
/// for a fault at a random moment. The log has `interval` (p - 1/2) iterations, p = ceil(N/K),
/// each without the K experts of the next checkpoint. Chains are as long as in SteadyLoss.
/// \param iteration_bytes  LogBytes
/// \error kUsage  n or k is 0
/// Pure.
Result<ReplayWork> SteadyReplay(std::uint32_t n, std::uint32_t k, double interval,
                                double iteration_bytes);

}  // namespace shardwright::partial
