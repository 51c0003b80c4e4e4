// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/core/types.h"

namespace shardwright::placement {

/// Experts whose parameters can travel behind the layers between two MoE layers.
/// \returns floor(seconds * bytes_per_s / expert_bytes), at most 2^32 - 1; 0 if nothing is known
/// Local. Source: Hecate, section 4.2.
std::uint32_t OverlapDegree(double nonmoe_seconds, double bytes_per_s, std::uint64_t expert_bytes);

/// The live devices of a cluster, as Hecate sees them.
struct LiveDevices {
  explicit LiveDevices(const Cluster& cluster);

  std::vector<std::uint32_t> device;  ///< in the cluster
  std::vector<std::uint32_t> node;    ///< numbered through from 0, ascending
  std::vector<std::uint32_t> slots;   ///< experts of one layer that fit
  std::uint32_t nodes = 0;

  std::uint32_t size() const { return static_cast<std::uint32_t>(device.size()); }
  /// Slots of the device that has the fewest of them.
  std::uint32_t LeastSlots() const;
};

/// Experts in the order of descending (tokens), ties to the lower id; the first `count`.
std::vector<std::uint32_t> HottestExperts(std::span<const std::uint64_t> tokens,
                                          std::uint32_t count);

/// Owners of every expert of every layer: cold experts by load to the least loaded node and device
/// with a free slot, hot ones (the `overlap` hottest of a layer) where fewest hot experts of their
/// layer are owned. A device owns at most ceil(layers * experts / devices) experts over all layers,
/// and of no layer more than it has slots.
/// \pre every device has ceil(experts / devices) slots or more
/// \param stop  ends it early
/// \returns [layer][expert]: index into `devices`
/// Local, pure but for the stop. Source: Hecate, algorithm 2; loads are those of the layer alone.
/// The paper has one pool of memory for all layers; here the slots of a layer are a limit of their
/// own.
std::vector<std::vector<std::uint32_t>> ShardOwners(const TokenCounts& loads,
                                                    const LiveDevices& devices,
                                                    std::uint32_t overlap,
                                                    const StopCheck& stop = {});

/// Who holds which expert of a layer for one iteration: holders[e], ascending, the owner among
/// them.
/// \param owner    by expert: index into `devices`
/// \param overlap  t: only so many experts, the hottest, are copied
/// \param spare    m, by device: foreign experts that fit there, any number; capped by t
/// \param stop  ends it early
/// Local, pure but for the stop. Source: Hecate, algorithm 1; m is one number there.
std::vector<std::vector<std::uint32_t>> Materialize(std::span<const std::uint32_t> owner,
                                                    std::span<const std::uint64_t> tokens,
                                                    const LiveDevices& devices,
                                                    std::uint32_t overlap,
                                                    std::span<const std::uint32_t> spare,
                                                    const StopCheck& stop = {});

/// Bytes of the sparse collectives of a layer: spAG copies each expert from its owner to its other
/// holders, spRS sums back the other way.
struct SparseVolumes {
  std::vector<std::uint64_t> in_bytes;   ///< by device: spAG inbound = spRS outbound
  std::vector<std::uint64_t> out_bytes;  ///< by device: spAG outbound if every holder is served by
                                         ///< the owner = spRS inbound
  double copied_share = 0;               ///< lambda: experts copied anywhere / experts
  std::uint64_t bound_bytes = 0;         ///< lambda * bytes of the layer
  double all_reduce_bytes = 0;           ///< what rearranged replicas would send: eq 2
};

/// \param holders  by expert, the owner among them
/// Local, pure. Source: Hecate, equations 1 and 2.
SparseVolumes VolumesOf(std::span<const std::uint32_t> owner,
                        const std::vector<std::vector<std::uint32_t>>& holders,
                        std::uint32_t device_count, std::uint64_t expert_bytes);

/// What calibration weighs.
struct CalibrationCost {
  double seconds_per_token = 0;
  double bytes_per_token = 0;  ///< that crosses nodes
  double bytes_per_s = 0;      ///< between nodes; 0: traffic is free
  std::uint64_t expert_bytes = 0;
};

/// Holders to use for an iteration.
struct Calibrated {
  std::vector<std::vector<std::uint32_t>> holders;
  bool changed = false;  ///< the planned ones got company
};

/// Adds copies for the true loads in the slots that the planned ones have left, and keeps them if
/// sending them costs less than they save: T(new) + extra / bandwidth < T(planned).
/// \param planned  by expert, as Materialize gave it
/// \param spare    as Materialize
/// Local, pure. Source: Hecate, section 4.2 (calibration).
Calibrated Calibrate(std::span<const std::uint32_t> owner,
                     const std::vector<std::vector<std::uint32_t>>& planned,
                     std::span<const std::uint64_t> true_tokens, const LiveDevices& devices,
                     std::uint32_t overlap, std::span<const std::uint32_t> spare,
                     const CalibrationCost& cost);

}  // namespace shardwright::placement
