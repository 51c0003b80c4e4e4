#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"

namespace shardwright::loads {

/// Tokens per expert of one moment (or a mean over a window), row-major [layer][expert].
struct Loads {
  std::uint32_t layers = 0;
  std::uint32_t experts = 0;               ///< of every layer
  std::vector<std::uint64_t> tokens;       ///< [layers][experts]; a layer sums to at most 2^53
  std::vector<std::uint32_t> layer_id;     ///< by layer: its number in the model; [layers]
  std::optional<std::uint64_t> iteration;  ///< the last one that is in the mean

  std::span<const std::uint64_t> layer(std::uint32_t l) const {
    return std::span(tokens).subspan(std::size_t{l} * experts, experts);
  }
};

/// Proves that loads are well-formed: as many counts as layers x experts, sums that do not
/// overflow. A layer without a single token is allowed (all experts are equal then).
/// \error kBadInput  names the layer; kLimit  too many layers or experts
Status Validate(const Loads& loads);

}  // namespace shardwright::loads
