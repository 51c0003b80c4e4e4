// SPDX-License-Identifier: Apache-2.0
// lib/placement/best: the strategy best.
// A LayerPlan plans one layer: a descent from EPLB's plan (search_internal.h), a lower bound from
// dual prices (bound_internal.h), and simulated annealing (anneal_internal.h) until the bound is
// near or the effort is used up. With an old plan it offers several choices, from few moves to the
// best balance; moves_internal.h chooses among those of all layers.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/best/anneal_internal.h"
#include "placement/best/search_internal.h"
#include "placement/core/types.h"
#include "placement/strategy/units.h"

namespace shardwright::placement::internal {

/// One layer of the strategy best: what it starts from, what it must beat, and what comes out.
class LayerPlan {
 public:
  /// All arguments must outlive the object. \param current  nullptr: nothing is on the devices
  LayerPlan(const TokenCounts& loads, std::uint32_t layer, const Cluster& cluster,
            const Units& units, const SearchGround& ground, const Placement* current,
            const Options& options);

  /// Plans the layer and notes what ended the search. Without a current placement the result is one
  /// choice, as even as possible. With one, the choices ascend in moves and each is more even than
  /// those before it.
  /// \param even  imbalance that was found without regard to moves; the same for the same loads
  /// Local.
  std::vector<LayerChoice> Run(LayerNotes* notes, double* even) const;

  /// Returns slots of the live devices as a placement of this layer, and the inverse.
  Placement PlacementOf(std::span<const std::int32_t> slots) const;
  std::vector<std::int32_t> SlotsOf(const Placement& placement) const;

 private:
  std::span<const std::uint64_t> tokens() const { return one_.layer(0); }
  /// Returns the largest load over its mean.
  double Imbalance(double peak) const;
  LayerChoice ChoiceOf(std::vector<std::int32_t> slots) const;

  std::vector<std::int32_t> BetterOfOthers(const std::vector<std::int32_t>& slots,
                                           double bound) const;
  std::vector<std::int32_t> MostEven(const Placement& eplb, LayerNotes* notes) const;
  std::vector<std::int32_t> Annealed(const std::vector<std::int32_t>& start, double bound,
                                     LayerNotes* notes) const;
  std::vector<LayerChoice> Choices(const std::vector<std::int32_t>& even) const;
  void AddDescents(double goal, std::vector<LayerChoice>* choices) const;
  void AddLimited(double goal, std::vector<LayerChoice>* choices) const;

  AnnealBudget Budget(double share) const;
  Placement Eplb() const;
  bool StartFresh(const Placement& eplb, LayerSearch* search) const;
  double Bound() const;

  TokenCounts one_;
  std::uint32_t layer_;
  const Cluster& cluster_;
  const Units& units_;
  const SearchGround& ground_;
  const Placement* current_;
  const Options& options_;
  WindowShares shares_;
  std::vector<std::uint8_t> held_;  // [live device][expert]: there now
  std::uint64_t steps_;             // of a descent
  const StopCheck& stop_;
};

/// Keeps the choices that no other one beats in moves and balance, by ascending moves.
/// Local.
void KeepBestChoices(std::vector<LayerChoice>* choices);

}  // namespace shardwright::placement::internal
