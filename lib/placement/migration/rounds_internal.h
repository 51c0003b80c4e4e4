// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "placement/migration/migration.h"

namespace shardwright::placement::internal {

/// Assigns each transfer (sender, receiver) between nodes to a round (edge coloring, König). In a
/// round a node sends at most once and receives at most once. The number of rounds is minimal.
/// \returns the round of every transfer
std::vector<std::uint32_t> ColorEdges(
    std::span<const std::pair<std::uint32_t, std::uint32_t>> edges, std::uint32_t nodes,
    const StopCheck& stop = {});

/// Rounds for transfers: those between nodes by coloring, those inside a node in the first round
/// after their expert arrived in which both devices are free.
void ColorRounds(const Cluster& cluster, const StopCheck& stop, Migration* migration);

/// Chooses senders again, round by round: whoever has an expert, also since an earlier round, may
/// send it on.
void ForwardInRounds(const Placement& current, const Cluster& cluster, const StopCheck& stop,
                     Migration* migration);

}  // namespace shardwright::placement::internal
