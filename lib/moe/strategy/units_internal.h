#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moe/core/types.h"
#include "moe/strategy/lazarus.h"

namespace shardwright::moe::internal {

/// The live failure units of a cluster: nodes or racks.
struct Units {
  std::vector<std::vector<std::uint32_t>> devices;  ///< by unit, live, ascending
  std::vector<std::uint64_t> slots;                 ///< by unit

  std::uint64_t slot_count() const;
};
Units UnitsOf(const Cluster& cluster, FailureUnit unit);

/// The largest copies_min for which a plan exists.
std::uint32_t LargestCopies(const Units& units, std::uint32_t experts);

/// The copies_min to plan with: the asked one, or less if the options allow it.
/// \error kInfeasible  names the largest that fits
Result<std::uint32_t> Threshold(const Units& units, std::uint32_t experts, const Options& options);

/// Deals each unit's experts to its devices: most tokens per replica first, to the least loaded
/// device with a free slot, one that has not got the expert if possible; ties to the lower device.
void DealToDevices(const UnitPlan& plan, const Units& units, std::span<const std::uint64_t> tokens,
                   std::uint32_t layer, Placement* placement);

/// Experts by (tokens, id) ascending.
std::vector<std::uint32_t> AscendingLoad(std::span<const std::uint64_t> tokens);

}  // namespace shardwright::moe::internal
