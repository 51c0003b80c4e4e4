// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "placement/best/search_internal.h"

namespace shardwright::placement::internal {

/// Returns a lower bound of the largest load over all placements of one layer in one window.
/// It uses dual prices of the linear program that fills the devices with replicas. Prices for
/// replicas of every size prove that a peak is impossible: for all replica counts, tokens
/// and prices of the experts add up to more than the fullest devices can take. Returns `low` for
/// layers with so many slots that the proof would take long.
/// \param tokens  by expert
/// \param low  a known lower bound
/// \param high  largest load of a known placement
/// Local.
double ProvenBound(std::span<const double> tokens, const SearchGround& ground, double low,
                   double high);

}  // namespace shardwright::placement::internal
