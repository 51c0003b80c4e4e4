// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "partial/select/sizes.h"
#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Rule that chooses between sending gradients and state of an expert.
enum class GradientRule : std::uint8_t {
  kAlgorithm3,  ///< MoEtion's: gradients, if every iteration is sent
  kLeast,       ///< the smaller of both until the next transfer
  kFewest,      ///< gradients wherever possible: the fewest states
};

/// Returns "algorithm-3", "least" or "fewest".
std::string_view Name(GradientRule rule);

/// Returns the log bytes of one iteration for all ranks together: a float32 gradient
/// per element of every expert. That equals the size of its float32 copy: the master,
/// or without one the weights. Excludes the text of records (about 600 bytes each).
/// \pre that copy is in float32
/// \error kBadInput  overflow
/// Pure. Source: docs/pec-planning.md section 9.4.
Result<std::uint64_t> LogBytes(const PerExpert<ComponentBytes>& experts);
/// Returns the log bytes of one expert.
std::uint64_t LogBytes(const ComponentBytes& expert);

/// State of a remote copy for every expert. Plain data.
struct GradientChains {
  Counts last;   ///< [layer][expert]: iteration of the last applied message; 0: none
  Counts steps;  ///< [layer][expert]: gradients applied since its last full copy

  static GradientChains Make(const LayerExperts& experts) {
    return {MakeCounts(experts), MakeCounts(experts)};
  }
};

struct GradientOptions {
  GradientRule rule = GradientRule::kAlgorithm3;
  std::uint64_t interval = 1;      ///< iterations between transfers; 1 for algorithm 3
  std::uint64_t full_every = 500;  ///< length of a chain after which a full copy bounds rounding
  /// Bytes per iteration for experts; 0: no budget, as algorithm 3 requires. The rest
  /// of the budget is spent on full copies, longest chain first, to keep chains short.
  std::uint64_t budget_bytes = 0;
  bool as_logged = false;  ///< gradients take LogBytes; otherwise they have the type of the weights
};

/// Messages for the iterations since the previous transfer.
struct TransferPlan {
  std::uint64_t iteration = 0;
  std::uint64_t interval = 1;  ///< GradientOptions::interval
  Selection gradients;         ///< of each iteration; the receiver repeats the optimizer's steps
  Selection full;              ///< weights and optimizer state
  std::uint64_t gradient_bytes = 0;
  std::uint64_t full_bytes = 0;
  std::uint64_t over_bytes = 0;  ///< bytes above the budget of the interval; nothing is dropped
};

/// Decides for every selected expert if its gradients suffice. They can if it
/// was in the previous transfer, and if at most `full_every` gradients would
/// follow its last full copy. In that case algorithm 3 sends gradients only if the interval is 1,
/// kLeast if the gradients of all iterations of the interval together have fewer bytes than the
/// state, and kFewest always. In all cases the receiver can reproduce every
/// selected expert at the iteration.
/// \param bytes  [layer][expert]
/// \error kUsage  iteration or interval is 0, or a budget with algorithm 3; kMismatch,
///        kBadInput  inconsistent selection or tables, or overflow of byte counts
/// Pure. Source: MoEtion Algorithm 3; docs/pec-planning.md section 9.4.
Result<TransferPlan> PlanTransfers(const GradientChains& chains,
                                   const PerExpert<ComponentBytes>& bytes,
                                   const Selection& selected, std::uint64_t iteration,
                                   const GradientOptions& options);

/// Records a plan that the receiver has applied.
/// \error kMismatch, kBadInput  a plan of another model, or one not newer than the chains
/// Pure.
Status EnterTransfers(GradientChains* chains, const TransferPlan& plan);

/// Returns the largest number of gradients since an expert's last full copy.
/// Pure.
std::uint64_t LongestChain(const GradientChains& chains);

}  // namespace shardwright::partial
