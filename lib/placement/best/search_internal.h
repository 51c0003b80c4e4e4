// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "placement/best/ground_internal.h"
#include "placement/best/load_order_internal.h"
#include "placement/core/types.h"

namespace shardwright::placement::internal {

inline constexpr double kLess = 1 - 1e-12;  ///< factor for a gain above rounding errors

/// Local search on one layer. Stores the expert of every slot of the live devices. A device never
/// has an expert twice, and after completion every expert keeps copies_min units.
class LayerSearch {
 public:
  /// \param current  the current placement, nullptr if none; its replicas cost no move
  LayerSearch(const SearchGround& ground, std::span<const std::uint64_t> tokens,
              const Placement* current, std::uint32_t layer);

  /// Starts from the current placement. Returns false if that cannot be completed.
  bool StartFromCurrent();
  /// Starts from the slots of a placement of one layer over the cluster's devices.
  bool StartFrom(const Placement& placement, std::uint32_t layer);

  /// Swaps replicas of the busiest device, and gives slots of cold experts to hot ones, until no
  /// device has a larger load than `target`, no change helps, or `steps` are used up.
  void Balance(double target, std::uint64_t steps);

  /// Reverts moves that are not needed to stay at or below `target`.
  void TakeBack(double target);

  double peak() const { return load_.peak(); }
  /// Returns the number of replicas that devices must receive.
  std::uint64_t moves() const;
  /// Returns the experts in the slots of the live devices, device after device.
  const std::vector<std::int32_t>& slots() const { return slots_; }
  /// Replaces all slots. \pre as LayerAnneal::Start
  void SetSlots(const std::vector<std::int32_t>& slots);

  void CopyTo(Placement* placement, std::uint32_t layer) const;

 private:
  struct Swap {
    std::uint32_t other = 0;
    std::size_t i = 0, j = 0;
    bool reaches = false;  // both devices at or below the target
    std::int64_t cost = 0;
    double peak = 0;
    bool found = false;
  };

  /// A range of tokens that a swap moves.
  struct MovedRange {
    double middle = 0;
    double radius = 0;

    bool Has(double moved) const { return std::abs(middle - moved) < radius; }
    /// Returns whether it has the difference of `share` and one of `others`, up to rounding.
    bool HasAny(double share, std::span<const double> others) const;
  };

  std::span<const std::int32_t> on(std::uint32_t d) const {
    return std::span(slots_).subspan(first_[d], first_[d + std::size_t{1}] - first_[d]);
  }
  bool Holds(std::uint32_t d, std::uint32_t e) const { return Bit(holds_, d, e); }
  bool Held(std::uint32_t d, std::uint32_t e) const { return Bit(held_, d, e); }
  /// Returns whether the device may get a replica.
  bool Fits(std::uint32_t d, std::uint32_t e) const { return !Holds(d, e) && ground_.Allows(d, e); }
  bool Bit(const std::vector<std::uint64_t>& table, std::uint32_t row, std::uint32_t e) const {
    return (table[std::size_t{row} * words_ + e / 64] >> (e % 64) & 1) != 0;
  }
  void Mark(std::vector<std::uint64_t>* table, std::uint32_t row, std::uint32_t e) const {
    (*table)[std::size_t{row} * words_ + e / 64] |= std::uint64_t{1} << (e % 64);
  }

  void SetShare(std::uint32_t e);
  /// Notes a device after a change of its slots or shares. Reload updates its load.
  void Touch(std::uint32_t d);
  /// Updates the share of an expert, and notes its devices.
  void TouchHolders(std::uint32_t e);
  /// Updates slot_share_ of a device, and returns its load.
  double LoadOf(std::uint32_t d);
  /// Updates the load of each noted device.
  void Reload();
  /// Sets or empties a slot. Updates counts, units and bits, but not loads.
  void Put(std::uint32_t d, std::size_t slot, std::int32_t expert);
  bool MayLeave(std::uint32_t e, std::uint32_t from, std::uint32_t to) const;
  /// Returns the cost of a replica on a device: 0 if the device has it in the current placement.
  std::int64_t MoveCost(std::uint32_t e, std::uint32_t d) const;

  void ReadSlots(const Placement& placement, std::uint32_t layer);
  bool Complete();
  bool GiveUnit(std::uint32_t e);
  void FillEmpty();
  void LoadAll();
  Swap BestSwap(std::uint32_t top, double target) const;
  void Consider(std::uint32_t top, std::uint32_t other, double target, Swap* best) const;
  MovedRange UsefulRange(std::uint32_t top, std::uint32_t other, double target,
                         const Swap& best) const;
  bool ConsiderSlots(std::uint32_t top, std::size_t i, std::uint32_t other, std::size_t j,
                     double target, Swap* best) const;
  void Apply(std::uint32_t top, const Swap& swap);
  bool Replicate(std::uint32_t top);
  /// Finds the replica that costs least to remove, on a device that lacks `expert`. The tokens
  /// per remaining replica must stay below `limit`.
  bool FindVictim(std::uint32_t expert, double limit, bool new_unit, std::uint32_t* device,
                  std::size_t* slot) const;

  const SearchGround& ground_;
  std::span<const std::uint64_t> tokens_;
  const Placement* current_;
  std::uint32_t layer_;
  std::size_t words_;               // of the bits of all experts
  std::size_t device_words_;        // of the bits of all devices
  std::vector<std::size_t> first_;  // first slot of each device
  std::vector<std::int32_t> slots_;
  std::vector<double> slot_share_;        // share of the expert of each slot, 0 if empty
  std::vector<std::uint64_t> holds_;      // [device]: bits of experts
  std::vector<std::uint64_t> holders_;    // [expert]: bits of devices
  std::vector<std::uint64_t> held_;       // the same for the current placement
  std::vector<std::uint64_t> node_held_;  // [node], in the current placement
  std::vector<std::uint64_t> rack_held_;
  std::vector<std::uint32_t> count_;       // replicas by expert
  std::vector<std::uint32_t> unit_count_;  // [expert][unit], only if copies_min > 1
  std::vector<std::uint32_t> units_of_;    // by expert: number of distinct units
  std::vector<double> share_;              // tokens per replica
  std::vector<double> share_after_;        // with one replica less; infinite for the last one
  LoadOrder load_;
  std::vector<std::uint32_t> touched_;          // noted devices
  std::vector<std::uint8_t> is_touched_;        // [device]
  std::vector<LoadOrder::DeviceLoad> changed_;  // buffer of Reload
};

}  // namespace shardwright::placement::internal
