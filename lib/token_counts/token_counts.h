// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"

namespace shardwright::token_counts {

/// Tokens per expert at one point in time or added over a window, row-major [layer][expert].
struct TokenCounts {
  std::uint32_t layers = 0;
  std::uint32_t experts = 0;                 ///< the largest number in a layer
  std::vector<std::uint32_t> layer_experts;  ///< by layer; empty: all have `experts`
  /// [layers][experts]; 0 for experts that a layer lacks; at most 2^53 per layer
  std::vector<std::uint64_t> tokens;
  std::vector<std::uint32_t> layer_id;     ///< by layer: its number in the model; [layers]
  std::optional<std::uint64_t> iteration;  ///< the last one that was added
  std::uint64_t records = 1;               ///< number of records that were added
  double iterations = 1;                   ///< sum of the weights of the records
  double unit = 1;  ///< tokens per count; not 1 if weights are not whole numbers
  /// Counts per window, [windows][layers][experts], for a plan that serves several windows.
  /// `tokens` then has the mean of their shares. Empty for one window.
  std::vector<std::vector<std::uint64_t>> windows;

  /// Returns the mean number of tokens per iteration that one count stands for.
  double per_iteration() const { return unit / iterations; }

  /// Returns the number of experts of a layer.
  std::uint32_t ExpertsOf(std::size_t layer) const {
    return layer_experts.empty() ? experts : layer_experts[layer];
  }

  /// Returns the counts of a layer's experts.
  std::span<const std::uint64_t> layer(std::uint32_t l) const { return Row(tokens, l); }
  /// Returns the number of windows, at least 1. The function below returns one window's counts.
  std::size_t window_count() const { return windows.empty() ? 1 : windows.size(); }
  std::span<const std::uint64_t> layer(std::uint32_t l, std::size_t window) const {
    return Row(windows.empty() ? tokens : windows[window], l);
  }

 private:
  std::span<const std::uint64_t> Row(const std::vector<std::uint64_t>& counts,
                                     std::uint32_t l) const {
    return std::span(counts).subspan(std::size_t{l} * experts, ExpertsOf(l));
  }
};

/// Checks that there are layers x experts counts, and that adding them does not overflow. A
/// layer without any tokens is allowed (all its experts are then equal).
/// \error kBadInput  names the layer; kLimit  too many layers or experts
Status Validate(const TokenCounts& loads);

/// Formats the number of experts per layer: "64 experts" or "64 to 128 experts".
/// Pure.
std::string ExpertsText(const TokenCounts& loads);

/// Fails for layers with different numbers of experts.
/// \param what  what requires equal numbers, such as a flag
/// \error kUnsupported  names `what`, the smallest and the largest number, and --layers
/// Pure.
Status RequireEqualExperts(const TokenCounts& loads, std::string_view what);

}  // namespace shardwright::token_counts
