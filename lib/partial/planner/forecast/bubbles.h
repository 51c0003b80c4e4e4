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
  double forward_s = 0;             ///< tf, of a micro-batch through a stage
  double backward_s = 0;            ///< tb
};

/// How long an iteration takes, and when a stage idles in it.
struct BubbleTimes {
  double iteration_s = 0;  ///< (b + (p-1)/v) * (tf + tb)
  double bubble_s = 0;     ///< of every stage: (p-1) * (tf + tb) / v
  double before_s = 0;     ///< of it, before the stage's first forward: stage * tf / v
  double after_s = 0;      ///< of it, after its last backward: stage * tb / v
  double between_s = 0;    ///< the rest
};

/// \error kUsage  a count of 0, a stage that does not exist, a time that is negative or not finite
/// Pure. Source: docs/pec-planning.md section 9.5.
Result<BubbleTimes> BubblesOf(const PipelineTimes& pipeline, std::uint32_t stage);

/// A time in which a stage idles, from the beginning of an iteration.
struct IdleTime {
  double begin_s = 0;
  double end_s = 0;
};

/// When a stage idles in an iteration, by time; together bubble_s. In between these are a wait for
/// the first backward, and a forward's time before each backward that no forward is left for.
/// \error as BubblesOf; kUnsupported  chunks, whose order is not laid down here
/// Pure.
Result<std::vector<IdleTime>> IdleTimesOf(const PipelineTimes& pipeline, std::uint32_t stage);

/// What a module saves in bubbles and what beside computation, in elements.
struct BubbleShare {
  std::uint64_t in_bubble = 0;
  std::uint64_t beside = 0;
};

struct BubblePlan {
  double snapshot_s = 0;            ///< t_ss
  std::vector<BubbleShare> module;  ///< as given
  std::uint64_t in_bubble = 0;      ///< elements: all, or floor(n * t_bubble / t_ss)
  std::uint64_t beside = 0;
};

/// Puts as many elements into the bubble as it has time for. Whole modules fall on one side,
/// largest first; one at most is cut (the largest that did not fit).
/// \param module_elems  elements of each module, of elem_bytes bytes
/// \error kUsage  a bandwidth that is not positive, a bubble time that is negative or not finite;
///        kBadInput  overflow
/// Pure. Source: MoEtion Algorithm 4; docs/pec-planning.md section 9.5.
Result<BubblePlan> FillBubble(const std::vector<std::uint64_t>& module_elems,
                              std::uint64_t elem_bytes, double bytes_per_s, double bubble_s);

}  // namespace shardwright::partial
