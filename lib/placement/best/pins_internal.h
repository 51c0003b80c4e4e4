// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/best/search_internal.h"
#include "placement/core/types.h"
#include "support/base/result.h"

namespace shardwright::placement::internal {

/// Bars pinned experts from the devices of other nodes.
/// \error kUsage  as Validate; kInfeasible  an expert with fewer live
///        failure units among its nodes than it needs
/// Local.
Status ApplyPins(const Options& options, const TokenCounts& loads, const Cluster& cluster,
                 SearchGround* ground);

/// Places every expert on as many failure units as it needs, as the pins allow. Keeps replicas of a
/// current placement where it can. For one unit it finds a placement whenever there is one:
/// a matching of experts and slots.
/// \param current  of the live devices; nullptr: the devices are empty
/// \returns slots of the live devices, device after device; some may be empty
/// \error kInfeasible  names an expert that does not fit; kStopped
/// Local.
Result<std::vector<std::int32_t>> PinnedStart(const SearchGround& ground, const Options& options,
                                              const Placement* current, std::uint32_t layer);

}  // namespace shardwright::placement::internal
