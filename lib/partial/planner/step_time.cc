// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/step_time.h"

namespace shardwright::partial {
namespace {

constexpr double kPasses = 3;      // forward, and backward with twice the operations
constexpr double kReductions = 4;  // of a layer: after attention and after its MLP, in both passes
constexpr double kExchanges = 4;   // of a layer: to the experts and back, in both passes
constexpr double kMostSeconds = 1e6;

double Real(std::uint64_t number) { return static_cast<double>(number); }

}  // namespace

Result<StepTime> ForwardBackwardTime(const StepInput& input) {
  const bool has_layers = input.attention_layers == 0 || input.hidden_size > 0;
  if (!(input.token_params > 0) || !(input.gpu_flops > 0) || input.sequence_length == 0 ||
      input.sequences == 0 || input.tp == 0 || !has_layers) {
    return Fail(Errc::kUsage,
                "the time of a forward and backward pass needs parameters, a rate, tokens, and a "
                "hidden size for attention layers");
  }
  const double tp = Real(input.tp);
  const double tokens = Real(input.sequence_length) * Real(input.sequences);
  const double attention =
      4 * Real(input.sequence_length) * Real(input.hidden_size) * Real(input.attention_layers);
  StepTime time;
  time.flops = kPasses * tokens * (2 * input.token_params + attention) / tp;
  time.compute_s = time.flops / input.gpu_flops;
  const double token_bytes = tokens * Real(input.token_bytes);
  if (input.gpu_bytes_per_s > 0) {
    const double ring = 2 * (tp - 1) / tp;
    time.reduce_s =
        kReductions * Real(input.attention_layers) * ring * token_bytes / input.gpu_bytes_per_s;
  }
  if (input.network_bytes_per_s > 0) {
    const double sent = Real(input.top_k) * input.sent_share * token_bytes / tp;
    time.exchange_s = kExchanges * Real(input.moe_layers) * sent / input.network_bytes_per_s;
  }
  if (time.seconds() <= kMostSeconds) return time;
  return Fail(Errc::kUsage,
              "a forward and backward pass takes more than 10^6 s; check --gpu-flops");
}

}  // namespace shardwright::partial
