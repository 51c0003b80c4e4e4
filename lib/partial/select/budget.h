// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "partial/select/sizes.h"
#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// How many experts fit a budget of bytes.
struct ExpertBudget {
  std::uint64_t experts = 0;      ///< S_total
  std::uint64_t stall_bytes = 0;  ///< of the non-expert part, what the budget does not hold
};

/// S_total = floor((budget - nonexpert) / expert), 0 if the non-expert part does not fit.
/// \param nonexpert_bytes  what a rank must move beside experts; 0 gives the printed formula
/// \error kUsage  expert_bytes is 0
/// Pure. Source: docs/pec-planning.md section 9.1.
Result<ExpertBudget> BudgetOf(std::uint64_t budget_bytes, std::uint64_t expert_bytes,
                              std::uint64_t nonexpert_bytes);

/// The same for a model: of experts of different sizes the largest counts, and the kept components
/// of all of them belong to the non-expert part.
/// \error kUsage  nothing of an expert is selected; kBadInput  overflow
/// Pure. Source: docs/pec-planning.md section 9.1.
Result<ExpertBudget> BudgetOf(std::uint64_t budget_bytes, const ModelBytes& model,
                              const Keep& keep);

/// Experts per layer, S: `total` shared in proportion to the layers' tokens; what rounding leaves
/// goes to the largest remainders (ties: lower layer). A layer above its expert count is capped and
/// its excess is shared in the same way over the layers that have room; among layers without tokens
/// the shares are equal. Integers only.
/// \param popularity  [layer][expert]: tokens since the expert was last saved
/// \returns [layer], sum = min(total, number of experts)
/// \error kBadInput  the tokens of all layers do not fit in 64 bits; as ValidateExperts
/// Pure. Source: MoEtion Algorithm 1; docs/pec-planning.md section 9.2.
Result<std::vector<std::uint64_t>> LayerShares(const Counts& popularity, std::uint64_t total);

/// What a budget buys.
struct BudgetSelection {
  std::uint64_t total = 0;           ///< S_total that was asked for
  std::vector<std::uint64_t> share;  ///< [layer]: experts taken
  Selection selected;                ///< most tokens first
  std::uint64_t saved_tokens = 0;    ///< popularity of what is taken
  std::uint64_t at_risk_tokens = 0;  ///< popularity of the rest
};

/// Policy `budget`: LayerShares, then in each layer the experts with most tokens (ties: older
/// version, then lower id).
/// \param version  [layer][expert]: iteration of the copy held
/// \error kMismatch  versions of another shape; as LayerShares
/// Pure. Source: MoEtion Algorithm 1; docs/pec-planning.md section 9.2.
Result<BudgetSelection> SelectByLayerShares(const Counts& popularity, const Counts& version,
                                            std::uint64_t total);

/// Policy `budget-global`: the `total` experts with most tokens over all layers (ties: older
/// version, then lower layer, then lower id), which leaves the fewest tokens at risk. Within a
/// layer the selection is in that order.
/// \error as SelectByLayerShares
/// Pure. Source: docs/pec-planning.md section 9.2.
Result<BudgetSelection> SelectGlobally(const Counts& popularity, const Counts& version,
                                       std::uint64_t total);

}  // namespace shardwright::partial
