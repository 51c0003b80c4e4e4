// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "placement/best/search_internal.h"

namespace shardwright::placement::internal {

/// Returns a lower bound of the largest load of all placements of one layer in one window, from the
/// dual prices of the linear program that fills the devices with replicas. Prices for replicas of
/// every size prove that a peak is impossible: whatever the replica counts are, the loads and
/// prices of the experts add up to more than the fullest devices can take.
/// Returns `low` for layers with so many slots that the proof would take long.
/// \param tokens  by expert
/// \param low  a lower bound that is known
/// \param high  largest load of a placement that is known
/// Local.
double ProvenBound(std::span<const double> tokens, const SearchGround& ground, double low,
                   double high);

}  // namespace shardwright::placement::internal
