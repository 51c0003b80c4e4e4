// SPDX-License-Identifier: Apache-2.0
// lib/placement/best: the strategy best.
// A LayerPlan plans one layer: a descent from EPLB's plan (search_internal.h), a lower bound from
// dual prices (bound_internal.h), and simulated annealing (anneal_internal.h) until the peak is
// near the bound or the effort is used up. With an old plan it returns several choices, from few
// moves to the best balance. moves_internal.h chooses among those of all layers.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/best/anneal_internal.h"
#include "placement/best/search_internal.h"
#include "placement/core/types.h"
#include "placement/strategy/units.h"

namespace shardwright::placement::internal {

/// Plans one layer for the strategy best: start, bound and result.
class LayerPlan {
 public:
  /// All arguments must outlive the object.
  /// \param pinned_start  as PinnedStart returns it; nullptr: no pins
  /// \param current  nullptr: the devices are empty
  LayerPlan(const TokenCounts& loads, std::uint32_t layer, const Cluster& cluster,
            const Units& units, const SearchGround& ground,
            const std::vector<std::int32_t>* pinned_start, const Placement* current,
            const Options& options);

  /// Plans the layer and notes the reason for the end of the search. Without a current placement
  /// it returns one choice, as even as possible. With one, the choices ascend in moves, and
  /// each is more even than those before it.
  /// \param even  receives the imbalance found without a limit of moves; depends on counts only
  /// Local.
  std::vector<LayerChoice> Run(LayerNotes* notes, double* even) const;

  /// Converts slots of the live devices to a placement of this layer, and back.
  Placement PlacementOf(std::span<const std::int32_t> slots) const;
  std::vector<std::int32_t> SlotsOf(const Placement& placement) const;

 private:
  std::span<const std::uint64_t> tokens() const { return one_.layer(0); }
  /// Returns the ratio of a largest load to the mean load.
  double Imbalance(double peak) const;
  LayerChoice ChoiceOf(std::vector<std::int32_t> slots) const;

  std::vector<std::int32_t> BetterOfOthers(const std::vector<std::int32_t>& slots,
                                           double bound) const;
  std::vector<std::int32_t> MostEven(const Placement& eplb, LayerNotes* notes) const;
  std::vector<std::int32_t> Annealed(const std::vector<std::int32_t>& start, double bound,
                                     LayerNotes* notes) const;
  std::vector<LayerChoice> Choices(const std::vector<std::int32_t>& even) const;
  void AddDescents(double goal, std::vector<LayerChoice>* choices) const;
  void AddFewMoves(double goal, std::vector<LayerChoice>* choices) const;
  void AddLimited(double goal, std::vector<LayerChoice>* choices) const;
  LayerChoice Limited(double goal, std::uint64_t limit, double share,
                      std::span<const LayerChoice> choices) const;
  void Bisect(double goal, std::vector<LayerChoice>* choices) const;

  /// Returns the search steps of an effort, as --effort N counts it.
  std::uint64_t StepsOf(double effort) const;
  /// Returns the limits of a search that gets a share of the effort.
  AnnealBudget Budget(double share) const;
  Placement Eplb() const;
  bool StartFromCurrent(LayerSearch* search) const;
  bool StartFresh(const Placement& eplb, LayerSearch* search) const;
  double Bound() const;

  TokenCounts one_;
  std::uint32_t layer_;
  const Cluster& cluster_;
  const Units& units_;
  const SearchGround& ground_;
  const std::vector<std::int32_t>* pinned_start_;
  const Placement* current_;
  const Options& options_;
  WindowShares shares_;
  std::vector<std::uint8_t> held_;  // [live device][expert]: in the current placement
  std::uint64_t steps_;             // steps of a descent
  const StopCheck& stop_;
};

/// Keeps the choices that no other choice beats in moves and balance, in ascending moves.
/// Local.
void KeepBestChoices(std::vector<LayerChoice>* choices);

}  // namespace shardwright::placement::internal
