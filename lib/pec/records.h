#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "pec/budget.h"
#include "pec/selection.h"
#include "pec/sharding.h"
#include "pec/types.h"

namespace shardwright::pec {

// Plan output that can be verified without this program. Each text is one JSON object and ends with
// a line feed; same input, same bytes. Layers are named by their ordinals.

/// Selections of consecutive checkpoints, kind "selection".
/// \param k_persist  present: the persist sets are listed too
/// \error kUsage  layers with different numbers of experts: the record has one N
/// Pure. Source: docs/pec-planning.md section 11.
Result<std::string> SelectionRecord(const ExpertMap& map, std::uint32_t k_snapshot,
                                    std::optional<std::uint32_t> k_persist,
                                    std::span<const TwoLevelSelection> checkpoints);

/// A selection under a budget, kind "budget".
/// Pure. Source: docs/pec-planning.md section 11.
std::string BudgetRecord(const Counts& popularity, const BudgetSelection& budget);

/// A run with faults, for the record of lost tokens.
struct LostTokensRun {
  struct Checkpoint {
    std::uint64_t iteration = 0;
    Selection memory;
    Selection storage;
  };
  struct Fault {
    std::uint64_t iteration = 0;
    Selection lost;                    ///< experts whose memory copies are gone
    std::uint64_t resume = 0;          ///< X
    std::vector<std::uint64_t> layer;  ///< L(m, j): [layer]
  };
  std::vector<Checkpoint> checkpoints;  ///< in the order of the run
  std::vector<Fault> faults;            ///< in the order of the run
  double plt = 0;
};

/// The run, kind "lost-tokens". `tokens[i]` are the tokens of iteration i: tokens[0] is the state
/// before the first iteration, all 0.
/// \param tokens  [iteration - 1][layer][expert]
/// \error kMismatch  layers or experts that differ between iterations or from the run
/// Pure. Source: docs/pec-planning.md section 11.
Result<std::string> LostTokensRecord(std::span<const Counts> tokens, const LostTokensRun& run);

/// A cut of modules over ranks, kind "sharding". A module in several pieces is listed by its
/// pieces, "name[first:last]". \param names  by module, distinct \param start  [rank] \error
/// kMismatch  a piece of a module without a name Pure. Source: docs/pec-planning.md section 11.
Result<std::string> ShardingRecord(std::span<const std::string> names,
                                   std::span<const std::uint64_t> start, const ShardPlan& plan);

}  // namespace shardwright::pec
