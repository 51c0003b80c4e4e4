// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/core/types.h"

namespace shardwright::placement {

/// Returns how many experts' parameters can be sent during the layers between two MoE layers.
/// \returns floor(seconds * bytes_per_s / expert_bytes), at most 2^32 - 1; 0 if a value is unknown
/// Local. Source: Hecate, section 4.2.
std::uint32_t OverlapDegree(double nonmoe_seconds, double bytes_per_s, std::uint64_t expert_bytes);

/// The live devices of a cluster, in the form that the algorithms of Hecate use.
struct LiveDevices {
  explicit LiveDevices(const Cluster& cluster);

  std::vector<std::uint32_t> device;  ///< number in the cluster
  std::vector<std::uint32_t> node;    ///< by live device: its node, numbered from 0, ascending
  std::vector<std::uint32_t> slots;   ///< by live device: experts of one layer that fit
  std::uint32_t nodes = 0;

  std::uint32_t size() const { return static_cast<std::uint32_t>(device.size()); }
  /// Returns the smallest number of slots of any device.
  std::uint32_t LeastSlots() const;
};

/// Returns the first `count` experts in order of descending tokens, ties to the lower id.
std::vector<std::uint32_t> HottestExperts(std::span<const std::uint64_t> tokens,
                                          std::uint32_t count);

/// Returns the owner of every expert of every layer. A cold expert goes to the least loaded node
/// and device with a free slot, a hot one (among the `overlap` hottest of a layer) to a device
/// that owns the fewest hot experts of the layer. A device owns at most ceil(layers * experts /
/// devices) experts over all layers, and at most as many per layer as it has slots.
/// \pre every device has at least ceil(experts / devices) slots
/// \param stop  ends the work early
/// \returns [layer][expert]: index into `devices`
/// Local, pure except for the stop. Source: Hecate, algorithm 2, with the token counts of
/// each layer alone. The paper has one memory pool for all layers, while here the slots limit
/// each layer separately.
std::vector<std::vector<std::uint32_t>> ShardOwners(const TokenCounts& loads,
                                                    const LiveDevices& devices,
                                                    std::uint32_t overlap,
                                                    const StopCheck& stop = {});

/// Returns the replicas of a layer for one iteration: `holders[e]` lists the devices with expert
/// e, ascending, including its owner.
/// \param owner    by expert: index into `devices`
/// \param overlap  t: only this many experts, the hottest, are copied
/// \param spare    m, by device: foreign experts that fit there; any number, capped by t
/// \param stop  ends the work early
/// Local, pure except for the stop. Source: Hecate, algorithm 1, where m is one number.
std::vector<std::vector<std::uint32_t>> Materialize(std::span<const std::uint32_t> owner,
                                                    std::span<const std::uint64_t> tokens,
                                                    const LiveDevices& devices,
                                                    std::uint32_t overlap,
                                                    std::span<const std::uint32_t> spare,
                                                    const StopCheck& stop = {});

/// Volumes of the sparse collectives of a layer, in experts. spAG copies each expert from its owner
/// to the other devices with a replica, and spRS reduces gradients in the other direction.
struct SparseVolumes {
  std::vector<std::uint64_t> in;   ///< by device: spAG inbound = spRS outbound
  std::vector<std::uint64_t> out;  ///< by device: spAG outbound if the owner sends all
                                   ///< copies = spRS inbound
  double copied_share = 0;         ///< lambda: share of the experts that are copied anywhere
  std::uint64_t bound = 0;         ///< upper bound: lambda * experts of the layer
  double all_reduce = 0;           ///< volume of an all-reduce for rearranged replicas: eq 2
};

/// \param holders  by expert: devices with a replica, including the owner
/// Local, pure. Source: Hecate, equations 1 and 2.
SparseVolumes VolumesOf(std::span<const std::uint32_t> owner,
                        const std::vector<std::vector<std::uint32_t>>& holders,
                        std::uint32_t device_count);

/// Costs that calibration compares.
struct CalibrationCost {
  double seconds_per_token = 0;
  double bytes_per_token = 0;  ///< bytes sent between nodes
  double bytes_per_s = 0;      ///< between nodes; 0: traffic is free
  std::uint64_t expert_bytes = 0;
};

/// Replicas for an iteration.
struct Calibrated {
  std::vector<std::vector<std::uint32_t>> holders;
  bool changed = false;  ///< true if copies were added
};

/// Adds copies for the true token counts in the slots that the plan left free. Keeps them if they
/// save more time than sending them costs: T(new) + extra / bandwidth < T(planned).
/// \param planned  by expert: devices, as returned by Materialize
/// \param spare    as for Materialize
/// Local, pure. Source: Hecate, section 4.2 (calibration).
Calibrated Calibrate(std::span<const std::uint32_t> owner,
                     const std::vector<std::vector<std::uint32_t>>& planned,
                     std::span<const std::uint64_t> true_tokens, const LiveDevices& devices,
                     std::uint32_t overlap, std::span<const std::uint32_t> spare,
                     const CalibrationCost& cost);

}  // namespace shardwright::placement
