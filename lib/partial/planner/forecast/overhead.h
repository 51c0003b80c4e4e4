// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "support/base/result.h"

namespace shardwright::partial {

/// Costs of a way to take checkpoints.
struct CheckpointCosts {
  double save_s = 0;       ///< O_save: stall per checkpoint
  double interval = 1;     ///< I, iterations between checkpoints
  double iteration_s = 0;  ///< T_iter
  double fault_rate = 0;   ///< lambda, faults per iteration
  double restart_s = 0;    ///< O_restart
};

/// Returns O_save = max(0, T_snapshot - T_fb) in seconds: the part of a snapshot that is
/// not hidden behind the next forward and backward pass, so that training waits for it.
/// Pure. Source: MoC-System eq 10.
double SaveStall(double snapshot_s, double forward_backward_s);

/// Returns the expected overhead of a run in seconds, O_save * I_total / I
/// + F * (O_restart + I * T_iter / 2), with F = lambda * I_total faults.
/// \error kUsage  an interval or a length that is not positive, a negative time or rate
/// Pure. Source: MoC-System eq 4, 11, 12, 13.
Result<double> ExpectedOverhead(const CheckpointCosts& costs, double iterations);

/// Returns seconds of overhead per iteration without restarts: O_save / I + lambda * I
/// * T_iter / 2. The method with the smaller rate is better for any cost of restarts.
/// \error kUsage  as ExpectedOverhead
/// Pure. Source: MoC-System eq 14 to 16.
Result<double> OverheadRate(const CheckpointCosts& costs);

/// Returns the interval with the least overhead rate, in iterations: sqrt(2 *
/// O_save / (lambda * T_iter)) rounded to the better adjacent integer, at least
/// ceil(T_persist / T_iter) and 1. Absent: without faults, longer is always better.
/// \error kUsage  a time or a rate that is negative or not finite, or an iteration time of 0
/// Pure. Source: docs/pec-planning.md section 3.
Result<std::optional<std::uint64_t>> BestInterval(const CheckpointCosts& costs, double persist_s);

/// Returns the effective training time ratio, 1/(1 + O_save/(I*T_iter)) * 1/(1 + E[R]/MTBF), with
/// E[R] = O_restart + I*T_iter/2 and MTBF = T_iter/lambda (no faults: the second factor is 1).
/// \error kUsage  as ExpectedOverhead, or an iteration time of 0
/// Pure. Source: docs/pec-planning.md section 3.
Result<double> EffectiveTimeRatio(const CheckpointCosts& costs);

/// Returns the seconds that a failure wastes: T_ckpt + T_retrieval + interval/2 * T_iter.
/// \error kUsage  a negative or infinite number
/// Pure. Source: MoEtion section 7.2; docs/pec-planning.md section 9.7.
Result<double> WastedWork(double checkpoint_s, double retrieval_s, double interval,
                          double iteration_s);

}  // namespace shardwright::partial
