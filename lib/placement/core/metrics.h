// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/core/types.h"

namespace shardwright::placement {

/// Returns the load of every device for a layer: its tokens divided by the device's relative
/// speed. An expert's tokens are split evenly over its replicas. Dead devices have load 0. Tokens
/// of experts without a live replica are not counted.
/// \pre placement fits `loads` and `cluster`
/// Local.
std::vector<double> DeviceLoads(const Placement& placement, const TokenCounts& loads,
                                const Cluster& cluster, std::uint32_t layer);

/// Measures of one layer of a placement. Ratios are relative to the mean load of live devices,
/// and 1 if there are no tokens.
struct LayerMetrics {
  std::uint64_t tokens = 0;
  std::uint64_t tokens_lost = 0;  ///< tokens of experts without a live replica
  double mean_load = 0;           ///< tokens per live device
  double max_load = 0;            ///< load of the busiest device, even split
  double imbalance = 1;           ///< max / mean over devices
  double node_imbalance = 1;      ///< max / mean over live nodes, load per device of the node
  /// Lower bound of the imbalance of any placement in the same number of slots with even split:
  /// the mean, or the hottest replica under the best replica counts.
  double bound = 1;
  /// Least imbalance of this placement if tokens could be split in any way.
  double lp_bound = 1;
  /// Tokens that leave their node if every live device has an even share of every expert's
  /// tokens and replicas share them evenly.
  double inter_node_tokens = 0;
  /// The same if a token stays on its device or node whenever the expert has a replica there.
  double inter_node_tokens_least = 0;
  std::uint32_t replicas = 0;           ///< slots in use on live devices
  std::uint32_t device_duplicates = 0;  ///< replicas on a device that already has the expert
};

/// Measures one layer. With several windows, measures the window with the largest imbalance.
/// \pre placement fits `loads` and `cluster`
/// Local.
LayerMetrics Measure(const Placement& placement, const TokenCounts& loads, const Cluster& cluster,
                     std::uint32_t layer);

/// Measures of all layers: means over the layers that have tokens, and the worst ratios.
struct ModelMetrics {
  std::vector<LayerMetrics> layers;
  double imbalance_mean = 1;
  double imbalance_max = 1;
  double bound_mean = 1;
  double lp_bound_mean = 1;
  double node_imbalance_mean = 1;
  double inter_node_share = 0;        ///< share of all tokens, even split
  double inter_node_share_least = 0;  ///< share of all tokens, near replicas first
};

/// \pre placement fits `loads` and `cluster`
/// \param stop  ends the measurement early
/// Local; layers in parallel on the caller's task arena.
ModelMetrics Measure(const Placement& placement, const TokenCounts& loads, const Cluster& cluster,
                     const StopCheck& stop = {});

/// Returns the least possible token count of the hottest replica if the experts have `slots`
/// replicas in total, each on a device at most once. This is a lower bound of the largest load.
/// \pre slots >= tokens.size() > 0
/// Local.
double LeastHottest(std::span<const std::uint64_t> tokens, std::uint64_t slots,
                    std::uint32_t devices);

/// Returns the least possible largest load of devices when expert e's `tokens[e]` may be split in
/// any way over the devices in `holders[e]` (ascending, distinct, not empty where tokens[e] > 0).
/// Exact: finds the densest set of experts by maximum flows.
/// \param weights  by device, above 0: divisor of its tokens
/// Local.
double LeastMaxLoad(std::span<const std::uint64_t> tokens,
                    const std::vector<std::vector<std::uint32_t>>& holders,
                    std::vector<std::uint32_t> weights);

}  // namespace shardwright::placement
