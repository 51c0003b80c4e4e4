// SPDX-License-Identifier: Apache-2.0
// lib/partial/select: which experts a checkpoint saves. A partial checkpoint contains
// all non-expert modules and K of the N experts of every layer. There are two levels,
// snapshots in memory and checkpoints in storage. A LevelState records the version of
// every expert on a level and the tokens since then. A Policy selects experts from that.
// sizes.h computes checkpoint sizes, budget.h how many experts fit, gradient_plan.h when
// gradients suffice, lost_tokens.h the cost of a fault, and dynamic_k.h how K grows with
// it. All functions are pure. Source: docs/pec-planning.md.

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

/// Rule that selects the experts of a checkpoint.
enum class Policy : std::uint8_t {
  kSequential,    ///< a ring over the expert-parallel ranks (docs/pec-planning.md section 4)
  kLoadAware,     ///< most unsaved tokens first, limited age (section 5)
  kBudget,        ///< MoEtion's Algorithm 1 with largest remainders (section 9.2; budget.h)
  kBudgetGlobal,  ///< most unsaved tokens over all layers (section 9.2; budget.h)
  kFull,          ///< every expert
  /// For logged gradients: state or gradients per expert (docs/lossless.md; catch_up.h).
  kReplay,
};

/// Returns "sequential", "load-aware", "budget", "budget-global", "full" or "gradient-log".
std::string_view Name(Policy policy);

/// Maps every expert to its expert-parallel rank.
struct ExpertMap {
  std::uint32_t ep = 1;           ///< D_ep, expert-parallel ranks
  PerExpert<std::uint32_t> rank;  ///< [layer][expert], below ep
  PerExpert<std::uint32_t> ring;  ///< [layer][ring position]: expert at that position

  LayerExperts experts() const { return ShapeOf(rank); }
};

/// Maps experts to ranks in equal blocks: expert e to rank e
/// / (N / ep). N must be a multiple of `ep` in every layer.
/// \error kUsage  names the layer; kBadInput, kLimit  as ValidateExperts
/// Pure. Source: docs/pec-planning.md section 0.
Result<ExpertMap> EvenExpertMap(const LayerExperts& experts, std::uint32_t ep);

/// Makes the ring for any map of experts to ranks: in turn the next unlisted expert
/// of rank 0, 1, ..., skipping ranks without one. For an even map the expert at
/// position p of the ring is (p mod ep) * per + (p mod N) / ep, per = N / ep.
/// \error kBadInput  a rank not below `ep` (names layer and expert); kLimit
/// Pure. Source: docs/pec-planning.md section 4.
Result<ExpertMap> MakeExpertMap(PerExpert<std::uint32_t> rank, std::uint32_t ep);

/// State of every expert on a level (snapshots in memory, or persisted
/// checkpoints). Plain data: a store keeps it in each manifest and returns it.
struct LevelState {
  std::uint64_t checkpoints = 0;      ///< completed on this level
  std::vector<std::uint64_t> cursor;  ///< [layer]: next ring position, not reduced by N
  Counts tokens;    ///< [layer][expert]: routed so far, without those of lost work
  Counts covered;   ///< [layer][expert]: part of `tokens` that the level's version includes
  Counts version;   ///< [layer][expert]: iteration of the level's version; 0: none
  Counts saved_at;  ///< [layer][expert]: value of `checkpoints` after its last save; 0: never

  /// u[m][e]: tokens since the level's version.
  std::uint64_t unsaved(std::size_t layer, std::size_t expert) const {
    return tokens[layer][expert] - covered[layer][expert];
  }
  /// Number of checkpoints completed since the expert's last save.
  std::uint64_t age(std::size_t layer, std::size_t expert) const {
    return checkpoints - saved_at[layer][expert];
  }
};

/// Returns the state before the first checkpoint. The cursor of layer m starts at k*m.
/// Pure. Source: docs/pec-planning.md section 4.
LevelState MakeLevelState(const LayerExperts& experts, std::uint32_t k);

/// Checks that a state that was read from a file fits the model and is consistent.
/// \error kMismatch  another shape (names both); kBadInput  more tokens covered than counted
/// Pure.
Status Validate(const LevelState& state, const LayerExperts& experts);

/// Adds the tokens of an iteration (the total of all ranks). Changes nothing on an error.
/// \error kMismatch  counters of another shape: names layer and both numbers; kBadInput  overflow
/// Pure.
Status CountTokens(LevelState* state, const Counts& tokens);

/// Returns all unsaved tokens u, [layer][expert].
Counts Unsaved(const LevelState& state);

/// Selects min(k, N) experts of every layer in ring order, starting at the cursor.
/// \pre the state fits the map; k > 0
/// Pure. Source: docs/pec-planning.md section 4.
Selection SelectSequential(const ExpertMap& map, const LevelState& state, std::uint32_t k);

/// Selects min(k, N) experts of every layer: first those with an age above
/// `max_age` (absent: 4 * ceil(N/k)), oldest save first, then those with most
/// unsaved tokens. Ties: older version, then lower id. An expert is saved at least
/// once in max_age + ceil(N/k) checkpoints, if max_age is at least ceil(N/k).
/// \pre k > 0
/// Pure. Source: docs/pec-planning.md section 5.
Selection SelectLoadAware(const LevelState& state, std::uint32_t k,
                          std::optional<std::uint64_t> max_age = std::nullopt);

/// Selects every expert of every layer, ascending.
Selection SelectAll(const LayerExperts& experts);

/// Selects min(k_persist, size) experts of every layer's snapshot set to persist:
/// oldest persisted version first. Ties: the expert-parallel rank with fewest experts
/// persisted so far in this checkpoint, then the order of the snapshot set. Layers in
/// ascending order. With k_snapshot | N, k_persist | k_snapshot and sequential
/// snapshots, every expert is persisted once in N / k_persist checkpoints.
/// \pre the snapshot set and the state fit the map
/// Pure. Source: docs/pec-planning.md section 6.1.
Selection SelectPersist(const ExpertMap& map, const LevelState& persist, const Selection& snapshot,
                        std::uint32_t k_persist);

/// Policy and limits of a selection.
struct SelectionOptions {
  Policy policy = Policy::kSequential;
  std::uint32_t k_snapshot = 1;          ///< K of the snapshot level; larger than N means N
  std::uint32_t k_persist = 1;           ///< K of the persist level
  std::optional<std::uint64_t> max_age;  ///< load-aware; absent: 4 * ceil(N/K)
  std::uint64_t budget = 0;              ///< budget policies: S_total, experts of all layers
  ReplayPoint replay = {};               ///< kReplay, which uses one K for both levels
};

/// Experts of one checkpoint on both levels.
struct TwoLevelSelection {
  Selection snapshot;
  Selection persist;  ///< a subset of `snapshot`
};

/// Selects the experts of one checkpoint on both levels. Budget policies select
/// S_total experts by the tokens unsaved in storage and persist all of them.
/// `full` persists everything. kReplay persists the full states of SelectReplay.
/// \error kUsage  K is 0, or k_persist > k_snapshot; kMismatch,
///        kBadInput  a state that does not fit the map
/// Pure. Source: docs/pec-planning.md sections 4, 5, 6.1, 9.2.
Result<TwoLevelSelection> SelectTwoLevels(const ExpertMap& map, const LevelState& snapshot,
                                          const LevelState& persist,
                                          const SelectionOptions& options);

/// A save in progress: input of CompleteSave. Discarding it cancels
/// the save, and cursors, counters and versions keep their values.
struct PendingSave {
  std::uint64_t iteration = 0;  ///< iteration of the saved state
  Selection selected;
  Counts covered;  ///< [layer][i]: tokens of selected[layer][i] up to `iteration`
};

/// Records the tokens that a save of `selected` will cover. Call it when
/// the state of `iteration` is frozen, before later iterations are counted.
/// \pre the selection fits the state
/// Pure. Source: docs/pec-planning.md section 5 (tokens that arrive during the save stay counted).
PendingSave BeginSave(const LevelState& state, Selection selected, std::uint64_t iteration);

/// Records a complete save: sets versions and ages of its experts, subtracts the tokens it covers
/// from their counters, and advances each cursor by the number of experts saved in its layer.
/// \error kMismatch, kBadInput  a save that does not fit the state; kBadInput  a
///        save older than the level's version of an expert: names the expert
/// Pure. Source: docs/pec-planning.md sections 4, 5.
Status CompleteSave(LevelState* state, const PendingSave& save);

/// Removes the tokens lost by a recovery from the counters, because they cannot be saved.
/// \param lost  [layer][expert], from LossLedger::Charge
/// \error kMismatch  another shape; kBadInput  more tokens lost than unsaved of an expert
/// Pure. Source: docs/pec-planning.md section 2.1.
Status ForgetLost(LevelState* state, const Counts& lost);

}  // namespace shardwright::partial
