// SPDX-License-Identifier: Apache-2.0
#include "token_counts/token_counts.h"

#include <string>

#include "support/base/limits.h"

namespace shardwright::token_counts {

Status Validate(const TokenCounts& loads) {
  if (loads.layers == 0 || loads.experts == 0) {
    return Fail(Errc::kBadInput, "loads: " + std::to_string(loads.layers) + " layers of " +
                                     std::to_string(loads.experts) + " experts");
  }
  if (loads.layers > limits::kMoeLayers || loads.experts > limits::kMoeExperts) {
    return Fail(Errc::kLimit, "loads: " + std::to_string(loads.layers) + " layers of " +
                                  std::to_string(loads.experts) + " experts, at most " +
                                  std::to_string(limits::kMoeLayers) + " of " +
                                  std::to_string(limits::kMoeExperts));
  }
  if (loads.tokens.size() != std::size_t{loads.layers} * loads.experts ||
      loads.layer_id.size() != loads.layers) {
    return Fail(Errc::kBadInput, "loads: " + std::to_string(loads.tokens.size()) + " counts for " +
                                     std::to_string(loads.layers) + " layers of " +
                                     std::to_string(loads.experts) + " experts");
  }
  for (const auto& window : loads.windows) {
    if (window.size() != loads.tokens.size()) {
      return Fail(Errc::kBadInput, "loads: a window of " + std::to_string(window.size()) +
                                       " counts, another of " +
                                       std::to_string(loads.tokens.size()));
    }
  }
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    std::uint64_t sum = 0;
    for (const std::uint64_t tokens : loads.layer(l)) {
      if (tokens > limits::kMoeTokens || (sum += tokens) > limits::kMoeTokens) {
        return Fail(Errc::kLimit, "loads: layer " + std::to_string(loads.layer_id[l]) +
                                      ": more than " + std::to_string(limits::kMoeTokens) +
                                      " tokens");
      }
    }
  }
  return {};
}

}  // namespace shardwright::token_counts
