// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "partial/select/sizes.h"
#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Number of experts that fit into a byte budget.
struct ExpertBudget {
  std::uint64_t experts = 0;      ///< S_total
  std::uint64_t stall_bytes = 0;  ///< bytes of the non-expert part above the budget
  std::uint64_t expert_bytes = 0;
  std::uint64_t nonexpert_bytes = 0;
};

/// Returns the budget B = bandwidth * iteration_s, rounded to whole bytes: what a link of
/// `bandwidth` bytes per second moves in an iteration. B_local with the bandwidth from device to
/// host memory, B_remote with that of the network.
/// \error kUsage  a time below 0, or a budget that does not fit in 64 bits
/// Pure. Source: MoEtion section 4.2; docs/pec-planning.md section 9.1.
Result<std::uint64_t> BytesPerIteration(std::uint64_t bandwidth, double iteration_s);

/// S_total = floor((budget - nonexpert) / expert), 0 if the non-expert part does not fit.
/// \param nonexpert_bytes  non-expert bytes that a rank must move; 0 gives the printed formula
/// \error kUsage  expert_bytes is 0
/// Pure. Source: docs/pec-planning.md section 9.1.
Result<ExpertBudget> BudgetOf(std::uint64_t budget_bytes, std::uint64_t expert_bytes,
                              std::uint64_t nonexpert_bytes);

/// Computes the budget for a model. If expert sizes differ, the largest
/// counts. The kept components of all experts count as non-expert part.
/// \error kUsage  no component of an expert is selected; kBadInput  overflow
/// Pure. Source: docs/pec-planning.md section 9.1.
Result<ExpertBudget> BudgetOf(std::uint64_t budget_bytes, const ModelBytes& model,
                              const Keep& keep);

/// Divides `total` over the layers in proportion to their tokens and returns the experts
/// per layer, S. Rounding remainders go to the largest fractions (ties: lower layer). A
/// layer is capped at its number of experts, and its excess is divided the same way over
/// the layers below their cap. Layers without tokens get equal shares. Uses integers only.
/// \param popularity  [layer][expert]: tokens since the expert was last saved
/// \returns [layer], sum = min(total, number of experts)
/// \error kBadInput  the tokens of all layers do not fit in 64 bits; as ValidateExperts
/// Pure. Source: MoEtion Algorithm 1; docs/pec-planning.md section 9.2.
Result<std::vector<std::uint64_t>> LayerShares(const Counts& popularity, std::uint64_t total);

/// Experts that a budget selects.
struct BudgetSelection {
  std::uint64_t total = 0;           ///< S_total as requested
  std::vector<std::uint64_t> share;  ///< [layer]: number of experts taken
  Selection selected;                ///< most tokens first
  std::uint64_t saved_tokens = 0;    ///< tokens since the last save, of selected experts
  std::uint64_t at_risk_tokens = 0;  ///< the same for all other experts
};

/// Policy `budget`: LayerShares, then in each layer the experts with most tokens (ties: older
/// version, then lower id).
/// \param version  [layer][expert]: iteration of the saved copy
/// \error kMismatch  versions of another shape; as LayerShares
/// Pure. Source: MoEtion Algorithm 1; docs/pec-planning.md section 9.2.
Result<BudgetSelection> SelectByLayerShares(const Counts& popularity, const Counts& version,
                                            std::uint64_t total);

/// Policy `budget-global`: selects the `total` experts with most tokens over all
/// layers (ties: older version, then lower layer, then lower id), which minimizes
/// the tokens at risk. The experts of a layer are returned in that order.
/// \error as SelectByLayerShares
/// Pure. Source: docs/pec-planning.md section 9.2.
Result<BudgetSelection> SelectGlobally(const Counts& popularity, const Counts& version,
                                       std::uint64_t total);

/// Ways to spend a budget.
enum class BudgetSpread : std::uint8_t {
  kLayers,  ///< as SelectByLayerShares
  kGlobal,  ///< as SelectGlobally
};

/// Selects at most `total` experts of the set `from`, such as those that a local copy contains. The
/// share of a layer follows from the tokens of all its experts, and is capped at its experts
/// in `from`. Tokens at risk are those of all experts that are not selected.
/// \error kBadInput, kMismatch  a set that does not fit; as SelectByLayerShares
/// Pure. Source: MoEtion Algorithm 1; docs/pec-planning.md section 9.2.
Result<BudgetSelection> SelectFrom(const Selection& from, BudgetSpread spread,
                                   const Counts& popularity, const Counts& version,
                                   std::uint64_t total);

}  // namespace shardwright::partial
