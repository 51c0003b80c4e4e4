// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "support/base/result.h"

namespace shardwright::partial {

/// A 1F1B pipeline schedule.
struct PipelineTimes {
  std::uint32_t stages = 1;         ///< p
  std::uint32_t micro_batches = 1;  ///< b
  std::uint32_t chunks = 1;         ///< v, interleaved model chunks per stage
  double forward_s = 0;             ///< tf, per micro-batch and stage
  double backward_s = 0;            ///< tb
};

/// Duration of an iteration, and idle times of a stage in it.
struct BubbleTimes {
  double iteration_s = 0;  ///< (b + (p-1)/v) * (tf + tb)
  double bubble_s = 0;     ///< per stage: (p-1) * (tf + tb) / v
  double before_s = 0;     ///< part before the stage's first forward: stage * tf / v
  double after_s = 0;      ///< part after its last backward: stage * tb / v
  double between_s = 0;    ///< the rest
};

/// \error kUsage  a count of 0, an unknown stage, a negative or infinite time
/// Pure. Source: docs/pec-planning.md section 9.5.
Result<BubbleTimes> BubblesOf(const PipelineTimes& pipeline, std::uint32_t stage);

/// Idle interval of a stage, relative to the beginning of an iteration.
struct IdleTime {
  double begin_s = 0;
  double end_s = 0;
};

/// Returns the idle intervals of a stage in an iteration, ascending; their sum is bubble_s.
/// Includes waits for the first backward and for the missing forward before each late backward.
/// \error as BubblesOf; kUnsupported  chunks: their order is not modelled
/// Pure.
Result<std::vector<IdleTime>> IdleTimesOf(const PipelineTimes& pipeline, std::uint32_t stage);

/// Elements of a module that are saved in bubbles, and during computation.
struct BubbleShare {
  std::uint64_t in_bubble = 0;
  std::uint64_t outside = 0;
};

struct BubblePlan {
  double snapshot_s = 0;            ///< t_ss
  std::vector<BubbleShare> module;  ///< in the order of the input
  std::uint64_t in_bubble = 0;      ///< elements: all, or floor(n * t_bubble / t_ss)
  std::uint64_t outside = 0;
};

/// Fills a bubble with as many elements as it has time for. Assigns whole
/// modules, largest first, and splits at most one (the largest that did not fit).
/// \param module_elems  elements of each module, with elem_bytes bytes each
/// \error kUsage  a bandwidth that is not positive, a bubble time
///        that is negative or not finite; kBadInput  overflow
/// Pure. Source: MoEtion Algorithm 4; docs/pec-planning.md section 9.5.
Result<BubblePlan> FillBubble(const std::vector<std::uint64_t>& module_elems,
                              std::uint64_t elem_bytes, double bytes_per_s, double bubble_s);

}  // namespace shardwright::partial
