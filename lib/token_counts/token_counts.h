// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "support/base/result.h"

namespace shardwright::token_counts {

/// Tokens per expert of one moment, or added up over a window, row-major [layer][expert].
struct TokenCounts {
  std::uint32_t layers = 0;
  std::uint32_t experts = 0;               ///< of every layer
  std::vector<std::uint64_t> tokens;       ///< [layers][experts]; a layer sums to at most 2^53
  std::vector<std::uint32_t> layer_id;     ///< by layer: its number in the model; [layers]
  std::optional<std::uint64_t> iteration;  ///< the last one that is in the sum
  std::uint64_t records = 1;               ///< that were added up
  double iterations = 1;                   ///< their weights added up
  double unit = 1;  ///< tokens that one count stands for; other than 1 where weights are not whole
  /// [windows][layers][experts], where a plan has to be good for several windows: `tokens` is then
  /// the mean of their shares. Empty where there is one.
  std::vector<std::vector<std::uint64_t>> windows;

  /// Mean tokens of an iteration that one count stands for.
  double per_iteration() const { return unit / iterations; }

  std::span<const std::uint64_t> layer(std::uint32_t l) const { return Row(tokens, l); }
  /// Number of windows, and the counts of one.
  std::size_t window_count() const { return windows.empty() ? 1 : windows.size(); }
  std::span<const std::uint64_t> layer(std::uint32_t l, std::size_t window) const {
    return Row(windows.empty() ? tokens : windows[window], l);
  }

 private:
  std::span<const std::uint64_t> Row(const std::vector<std::uint64_t>& counts,
                                     std::uint32_t l) const {
    return std::span(counts).subspan(std::size_t{l} * experts, experts);
  }
};

/// Proves that loads are well-formed: as many counts as layers x experts, sums that do not
/// overflow. A layer without a single token is allowed (all experts are equal then).
/// \error kBadInput  names the layer; kLimit  too many layers or experts
Status Validate(const TokenCounts& loads);

}  // namespace shardwright::token_counts
