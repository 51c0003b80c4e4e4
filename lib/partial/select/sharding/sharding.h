// SPDX-License-Identifier: Apache-2.0
// lib/partial/select/sharding: which rank saves what.
// Several ranks hold the same experts and the same non-expert modules. PlanSave cuts the work so
// that the largest share is small; saved_model.h says what there is to cut at each ZeRO stage, and
// replica_placement.h which other nodes keep copies. All of it is pure. Source:
// docs/pec-planning.md, sections 7 and 9.3.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "partial/select/selection.h"
#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Data-parallel ranks that share the work of a checkpoint. DP rank d is expert-parallel rank
/// d mod ep of group d / ep.
struct SaveRanks {
  std::uint32_t dp = 1;                 ///< D_dp, a multiple of the expert map's D_ep
  std::vector<std::uint32_t> excluded;  ///< ranks that save nothing, their node failed; any order

  std::uint32_t groups(std::uint32_t ep) const { return dp / ep; }
};

/// Proves that the ranks fit an expert-parallel degree and that one of them is left.
/// \error kUsage  both numbers, or the excluded rank that does not exist; kLimit
/// Pure.
Status Validate(const SaveRanks& ranks, std::uint32_t ep);

/// An expert and the data-parallel rank that saves it.
struct ExpertOwner {
  ModuleId module;
  std::uint32_t rank = 0;

  bool operator==(const ExpertOwner&) const = default;
};

/// Cuts the selected experts over the ranks that hold copies: of the M_r modules of expert-parallel
/// rank r, sorted by (layer, expert), the j-th goes to group floor(j * G / M_r). Excluded ranks are
/// left out of G.
/// \returns ascending module
/// \error kInfeasible  an expert all of whose ranks are excluded: names it; as Validate above;
///        kMismatch, kBadInput  a selection that does not fit the map
/// Pure. Source: MoC-System section 4.1; docs/pec-planning.md section 7.1.
Result<std::vector<ExpertOwner>> CutExperts(const ExpertMap& map, const Selection& selection,
                                            const SaveRanks& ranks);

/// A run of bytes of a module and the rank that saves it.
struct ShardPiece {
  std::uint32_t module = 0;  ///< index into the module sizes that were given
  std::uint64_t first = 0;   ///< byte range [first, last) of the module
  std::uint64_t last = 0;
  std::uint32_t rank = 0;

  bool operator==(const ShardPiece&) const = default;
};

/// Modules over ranks.
struct ShardPlan {
  std::vector<ShardPiece> pieces;         ///< by module, then first byte
  std::vector<std::uint64_t> rank_bytes;  ///< [rank], start loads included
  std::uint64_t bottleneck = 0;           ///< largest of rank_bytes
  /// No plan of these modules (split as asked) has a smaller bottleneck: max(ceil(total / ranks),
  /// largest start, least start + largest piece).
  std::uint64_t bound = 0;
};

/// Gives each module to the rank with the least bytes so far, largest module first; ties: lower
/// module index, lower rank. From empty ranks this is the equal cut (section 7.2), from the expert
/// bytes of a checkpoint the adaptive one (section 7.4); at most 4/3 of the best from empty ranks.
/// \param module_bytes  a module of 0 bytes gets a piece of no bytes
/// \param start  [rank]: bytes that each rank saves anyway
/// \param split_above  modules larger than this are first cut into ceil(size / split_above) byte
///        ranges that differ by at most one byte; 0: never
/// \param excluded  ranks that get nothing
/// \error kUsage  no rank is left, an excluded rank that does not exist or has a start; kLimit  too
///        many pieces; kBadInput  bytes that overflow
/// Pure. Source: MoC-System sections 4.2, 4.3; docs/pec-planning.md sections 7.2, 7.4.
Result<ShardPlan> ShardModules(std::span<const std::uint64_t> module_bytes,
                               std::span<const std::uint64_t> start, std::uint64_t split_above,
                               std::span<const std::uint32_t> excluded);

/// Bytes of an expert that a checkpoint saves.
struct ExpertBytes {
  std::uint64_t cut = 0;  ///< weights, or all of it: saved by the expert's owner
  /// Optimizer state that a ZeRO run has split over the groups already: every rank that holds a
  /// copy of the expert saves its part.
  std::uint64_t split = 0;
};

/// How a checkpoint is shared.
struct SaveOptions {
  /// Bytes of the non-expert part that a ZeRO run has split over all ranks already: live ranks save
  /// equal parts of them, to the byte.
  std::uint64_t nonexpert_split = 0;
  std::uint64_t split_above = 0;  ///< as ShardModules
  bool adaptive = true;           ///< false: the non-expert part is cut without a look at experts
  /// Bytes of each rank to start from in place of this checkpoint's expert and split bytes (the
  /// plan of phase 0 for the whole run); empty: this checkpoint's.
  std::vector<std::uint64_t> start;
};

/// Who saves what in a checkpoint.
struct SavePlan {
  std::vector<ExpertOwner> experts;         ///< ascending module
  ShardPlan nonexpert;                      ///< its rank_bytes start from what the cut looked at
  std::vector<std::uint64_t> expert_bytes;  ///< [rank]
  std::vector<std::uint64_t> start;         ///< [rank], what the cut of the rest started from
  std::vector<std::uint64_t> rank_bytes;    ///< [rank], experts and non-expert part
  std::uint64_t bottleneck = 0;             ///< largest of rank_bytes
  std::uint64_t bound = 0;                  ///< no cut of the non-expert part does better
  std::uint64_t ideal = 0;                  ///< ceil(bytes of all / live ranks)
};

/// The whole cut of one checkpoint: CutExperts, then ShardModules for the non-expert part.
/// \param expert_bytes  [layer][expert], what is saved of it when it is selected
/// \param kept_bytes  [layer][expert], split over the copies at every checkpoint whether selected
///        or not; empty: nothing is kept
/// \param nonexpert_bytes  by non-expert module
/// \error as CutExperts and ShardModules
/// Pure. Source: MoC-System section 4; docs/pec-planning.md section 7.
Result<SavePlan> PlanSave(const ExpertMap& map, const Selection& selection,
                          const PerExpert<ExpertBytes>& expert_bytes, const Counts& kept_bytes,
                          std::span<const std::uint64_t> nonexpert_bytes, const SaveRanks& ranks,
                          const SaveOptions& options);

/// The model and how it is saved.
struct SavedModel {
  ExpertMap map;
  PerExpert<ExpertBytes> expert_bytes;
  Counts kept_bytes;  ///< empty: nothing is kept
  std::vector<std::uint64_t> nonexpert_bytes;
  SaveRanks ranks;
  SaveOptions options;
};

/// PlanSave of a model.
Result<SavePlan> PlanSave(const SavedModel& model, const Selection& selection);

/// Bytes of each rank when copies do not share the work: of those that hold an expert the lowest
/// rank saves it, and the lowest of all ranks the non-expert part; split bytes are saved where they
/// are. What a plan is compared with.
/// \error as PlanSave
/// Pure. Source: MoC-System section 4 (baseline); docs/pec-planning.md section 7.
Result<std::vector<std::uint64_t>> UnsharedBytes(const SavedModel& model,
                                                 const Selection& selection);

/// Whether a partial save of equal experts gives some ranks more than others: K*M mod D_dp != 0.
/// \pre dp > 0
/// Pure. Source: MoC-System eq 9; docs/pec-planning.md section 7.3.
bool IsUneven(std::uint64_t k, std::uint64_t moe_layers, std::uint64_t dp);

/// Different start loads over time with equal experts: D_ep / gcd(K, D_ep). Checkpoint t is in
/// phase t modulo this.
/// \pre ep > 0
/// Pure. Source: docs/pec-planning.md section 7.4.
std::uint32_t PhaseCount(std::uint32_t k, std::uint32_t ep);

}  // namespace shardwright::partial
