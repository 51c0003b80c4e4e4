// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "placement/core/types.h"
#include "placement/strategy/units.h"

namespace shardwright::placement::internal {

inline constexpr double kLess = 1 - 1e-12;  ///< factor for a gain above rounding errors

/// Data that the searches of all layers share: live devices with nodes, racks, units and slots.
struct SearchGround {
  SearchGround(const Cluster& cluster, FailureUnit failure_unit, std::uint32_t copies);

  std::vector<std::uint32_t> device;  ///< number in the cluster
  std::vector<std::uint32_t> node;    ///< by live device: numbered from 0
  std::vector<std::uint32_t> rack;
  std::vector<std::uint32_t> unit;
  std::vector<std::uint32_t> slots;
  std::vector<double> speed;  ///< by live device: relative, as RelativeSpeeds
  std::uint32_t nodes = 0;
  std::uint32_t racks = 0;
  std::uint32_t units = 0;
  std::uint32_t copies_min = 1;  ///< least number of units per expert
  StopCheck stop = {};           ///< stops every search
  /// [live device][expert]: 1 if a pin keeps the expert off the device; empty without pins
  std::vector<std::uint8_t> barred;
  std::uint32_t experts = 0;  ///< row length of `barred`

  bool pinned() const { return !barred.empty(); }
  bool Allows(std::uint32_t d, std::uint32_t expert) const {
    return barred.empty() || barred[std::size_t{d} * experts + expert] == 0;
  }
  std::uint32_t size() const { return static_cast<std::uint32_t>(device.size()); }
  double fastest() const { return *std::max_element(speed.begin(), speed.end()); }
  double slowest() const { return *std::min_element(speed.begin(), speed.end()); }
};

/// The tokens of one layer's experts in every window with tokens, scaled so that all windows have
/// the same total. The largest load over all windows is the measure of balance.
class WindowShares {
 public:
  WindowShares(const TokenCounts& loads, std::uint32_t layer);

  std::uint32_t count() const { return count_; }
  std::size_t experts() const { return experts_; }
  double total() const { return total_; }
  std::span<const double> tokens(std::uint32_t window) const {
    return std::span(tokens_).subspan(window * experts_, experts_);
  }
  /// Returns the largest load of a device. \param slots  as LayerSearch::slots
  double Peak(const SearchGround& ground, std::span<const std::int32_t> slots) const;

 private:
  std::size_t experts_;
  std::uint32_t count_ = 0;
  double total_ = 0;  ///< total of the first window
  std::vector<double> tokens_;
};

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

  double peak() const { return by_load_.empty() ? 0 : by_load_.rbegin()->first; }
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

  std::int32_t* begin(std::uint32_t d) { return slots_.data() + first_[d]; }
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

  double Share(std::uint32_t e) const { return share_[e]; }
  void SetShare(std::uint32_t e);
  void Reload(std::uint32_t d);
  void ReloadHolders(std::uint32_t e);
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
  std::size_t words_;
  std::vector<std::size_t> first_;  // first slot of each device
  std::vector<std::int32_t> slots_;
  std::vector<std::uint64_t> holds_;      // [device]: bits of experts
  std::vector<std::uint64_t> held_;       // the same for the current placement
  std::vector<std::uint64_t> node_held_;  // [node], in the current placement
  std::vector<std::uint64_t> rack_held_;
  std::vector<std::uint32_t> count_;       // replicas by expert
  std::vector<std::uint32_t> unit_count_;  // [expert][unit], only if copies_min > 1
  std::vector<std::uint32_t> units_of_;    // by expert: number of distinct units
  std::vector<double> share_;              // tokens per replica
  std::vector<double> load_;
  std::set<std::pair<double, std::uint32_t>> by_load_;
};

}  // namespace shardwright::placement::internal
