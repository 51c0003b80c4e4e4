// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "partial/planner/forecast/auto_config.h"
#include "support/base/result.h"

namespace shardwright::partial {

// Full checkpoints as other systems take them, to compare a choice with.

/// Returns blocking checkpoints: training waits for the snapshot and for the persist, so O_save is
/// the sum of both. The interval is the required or the best one; without faults, a persist's time.
/// \param rank_bytes  bytes of the rank that saves most
/// \error kUsage  as ChooseConfig
/// Pure. Source: MoC-System section 6.2.3 (baseline); docs/pec-planning.md section 8.3.
Result<AutoConfig> BlockingConfig(const AutoInput& input, std::uint64_t rank_bytes);

/// Returns checkpoints of CheckFreq: the snapshot overlaps the next forward and backward pass, the
/// persist overlaps training, and the next checkpoint waits for the end of the persist. From the
/// interval that this needs, CheckFreq increases it by 2 while stalls exceed 5 % of the run.
/// \param rank_bytes  bytes of the rank that saves most
/// \error kUsage  as ChooseConfig, or an interval above 2^53
/// Pure. Source: CheckFreq (src/cf_iterator.py); docs/pec-planning.md section 8.3.
Result<AutoConfig> CheckFreqConfig(const AutoInput& input, std::uint64_t rank_bytes);

/// Returns checkpoints of Gemini: a snapshot overlaps the next forward and backward pass, and is
/// then sent to the memory of another node while training runs. The next checkpoint waits for the
/// end of the copy. The interval is the best one that needs no such wait. persist_s is the time of
/// the copy.
/// \param rank_bytes  bytes of the rank that saves most
/// \param network_bytes_per_s  bandwidth of a rank to other nodes that training leaves
/// \error kUsage  as ChooseConfig, or an interval above 2^53
/// Pure. Source: MoEtion sections 2.3 and 7.2; docs/pec-planning.md section 8.3.
Result<AutoConfig> GeminiConfig(const AutoInput& input, std::uint64_t rank_bytes,
                                double network_bytes_per_s);

/// Returns the share by which a stall is shorter than that of blocking checkpoints.
/// Negative: it is longer. 0 if blocking checkpoints do not stall.
/// Pure. Source: MoC-System section 6.2.3.
double StallReduction(double stall_s, double blocking_stall_s);

}  // namespace shardwright::partial
