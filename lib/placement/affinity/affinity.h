// SPDX-License-Identifier: Apache-2.0
// lib/placement/affinity: tokens that stay on their GPU from one layer to the next.
// An Affinity counts the tokens that go from each expert of a layer to each expert of the next one.
// affinity_file.cc reads it. affinity.cc exchanges the GPUs of a plan, layer by layer, so that more
// of these transitions stay on their GPU or node, and measures them. The contents of the GPUs do
// not change, so neither does balance.

#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "placement/core/types.h"
#include "support/base/result.h"
#include "support/base/stop.h"

namespace shardwright::placement {

/// Tokens that go from the experts of a layer to those of the next layer.
struct Affinity {
  std::uint32_t experts = 0;
  /// By planned layer except the last: [experts][experts], from the layer's experts to those of the
  /// next planned layer. Empty if the two are not consecutive in the model. At most 2^53 in all.
  std::vector<std::vector<std::uint64_t>> pairs;
};

/// Reads an Affinity from lists in JSON, or an array in .npy, .pt or .pth, of the shape
/// [layers - 1, experts, experts]. The layers are those of the token counts.
/// \param recorded  numbers of all layers of the token counts, ascending
/// \param planned   numbers of the layers to plan, some of `recorded`, ascending
/// \error kNotFound; kBadInput  another shape or a wrong count: names layers, experts and both
///        sides; kUsage  no two planned layers are consecutive; kLimit  too many counts
/// Local.
Result<Affinity> ReadAffinity(const std::string& path, std::span<const std::uint32_t> recorded,
                              std::span<const std::uint32_t> planned, std::uint32_t experts);

/// Transitions from one layer to the next. The replicas of an expert share its tokens equally.
struct PairTransitions {
  std::uint64_t all = 0;
  double on_gpu = 0;   ///< transitions that stay on their GPU
  double on_node = 0;  ///< transitions that stay on their node, including those on their GPU
};

/// Transitions of all layers.
struct Transitions {
  std::vector<PairTransitions> pairs;  ///< by layer except the last; 0 if not consecutive
  PairTransitions sum;

  double gpu_share() const { return Share(sum.on_gpu); }
  double node_share() const { return Share(sum.on_node); }

 private:
  double Share(double part) const { return sum.all > 0 ? part / static_cast<double>(sum.all) : 0; }
};

/// Measures the transitions of a placement.
/// \pre the placement fits `cluster`, and has the layers and experts of `affinity`
/// Local.
Transitions MeasureTransitions(const Affinity& affinity, const Placement& placement,
                               const Cluster& cluster);

/// GPUs that may be exchanged. They always have equal slots and speeds.
enum class ExchangeScope : std::uint8_t {
  kCluster,  ///< any two GPUs, so nodes may get other sets of experts
  kNodes,    ///< whole nodes, and GPUs within a node: any number of failures is survived as before
  kInNodes,  ///< only GPUs of the same node: every node keeps its experts
};

struct ArrangeOptions {
  ExchangeScope scope = ExchangeScope::kCluster;
  FailureUnit unit = FailureUnit::kNode;  ///< kRack: nodes are exchanged only inside their rack
  StopCheck stop = {};                    ///< ends the work early
};

/// Weight of a transition that stays on its node. One that also stays on its GPU counts 1 more.
inline constexpr double kNodeWeight = 8;

/// Exchanges GPUs within each layer, so that on_gpu + kNodeWeight * on_node grows. A first pass
/// arranges each layer for the one before it, up to three more passes for both adjacent layers.
/// Each layer gets the best arrangement for these, as an assignment problem, if at most 512
/// GPUs (kNodes: nodes) may be exchanged; more are split into parts. The result is never worse than
/// `placement`. It is the optimum of all layers if all nodes are equal and the scope is kNodes or
/// kInNodes, or the cluster has one node.
/// \pre as MeasureTransitions
/// Local, pure except for the stop. Source: docs/decisions/0063-affinity-exchanges-gpus.md.
Placement ArrangeForAffinity(const Affinity& affinity, const Placement& placement,
                             const Cluster& cluster, const ArrangeOptions& options);

}  // namespace shardwright::placement
