// SPDX-License-Identifier: Apache-2.0
#include "token_counts/token_counts.h"

#include <algorithm>
#include <string>

#include "support/base/limits.h"
#include "support/base/text.h"

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
  if (!loads.layer_experts.empty()) {
    if (loads.layer_experts.size() != loads.layers ||
        *std::max_element(loads.layer_experts.begin(), loads.layer_experts.end()) !=
            loads.experts ||
        std::find(loads.layer_experts.begin(), loads.layer_experts.end(), 0U) !=
            loads.layer_experts.end()) {
      return Fail(Errc::kBadInput, "token counts: the numbers of experts of ",
                  loads.layer_experts.size(), " layers do not fit ", loads.layers,
                  " layers of at most ", loads.experts);
    }
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

std::string ExpertsText(const TokenCounts& loads) {
  if (loads.layer_experts.empty()) return Plural(loads.experts, "expert");
  const std::uint32_t fewest =
      *std::min_element(loads.layer_experts.begin(), loads.layer_experts.end());
  return StrCat(fewest, " to ", Plural(loads.experts, "expert"));
}

Status RequireEqualExperts(const TokenCounts& loads, std::string_view what) {
  if (loads.layer_experts.empty()) return {};
  return Fail(Errc::kUnsupported, what,
              " requires the same number of experts in all layers, found ", ExpertsText(loads),
              "; choose layers of one number with --layers");
}

}  // namespace shardwright::token_counts
