// SPDX-License-Identifier: Apache-2.0
// lib/partial/select/sharding: which rank saves what. Several ranks have the
// same experts and the same non-expert modules. PlanSave divides the work so
// that the largest share is small. saved_model.h describes the bytes to divide
// at each ZeRO stage, bottleneck.h computes the largest share for every K, and
// replica_placement.h selects the nodes that keep copies. All of it is pure.
// Source: docs/pec-planning.md, sections 7, 8.1 and 9.3.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "partial/select/selection.h"
#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Data-parallel ranks that share the work of a checkpoint. DP
/// rank d is expert-parallel rank d mod ep of group d / ep.
struct SaveRanks {
  std::uint32_t dp = 1;                 ///< D_dp, a multiple of the expert map's D_ep
  std::vector<std::uint32_t> excluded;  ///< ranks that save nothing: their node failed; any order

  std::uint32_t groups(std::uint32_t ep) const { return dp / ep; }
};

/// Checks that the ranks fit an expert-parallel degree and that at least one is not excluded.
/// \error kUsage  names both numbers, or the excluded rank that does not exist; kLimit
/// Pure.
Status Validate(const SaveRanks& ranks, std::uint32_t ep);

/// An expert and the data-parallel rank that saves it.
struct ExpertOwner {
  ModuleId module;
  std::uint32_t rank = 0;

  bool operator==(const ExpertOwner&) const = default;
};

/// Divides the selected experts over the ranks that have copies: of the
/// M_r modules of expert-parallel rank r, sorted by (layer, expert), the
/// j-th goes to group floor(j * G / M_r). G does not count excluded ranks.
/// \returns owners in ascending order of modules
/// \error kInfeasible  all ranks of an expert are excluded: names it; as Validate
///        above; kMismatch, kBadInput  a selection that does not fit the map
/// Pure. Source: MoC-System section 4.1; docs/pec-planning.md section 7.1.
Result<std::vector<ExpertOwner>> CutExperts(const ExpertMap& map, const Selection& selection,
                                            const SaveRanks& ranks);

/// A byte range of a module and the rank that saves it.
struct ShardPiece {
  std::uint32_t module = 0;  ///< index into the module sizes that were passed
  std::uint64_t first = 0;   ///< byte range [first, last) of the module
  std::uint64_t last = 0;
  std::uint32_t rank = 0;

  bool operator==(const ShardPiece&) const = default;
};

/// Assignment of modules to ranks.
struct ShardPlan {
  std::vector<ShardPiece> pieces;         ///< by module, then first byte
  std::vector<std::uint64_t> rank_bytes;  ///< [rank], including start bytes
  std::uint64_t bottleneck = 0;           ///< largest of rank_bytes
  /// Lower bound for the bottleneck of these modules, split as requested:
  /// max(ceil(total / ranks), largest start, least start + largest piece).
  std::uint64_t bound = 0;
};

/// Assigns each module to the rank with the least bytes so far, largest module first; ties: lower
/// module index, lower rank. Starting at 0 bytes this is the equal cut (section 7.2), from the
/// expert bytes of a checkpoint the adaptive one (7.4). The former is at most 4/3 of the optimum.
/// \param module_bytes  a module of 0 bytes gets an empty piece
/// \param start  [rank]: bytes that each rank saves in any case
/// \param split_above  modules larger than this are first split into ceil(size
///        / split_above) byte ranges that differ by at most one byte; 0: never
/// \param excluded  ranks that get no modules
/// \error kUsage  no rank is left, or an excluded rank does not exist or has start
///        bytes; kLimit  too many pieces; kBadInput  overflow of byte counts
/// Pure. Source: MoC-System sections 4.2, 4.3; docs/pec-planning.md sections 7.2, 7.4.
Result<ShardPlan> ShardModules(std::span<const std::uint64_t> module_bytes,
                               std::span<const std::uint64_t> start, std::uint64_t split_above,
                               std::span<const std::uint32_t> excluded);

/// Bytes of an expert in a checkpoint.
struct ExpertBytes {
  std::uint64_t cut = 0;  ///< weights, or everything: saved by the expert's owner
  /// Optimizer state that ZeRO has already sharded over the
  /// groups: every rank with a copy of the expert saves its shard.
  std::uint64_t split = 0;
};

/// Options for dividing a checkpoint over ranks.
struct SaveOptions {
  /// Bytes of the non-expert part that ZeRO has already sharded over all
  /// ranks: active ranks save equal parts of them, exact to one byte.
  std::uint64_t nonexpert_split = 0;
  std::uint64_t split_above = 0;  ///< as ShardModules
  bool adaptive = true;           ///< false: the non-expert cut ignores the expert bytes
  /// [rank]: start bytes that replace this checkpoint's expert and sharded bytes
  /// (the plan of phase 0 for the whole run); empty: use this checkpoint's.
  std::vector<std::uint64_t> start;
};

/// Assignment of a checkpoint's bytes to ranks.
struct SavePlan {
  std::vector<ExpertOwner> experts;         ///< in ascending order of modules
  ShardPlan nonexpert;                      ///< its rank_bytes include the start bytes
  std::vector<std::uint64_t> expert_bytes;  ///< [rank]
  std::vector<std::uint64_t> start;         ///< [rank], start bytes of the non-expert cut
  std::vector<std::uint64_t> rank_bytes;    ///< [rank], experts and non-expert part
  std::uint64_t bottleneck = 0;             ///< largest of rank_bytes
  std::uint64_t bound = 0;                  ///< lower bound over all cuts of the non-expert part
  std::uint64_t ideal = 0;                  ///< ceil(all bytes / active ranks)
};

/// Divides one checkpoint: CutExperts, then ShardModules for the non-expert part.
/// \param expert_bytes  [layer][expert], saved if the expert is selected
/// \param kept_bytes  [layer][expert], divided over the copies at
///        every checkpoint, selected or not; empty: no kept components
/// \param nonexpert_bytes  by non-expert module
/// \error as CutExperts and ShardModules
/// Pure. Source: MoC-System section 4; docs/pec-planning.md section 7.
Result<SavePlan> PlanSave(const ExpertMap& map, const Selection& selection,
                          const PerExpert<ExpertBytes>& expert_bytes, const Counts& kept_bytes,
                          std::span<const std::uint64_t> nonexpert_bytes, const SaveRanks& ranks,
                          const SaveOptions& options);

/// A model and its options for saving.
struct SavedModel {
  ExpertMap map;
  PerExpert<ExpertBytes> expert_bytes;
  Counts kept_bytes;  ///< empty: no kept components
  std::vector<std::uint64_t> nonexpert_bytes;
  SaveRanks ranks;
  SaveOptions options;
};

/// Calls PlanSave for a model.
Result<SavePlan> PlanSave(const SavedModel& model, const Selection& selection);

/// Returns the bytes of each rank if copies do not share the work, as a baseline
/// for plans. The lowest rank with an expert saves it, and the lowest of all ranks
/// the non-expert part. Sharded bytes are saved by the ranks that have them.
/// \error as PlanSave
/// Pure. Source: MoC-System section 4 (baseline); docs/pec-planning.md section 7.
Result<std::vector<std::uint64_t>> UnsharedBytes(const SavedModel& model,
                                                 const Selection& selection);

/// Returns true if equal experts burden ranks unevenly in a partial save: K*M mod D_dp != 0.
/// \pre dp > 0
/// Pure. Source: MoC-System eq 9; docs/pec-planning.md section 7.3.
bool IsUneven(std::uint64_t k, std::uint64_t moe_layers, std::uint64_t dp);

/// Returns the number of different start distributions over time with equal
/// experts: D_ep / gcd(K, D_ep). Checkpoint t is in phase t modulo this.
/// \pre ep > 0
/// Pure. Source: docs/pec-planning.md section 7.4.
std::uint32_t PhaseCount(std::uint32_t k, std::uint32_t ep);

}  // namespace shardwright::partial
