// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "placement/core/types.h"

namespace shardwright::placement::internal {

/// Returns whether each expert group stays on one node, as routers need that send a token to the
/// groups of few nodes.
/// \error kInfeasible  Options::eplb_policy asks for it, but groups or nodes do not divide
Result<bool> StaysGrouped(const TokenCounts& loads, const Cluster& cluster, const Options& options);

/// Plans all layers with as many groups on each node: groups are dealt to the nodes, then each node
/// is planned by itself.
/// \pre StaysGrouped
/// \error kInfeasible  more copies than one node can keep apart, or a node with too few slots for
///        the experts of its groups; kStopped
Result<StrategyResult> DraftGrouped(const TokenCounts& loads, const Cluster& cluster,
                                    const Options& options);

}  // namespace shardwright::placement::internal
