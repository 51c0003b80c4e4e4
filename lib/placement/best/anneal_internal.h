// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "placement/best/replicas_internal.h"
#include "placement/best/search_internal.h"
#include "placement/core/random.h"

namespace shardwright::placement::internal {

/// Limits of a search; the first one that is reached ends it.
struct AnnealBudget {
  std::uint64_t steps = 0;          ///< proposed changes
  std::function<bool()> expired{};  ///< true once the time for this layer is used up; may be empty

  /// Returns true if no time is left.
  bool late() const { return expired && expired(); }
};

/// Searches the placement of one layer by simulated annealing, and changes replica counts and
/// packing together. A step swaps two replicas of different devices, or replaces a replica by
/// one of another expert. No device gets an expert twice and no expert loses its last replica.
/// With copies_min > 1 every expert keeps the failure units that it needs. Stores the best
/// slots, so the search can stop at any step.
class LayerAnneal {
 public:
  static constexpr double kNear = 1.001;  ///< a peak this close to the bound is good enough

  /// \param windows  token shares of every window that counts
  /// \param bound  lower bound of the largest load over all placements
  LayerAnneal(const SearchGround& ground, const WindowShares& windows, double bound,
              std::uint64_t seed);

  /// Limits the moves of all placements from now on.
  /// \param held  [device][expert]: 1 for a replica in the current placement, which costs no move
  /// \pre the best slots so far need at most `most` moves
  void LimitMoves(std::span<const std::uint8_t> held, std::uint64_t most);

  /// Starts from slots by live device, in the order of LayerSearch::slots.
  /// \pre no device has an expert twice; every expert has a replica and its copies_min units
  void Start(std::span<const std::int32_t> slots);

  /// Searches until the bound is reached, the budget is used up, or most of the steps so far
  /// found nothing better. Returns the reason.
  SearchEnd Run(const AnnealBudget& budget);

  /// Returns the best slots found; peak() is their largest load.
  const std::vector<std::int32_t>& slots() const { return best_slots_; }
  double peak() const { return best_; }
  /// Returns the number of steps that Run took.
  std::uint64_t steps() const { return steps_; }

 private:
  /// Device loads that a step changes, in separate arrays for vectorized loops.
  struct Changes {
    std::size_t count = 0;
    std::vector<std::uint32_t> row;  ///< index into load_; each occurs once
    std::vector<double> from;
    std::vector<double> to;
    std::vector<double> worse;  ///< additional cost
  };

  bool Near() const;
  void Restart(std::span<const std::int32_t> slots);
  void Round(std::uint64_t steps, double focus, double heat, const AnnealBudget& budget);
  void Step(double temperature);
  void TrySwap(std::uint32_t a, double temperature);
  void TryReplace(std::uint32_t a, double temperature);
  bool Accept(double worse, double temperature);
  void Commit();
  void NoteBest();
  std::uint32_t Overloaded();
  std::uint32_t Below(std::uint64_t n) { return static_cast<std::uint32_t>(random_.Below(n)); }
  double& Load(std::uint32_t w, std::uint32_t d) { return load_[w * ground_.size() + d]; }
  /// Returns the moves that a replica costs: 0 if the device has it in the current placement.
  std::int64_t MoveCost(std::uint32_t e, std::uint32_t d) const {
    return held_.empty() || held_[std::size_t{d} * experts_ + e] != 0 ? 0 : 1;
  }
  bool Affords(std::int64_t more) const { return more <= 0 || moves_ + more <= most_moves_; }
  /// Adds to the proposed change. \param more  tokens to add to a device in a window
  void Propose(std::uint32_t w, std::uint32_t d, double more);
  double WorseOfChanges();
  bool MayLeave(std::uint32_t e, std::uint32_t from, std::uint32_t to) const;
  void Move(std::uint32_t e, std::uint32_t from, std::uint32_t to);
  void Reload();

  const SearchGround& ground_;
  const WindowShares& windows_;
  std::size_t experts_;
  double bound_;
  double mean_;
  Random random_;
  std::vector<std::size_t> first_;  // first slot of each device
  std::vector<std::int32_t> slots_;
  Replicas replicas_;
  std::vector<std::uint32_t> unit_count_;  // [expert][unit], only if copies_min > 1
  std::span<const std::uint8_t> held_;     // [device][expert], only if moves are limited
  std::int64_t moves_ = 0;
  std::int64_t most_moves_ = 0;
  std::vector<double> load_;  // [window][device]
  Changes changes_;           // of the current step
  std::uint64_t steps_ = 0;
  std::uint32_t over_ = 0;  // loads at or above the best peak
  double aim_ = 0;          // loads above it have a cost
  double focus_ = 0;
  double best_ = 0;
  std::vector<std::int32_t> best_slots_;
};

}  // namespace shardwright::placement::internal
