// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace shardwright::placement::internal {

__extension__ using Wide = __int128;

/// Spreads experts' tokens over the devices that hold them. Exact: loads are fractions p / q, all
/// quantities are multiplied by q.
class SpreadFlow {
 public:
  /// \pre as LeastMaxLoad
  SpreadFlow(std::span<const std::uint64_t> tokens,
             const std::vector<std::vector<std::uint32_t>>& holders,
             std::vector<std::uint32_t> weights);

  /// The least possible largest load. Starts from the mean; while the tokens do not fit, the cut
  /// shows experts that have fewer devices than they need, and their own mean is the next load:
  /// each step is a proof that nothing smaller works, so that the first that fits is the answer.
  double Solve();

 private:
  struct Edge {
    std::uint32_t device = 0;
    Wide flow = 0;
  };

  // Sends as much as fits under load p / q; true if everything does.
  bool Fill(std::uint64_t p, std::uint64_t q);
  // Distances from experts that are not done; true if some device with room is in reach.
  bool Levels();
  // Sends up to `wanted` of an expert on along shortest paths.
  Wide Push(std::uint32_t expert, Wide wanted);

  std::vector<std::uint64_t> tokens_;
  std::vector<std::uint32_t> weight_;  // of device
  std::vector<std::size_t> begin_;     // edges of an expert
  std::vector<Edge> edges_;
  std::vector<std::size_t> reverse_begin_;     // by device
  std::vector<std::uint32_t> reverse_expert_;  // experts of a device
  std::vector<std::size_t> reverse_edge_;      // their edges
  std::vector<Wide> left_;                     // of expert: not sent yet
  std::vector<Wide> room_;                     // of device
  std::vector<std::uint32_t> expert_level_, device_level_;
  std::vector<std::size_t> next_edge_, next_reverse_;
};

}  // namespace shardwright::placement::internal
