// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/core/types.h"

namespace shardwright::placement {

/// Amounts that pass through the links of a cluster in one collective operation. A transfer between
/// GPUs of a node uses their GPU links. A transfer between nodes uses the links of both nodes, and
/// a transfer between racks also those of both racks.
struct LinkTraffic {
  explicit LinkTraffic(const Cluster& cluster);

  std::vector<double> gpu_in, gpu_out;    ///< by GPU
  std::vector<double> node_in, node_out;  ///< by node
  std::vector<double> rack_in, rack_out;  ///< by rack

  /// Returns the time of the busiest direction of any link, in seconds. Links with an unknown
  /// bandwidth take no time.
  /// \param unit_bytes  bytes of one unit of the amounts
  /// Pure.
  double Seconds(const Cluster& cluster, double unit_bytes) const;
};

/// Method that divides an expert's tokens among its replicas.
enum class DispatchMethod : std::uint8_t {
  kProportional,  ///< equal shares, a GPU's own tokens first; the others go to free shares in
                  ///< proportion
  kTopology,  ///< the GPU itself, otherwise its node, otherwise all GPUs with the expert, evenly
};

/// Tokens of a layer by destination, and the links that they use.
struct TokenFlow {
  std::vector<double> tokens;  ///< by GPU: tokens that its replicas compute
  LinkTraffic traffic;         ///< in tokens
};

/// Returns the flow of a layer's tokens if every GPU that can store experts has an equal share of
/// each expert's tokens. Tokens of experts without a live replica are left out.
/// \param tokens  by expert
/// \pre placement fits `tokens` and `cluster`
/// Pure. Source: Lazarus, algorithm 1, where the excess fills shares in rank order; Hecate,
/// section 4.4.
TokenFlow FlowOf(const Placement& placement, std::span<const std::uint64_t> tokens,
                 const Cluster& cluster, std::uint32_t layer, DispatchMethod method);

/// Returns the traffic of SparseAllGather for a layer, in experts. Each expert passes from its
/// owner along a chain of the other GPUs with a replica, so that a link carries it at most once in
/// each direction. The traffic of SparseReduceScatter is the same in the opposite direction.
/// \pre every expert has an owner
/// Pure. Source: Hecate, equation 1.
LinkTraffic GatherTraffic(const Placement& placement, const Placement& owners,
                          const Cluster& cluster, std::uint32_t layer);

/// Returns the traffic of the all-reduce of gradients among the replicas of each expert, in
/// experts. The rings are hierarchical: GPUs of a node, nodes of a rack, racks. A ring of n members
/// sends 2(n - 1)/n through the link of each.
/// Pure. Source: Hecate, equation 2, for one ring over all GPUs.
LinkTraffic AllReduceTraffic(const Placement& placement, const Cluster& cluster,
                             std::uint32_t layer);

}  // namespace shardwright::placement
