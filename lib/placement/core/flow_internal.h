// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace shardwright::placement::internal {

__extension__ using Wide = __int128;

/// Spreads the tokens of experts over the devices that have replicas of them. Loads are exact
/// fractions p / q, and all quantities are multiplied by q.
class SpreadFlow {
 public:
  /// \pre as LeastMaxLoad
  SpreadFlow(std::span<const std::uint64_t> tokens,
             const std::vector<std::vector<std::uint32_t>>& holders,
             std::vector<std::uint32_t> weights);

  /// Returns the least possible largest load. Starts from the mean load. While the tokens do not
  /// fit, the minimum cut yields experts with too few devices, and their mean load is the next
  /// candidate. Each step proves that no smaller load works, so the first that fits is the answer.
  double Solve();

 private:
  struct Edge {
    std::uint32_t device = 0;
    Wide flow = 0;
  };

  // Sends as many tokens as fit under load p / q. Returns true if all fit.
  bool Fill(std::uint64_t p, std::uint64_t q);
  // Sets distances from experts with unsent tokens. True if a device with capacity is reachable.
  bool Levels();
  // Sends up to `wanted` tokens of an expert along shortest paths. Returns the number sent.
  Wide Push(std::uint32_t expert, Wide wanted);

  std::vector<std::uint64_t> tokens_;
  std::vector<std::uint32_t> weight_;  // by device
  std::vector<std::size_t> begin_;     // first edge of each expert
  std::vector<Edge> edges_;
  std::vector<std::size_t> reverse_begin_;     // by device
  std::vector<std::uint32_t> reverse_expert_;  // experts of each device
  std::vector<std::size_t> reverse_edge_;      // edges of those experts
  std::vector<Wide> left_;                     // by expert: tokens not sent yet
  std::vector<Wide> room_;                     // by device
  std::vector<std::uint32_t> expert_level_, device_level_;
  std::vector<std::size_t> next_edge_, next_reverse_;
};

}  // namespace shardwright::placement::internal
