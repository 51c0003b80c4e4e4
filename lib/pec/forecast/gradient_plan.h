#pragma once

#include <cstdint>

#include "base/result.h"
#include "pec/select/sizes.h"
#include "pec/select/types.h"

namespace shardwright::pec {

/// What a remote copy has received of every expert. Plain data.
struct GradientChains {
  Counts last;   ///< [layer][expert]: iteration of the last message that it applied; 0: none
  Counts steps;  ///< [layer][expert]: gradients applied since its last full copy

  static GradientChains Make(const LayerExperts& experts) {
    return {MakeCounts(experts), MakeCounts(experts)};
  }
};

struct GradientOptions {
  std::uint64_t interval = 1;      ///< iterations between transfers; gradients need 1
  std::uint64_t full_every = 500;  ///< gradients in a row, after which a full copy bounds rounding
};

/// What is sent for an iteration.
struct TransferPlan {
  std::uint64_t iteration = 0;
  Selection gradients;  ///< the receiver repeats the optimizer step
  Selection full;       ///< weights and optimizer state
  std::uint64_t gradient_bytes = 0;
  std::uint64_t full_bytes = 0;
};

/// Decides for every selected expert whether its gradient is enough: it is when every iteration is
/// sent, the receiver's last message of it is that of the iteration before (it was selected then),
/// and fewer than `full_every` gradients followed its last full copy.
/// \param bytes  [layer][expert]: a gradient has the size of the weights
/// \error kUsage  iteration or interval 0; kMismatch, kBadInput  a selection or tables that do not
///        fit each other, bytes that overflow
/// Pure. Source: MoEtion Algorithm 3; docs/pec-planning.md section 9.4.
Result<TransferPlan> PlanTransfers(const GradientChains& chains,
                                   const PerExpert<ComponentBytes>& bytes,
                                   const Selection& selected, std::uint64_t iteration,
                                   const GradientOptions& options);

/// Enters a plan that the receiver has applied.
/// \error kMismatch, kBadInput  a plan of another model, or one that is not newer than the chains
/// Pure.
Status EnterTransfers(GradientChains* chains, const TransferPlan& plan);

}  // namespace shardwright::pec
