// SPDX-License-Identifier: Apache-2.0
// lib/partial/select: which experts a checkpoint saves.
// A partial checkpoint has all non-expert modules and K of the N experts of every layer. There are
// two levels, snapshots in memory and checkpoints in storage; a LevelState remembers which version
// of every expert a level holds, and how many tokens came since. A Policy chooses from that.
// sizes.h says how large a checkpoint is, budget.h how many experts fit, gradient_plan.h where
// gradients are enough, lost_tokens.h what a fault costs, dynamic_k.h how K grows with that. All of
// it is pure. Source: docs/pec-planning.md.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "partial/select/catch_up.h"
#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// How the experts of a checkpoint are chosen.
enum class Policy : std::uint8_t {
  kSequential,    ///< a ring over the expert-parallel ranks (docs/pec-planning.md section 4)
  kLoadAware,     ///< most unsaved tokens first, nobody starves (section 5)
  kBudget,        ///< MoEtion's Algorithm 1 with largest remainders (section 9.2; budget.h)
  kBudgetGlobal,  ///< most unsaved tokens over all layers (section 9.2; budget.h)
  kFull,          ///< every expert
  /// Of a run that logs gradients: state or gradients of each expert (docs/lossless.md; replay.h).
  kReplay,
};

/// "sequential", "load-aware", "budget", "budget-global", "full", "gradient-log".
std::string_view Name(Policy policy);

/// Which expert-parallel rank holds which expert.
struct ExpertMap {
  std::uint32_t ep = 1;           ///< D_ep, expert-parallel ranks
  PerExpert<std::uint32_t> rank;  ///< [layer][expert], below ep
  PerExpert<std::uint32_t> ring;  ///< [layer][ring position]: the expert there

  LayerExperts experts() const { return ShapeOf(rank); }
};

/// Experts in equal runs: expert e on rank e / (N / ep). N must be a multiple of `ep` in every
/// layer.
/// \error kUsage  names the layer; kBadInput, kLimit  as ValidateExperts
/// Pure. Source: docs/pec-planning.md section 0.
Result<ExpertMap> EvenExpertMap(const LayerExperts& experts, std::uint32_t ep);

/// Any map of experts to ranks, and its ring: the next expert of rank 0, 1, ... not yet listed,
/// ranks without one skipped. For an even map position p of the ring holds expert
/// (p mod ep) * per + (p mod N) / ep, per = N / ep.
/// \error kBadInput  a rank that is not below `ep`: names layer and expert; kLimit
/// Pure. Source: docs/pec-planning.md section 4.
Result<ExpertMap> MakeExpertMap(PerExpert<std::uint32_t> rank, std::uint32_t ep);

/// What a level (snapshots in memory, or persisted checkpoints) knows of every expert. Plain data:
/// a store keeps it beside each checkpoint and gives it back.
struct LevelState {
  std::uint64_t checkpoints = 0;      ///< completed on this level
  std::vector<std::uint64_t> cursor;  ///< [layer]: next ring position, not reduced by N
  Counts tokens;    ///< [layer][expert]: routed to it so far, those of lost work excluded
  Counts covered;   ///< [layer][expert]: of `tokens`, those in the version that the level holds
  Counts version;   ///< [layer][expert]: iteration of the version that the level holds; 0: none
  Counts saved_at;  ///< [layer][expert]: value of `checkpoints` after its last save; 0: never

  /// u[m][e]: tokens since the version held.
  std::uint64_t unsaved(std::size_t layer, std::size_t expert) const {
    return tokens[layer][expert] - covered[layer][expert];
  }
  /// Checkpoints that were completed since its last save.
  std::uint64_t age(std::size_t layer, std::size_t expert) const {
    return checkpoints - saved_at[layer][expert];
  }
};

/// The state before the first checkpoint: the cursor of layer m stands at k*m.
/// Pure. Source: docs/pec-planning.md section 4.
LevelState MakeLevelState(const LayerExperts& experts, std::uint32_t k);

/// Proves that a state that was read back fits the model and contradicts itself nowhere.
/// \error kMismatch  another shape, both sides named; kBadInput  more tokens covered than counted
/// Pure.
Status Validate(const LevelState& state, const LayerExperts& experts);

/// Adds the tokens of an iteration (summed over all ranks). Nothing changes on an error.
/// \error kMismatch  counters of another shape: layer and both numbers; kBadInput  overflow
/// Pure.
Status CountTokens(LevelState* state, const Counts& tokens);

/// All unsaved tokens: u, [layer][expert].
Counts Unsaved(const LevelState& state);

/// min(k, N) experts of every layer, from its cursor on. Ring order.
/// \pre the state fits the map; k > 0
/// Pure. Source: docs/pec-planning.md section 4.
Selection SelectSequential(const ExpertMap& map, const LevelState& state, std::uint32_t k);

/// min(k, N) experts of every layer: first those whose age exceeds `max_age` (absent:
/// 4 * ceil(N/k)), oldest save first; then those with most unsaved tokens. Ties: older version,
/// then lower id. An expert is saved at least once in max_age + ceil(N/k) checkpoints, if max_age
/// is at least ceil(N/k).
/// \pre k > 0
/// Pure. Source: docs/pec-planning.md section 5.
Selection SelectLoadAware(const LevelState& state, std::uint32_t k,
                          std::optional<std::uint64_t> max_age = std::nullopt);

/// Every expert of every layer, ascending.
Selection SelectAll(const LayerExperts& experts);

/// Of every layer's snapshot set the min(k_persist, size) experts that are to be persisted: oldest
/// persisted version first; ties: the expert-parallel rank with fewest experts persisted so far in
/// this checkpoint, then the order of the snapshot set. Layers in ascending order. With k_snapshot
/// | N and k_persist | k_snapshot and sequential snapshots every expert is persisted once in
/// N / k_persist checkpoints.
/// \pre the snapshot set and the state fit the map
/// Pure. Source: docs/pec-planning.md section 6.1.
Selection SelectPersist(const ExpertMap& map, const LevelState& persist, const Selection& snapshot,
                        std::uint32_t k_persist);

/// What is chosen from.
struct SelectionOptions {
  Policy policy = Policy::kSequential;
  std::uint32_t k_snapshot = 1;          ///< K of the snapshot level; larger than N means N
  std::uint32_t k_persist = 1;           ///< K of the persist level
  std::optional<std::uint64_t> max_age;  ///< load-aware; absent: 4 * ceil(N/K)
  std::uint64_t budget = 0;              ///< budget policies: S_total, experts of all layers
  ReplayPoint replay = {};               ///< kReplay, which has one K for both levels
};

/// The experts of one checkpoint on both levels.
struct TwoLevelSelection {
  Selection snapshot;
  Selection persist;  ///< a subset of `snapshot`
};

/// One checkpoint's selection on both levels. Budget policies take S_total experts from the tokens
/// unsaved in storage and persist all of them; `full` persists everything; kReplay what
/// SelectReplay takes in full.
/// \error kUsage  K is 0, or k_persist > k_snapshot; kMismatch, kBadInput  a state that does not
///        fit the map
/// Pure. Source: docs/pec-planning.md sections 4, 5, 6.1, 9.2.
Result<TwoLevelSelection> SelectTwoLevels(const ExpertMap& map, const LevelState& snapshot,
                                          const LevelState& persist,
                                          const SelectionOptions& options);

/// A save that has begun: what CompleteSave needs when it has ended. Dropping it abandons the save:
/// cursors, counters and versions stay as they were.
struct PendingSave {
  std::uint64_t iteration = 0;  ///< of the saved state
  Selection selected;
  Counts covered;  ///< [layer][i]: tokens of selected[layer][i] up to `iteration`
};

/// Notes what a save of `selected` will cover. To be called when the state of `iteration` is
/// frozen, before later iterations are counted.
/// \pre the selection fits the state
/// Pure. Source: docs/pec-planning.md section 5 (tokens that arrive during the save stay counted).
PendingSave BeginSave(const LevelState& state, Selection selected, std::uint64_t iteration);

/// Enters a complete save: versions and ages of its experts are new, their counters fall by what
/// the save covers, and each cursor moves on by the number of experts that its layer saved.
/// \error kMismatch, kBadInput  a save that does not fit the state; kBadInput  one that is older
///        than what the level already holds of an expert: names it
/// Pure. Source: docs/pec-planning.md sections 4, 5.
Status CompleteSave(LevelState* state, const PendingSave& save);

/// After a recovery: takes the lost tokens out of the counters, for what is lost need not be saved.
/// \param lost  [layer][expert], from LossLedger::Charge
/// \error kMismatch  another shape; kBadInput  more tokens lost of an expert than were unsaved
/// Pure. Source: docs/pec-planning.md section 2.1.
Status ForgetLost(LevelState* state, const Counts& lost);

}  // namespace shardwright::partial
