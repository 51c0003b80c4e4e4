// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "support/base/result.h"

namespace shardwright::partial {

/// Model and device of one data-parallel rank, which consists of `tp` GPUs.
struct StepInput {
  double token_params = 0;  ///< parameters that a token passes, with the experts of its top k
  double gpu_flops = 0;     ///< operations per second that a GPU reaches
  std::uint64_t sequence_length = 0;   ///< tokens
  std::uint64_t sequences = 1;         ///< of a data-parallel rank in an iteration
  std::uint64_t attention_layers = 0;  ///< 0: leave out attention scores
  std::uint64_t hidden_size = 0;
  std::uint64_t tp = 1;            ///< tensor-parallel ranks
  std::uint64_t moe_layers = 0;    ///< layers that exchange tokens between ranks
  std::uint64_t top_k = 1;         ///< experts of a token in each of them
  std::uint64_t token_bytes = 0;   ///< of a token between layers
  double sent_share = 0;           ///< share of experts on other nodes, with even routing
  double gpu_bytes_per_s = 0;      ///< between GPUs of a node; 0: reductions take no time
  double network_bytes_per_s = 0;  ///< of a rank to other nodes; 0: exchanges take no time
};

/// Seconds of a forward and backward pass, by cause.
struct StepTime {
  double flops = 0;       ///< operations of a GPU
  double compute_s = 0;   ///< flops / gpu_flops
  double reduce_s = 0;    ///< reductions between tensor-parallel ranks
  double exchange_s = 0;  ///< tokens to experts on other nodes, and back

  /// Returns the sum; nothing overlaps.
  double seconds() const { return compute_s + reduce_s + exchange_s; }
};

/// Computes the time of the forward and backward passes of an iteration, without the update and
/// without reductions of gradients. A token takes 2 operations per parameter and 4 S H per
/// attention layer in the forward pass, and twice as many in the backward pass. A layer has 4
/// reductions of all tokens between tensor-parallel ranks, in rings. A layer with experts sends
/// every token to its experts and back, in both passes.
/// \error kUsage  a number that is not positive where it has to be, or a time above 10^6 s
/// Pure. Source: Megatron-LM (arXiv 1909.08053 section 3, 2104.04473 section 3.2 and appendix);
/// docs/pec-planning.md section 8.4.
Result<StepTime> ForwardBackwardTime(const StepInput& input);

}  // namespace shardwright::partial
