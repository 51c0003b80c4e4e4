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

/// Assigns transfers to rounds. Transfers between nodes are assigned by coloring. A transfer inside
/// a node gets the first round after the arrival of its expert in which both devices are free.
void ColorRounds(const Cluster& cluster, const StopCheck& stop, Migration* migration);

/// Chooses senders again, round by round. A device that has an expert, or received it in an
/// earlier round, may send it.
void ForwardInRounds(const Placement& current, const Cluster& cluster, const StopCheck& stop,
                     Migration* migration);

}  // namespace shardwright::placement::internal
