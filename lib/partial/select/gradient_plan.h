// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "partial/select/sizes.h"
#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// What decides between the gradients of an expert and its state.
enum class GradientRule : std::uint8_t {
  kAlgorithm3,  ///< MoEtion's: gradients where every iteration is sent
  kLeast,       ///< what takes fewer bytes until the next transfer
  kFewest,      ///< gradients wherever they can be: the fewest states
};

/// "algorithm-3", "least", "fewest".
std::string_view Name(GradientRule rule);

/// Bytes that the log of an iteration has, all ranks together: a float32 gradient of every element
/// of every expert, so the bytes of its float32 copy, which is the master, else the weights. The
/// text of records (about 600 bytes each) is left out.
/// \pre that copy is in float32
/// \error kBadInput  overflow
/// Pure. Source: docs/pec-planning.md section 9.4.
Result<std::uint64_t> LogBytes(const PerExpert<ComponentBytes>& experts);
/// The same of one expert.
std::uint64_t LogBytes(const ComponentBytes& expert);

/// What a remote copy has received of every expert. Plain data.
struct GradientChains {
  Counts last;   ///< [layer][expert]: iteration of the last message that it applied; 0: none
  Counts steps;  ///< [layer][expert]: gradients applied since its last full copy

  static GradientChains Make(const LayerExperts& experts) {
    return {MakeCounts(experts), MakeCounts(experts)};
  }
};

struct GradientOptions {
  GradientRule rule = GradientRule::kAlgorithm3;
  std::uint64_t interval = 1;      ///< iterations between transfers; algorithm 3 needs 1
  std::uint64_t full_every = 500;  ///< gradients in a row, after which a full copy bounds rounding
  /// Of an iteration, for experts; 0: none. Algorithm 3 has none. What a rule leaves of it goes to
  /// full copies, longest chain first, so that chains stay short.
  std::uint64_t budget_bytes = 0;
  bool as_logged = false;  ///< gradients take LogBytes; else they have the type of the weights
};

/// What is sent for the iterations since the transfer before.
struct TransferPlan {
  std::uint64_t iteration = 0;
  std::uint64_t interval = 1;  ///< GradientOptions::interval
  Selection gradients;         ///< of every iteration; the receiver repeats the optimizer's steps
  Selection full;              ///< weights and optimizer state
  std::uint64_t gradient_bytes = 0;
  std::uint64_t full_bytes = 0;
  std::uint64_t over_bytes = 0;  ///< above the budget of the interval: nothing is left out for it
};

/// Decides for every selected expert whether its gradients are enough. They can be when the
/// receiver's last message of it is that of the transfer before (it was selected then), and no more
/// than `full_every` gradients would follow its last full copy. Algorithm 3 takes them then with an
/// interval of 1, never with a longer one; kLeast where the interval's gradients are smaller than
/// the state; kFewest always. Whatever is chosen, full copy and gradients make every selected
/// expert that of the iteration.
/// \param bytes  [layer][expert]
/// \error kUsage  iteration or interval 0, a budget with algorithm 3; kMismatch, kBadInput  a
///        selection or tables that do not fit each other, bytes that overflow
/// Pure. Source: MoEtion Algorithm 3; docs/pec-planning.md section 9.4.
Result<TransferPlan> PlanTransfers(const GradientChains& chains,
                                   const PerExpert<ComponentBytes>& bytes,
                                   const Selection& selected, std::uint64_t iteration,
                                   const GradientOptions& options);

/// Enters a plan that the receiver has applied.
/// \error kMismatch, kBadInput  a plan of another model, or one that is not newer than the chains
/// Pure.
Status EnterTransfers(GradientChains* chains, const TransferPlan& plan);

/// The most gradients that an expert's last full copy is behind.
/// Pure.
std::uint64_t LongestChain(const GradientChains& chains);

}  // namespace shardwright::partial
