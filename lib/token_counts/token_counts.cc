// SPDX-License-Identifier: Apache-2.0
#include "token_counts/token_counts.h"

#include <string>

#include "support/base/limits.h"

namespace shardwright::token_counts {

Status Validate(const TokenCounts& loads) {
  if (loads.layers == 0 || loads.experts == 0) {
    return Fail(Errc::kBadInput, "token counts: expected at least 1 layer of 1 expert, found ",
                loads.layers, " layers of ", loads.experts, " experts");
  }
  if (loads.layers > limits::kMoeLayers || loads.experts > limits::kMoeExperts) {
    return Fail(Errc::kLimit, "token counts: ", loads.layers, " layers of ", loads.experts,
                " experts, at most ", limits::kMoeLayers, " of ", limits::kMoeExperts);
  }
  if (loads.tokens.size() != std::size_t{loads.layers} * loads.experts ||
      loads.layer_id.size() != loads.layers) {
    return Fail(Errc::kBadInput, "token counts: ", loads.tokens.size(), " counts for ",
                loads.layers, " layers of ", loads.experts, " experts");
  }
  for (const auto& window : loads.windows) {
    if (window.size() != loads.tokens.size()) {
      return Fail(Errc::kBadInput, "token counts: one window has ", window.size(),
                  " counts, another has ", loads.tokens.size());
    }
  }
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    std::uint64_t sum = 0;
    for (const std::uint64_t tokens : loads.layer(l)) {
      if (tokens > limits::kMoeTokens || (sum += tokens) > limits::kMoeTokens) {
        return Fail(Errc::kLimit, "token counts: layer ", loads.layer_id[l], ": more than ",
                    limits::kMoeTokens, " tokens");
      }
    }
  }
  return {};
}

}  // namespace shardwright::token_counts
