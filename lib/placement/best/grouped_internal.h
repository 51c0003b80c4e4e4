// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "placement/core/types.h"

namespace shardwright::placement::internal {

/// Returns true if each expert group stays on one node. Routers that send a token to the
/// groups of few nodes need this.
/// \error kInfeasible  Options::eplb_policy requires it, but groups or nodes do not divide
Result<bool> StaysGrouped(const TokenCounts& loads, const Cluster& cluster, const Options& options);

/// Plans all layers with the same number of groups on each node. Deals groups to the nodes,
/// then plans each node separately.
/// \pre StaysGrouped
/// \error kInfeasible  more copies than one node can keep apart, or a node with too few slots
///        for the experts of its groups; kStopped
Result<StrategyResult> DraftGrouped(const TokenCounts& loads, const Cluster& cluster,
                                    const Options& options);

}  // namespace shardwright::placement::internal
