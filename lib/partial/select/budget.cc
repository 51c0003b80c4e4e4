// SPDX-License-Identifier: Apache-2.0
#include "partial/select/budget.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "partial/select/selection.h"
#include "support/base/bytes.h"
#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

__extension__ using Wide = unsigned __int128;

/// Returns the tokens of every layer. \error kBadInput  their total overflows 64 bits
Result<std::vector<std::uint64_t>> LayerSums(const Counts& popularity) {
  std::vector<std::uint64_t> sums(popularity.size(), 0);
  std::uint64_t total = 0;
  for (std::size_t m = 0; m < popularity.size(); ++m) {
    for (std::uint64_t tokens : popularity[m]) {
      if (__builtin_add_overflow(total, tokens, &total)) {
        return Fail(Errc::kBadInput, "MoE layer ", m,
                    ": the tokens of the layers up to this one overflow 64 bits");
      }
      sums[m] += tokens;
    }
  }
  return sums;
}

/// A layer that takes part in a round of sharing.
struct Claim {
  std::size_t layer = 0;
  std::uint64_t weight = 0;
  std::uint64_t share = 0;
  Wide remainder = 0;
};

/// Divides `amount` in proportion to the weights (all 0: equally), largest remainders first.
/// \pre claims ascend by layer
void ShareOut(std::uint64_t amount, std::vector<Claim>* claims) {
  Wide sum = 0;
  for (const Claim& claim : *claims) sum += claim.weight;
  if (sum == 0) {
    for (Claim& claim : *claims) claim.weight = 1;
    sum = claims->size();
  }
  std::uint64_t left = amount;
  for (Claim& claim : *claims) {
    const Wide product = static_cast<Wide>(claim.weight) * amount;
    claim.share = static_cast<std::uint64_t>(product / sum);
    claim.remainder = product % sum;
    left -= claim.share;
  }
  std::stable_sort(claims->begin(), claims->end(),
                   [](const Claim& a, const Claim& b) { return a.remainder > b.remainder; });
  for (std::size_t i = 0; i < left; ++i) ++(*claims)[i].share;
}

/// Divides `total` over the layers as LayerShares, at most `most` experts of each.
std::vector<std::uint64_t> SharesUpTo(const std::vector<std::uint64_t>& tokens,
                                      const LayerExperts& most, std::uint64_t total) {
  std::vector<std::uint64_t> shares(most.size(), 0);
  std::uint64_t left = std::min(total, std::accumulate(most.begin(), most.end(), std::uint64_t{0}));
  std::vector<Claim> claims;
  while (left > 0) {
    claims.clear();
    for (std::size_t m = 0; m < most.size(); ++m) {
      if (shares[m] < most[m]) claims.push_back({m, tokens[m], 0, 0});
    }
    ShareOut(left, &claims);
    left = 0;
    for (const Claim& claim : claims) {
      const std::uint64_t room = most[claim.layer] - shares[claim.layer];
      const std::uint64_t taken = std::min(room, claim.share);
      shares[claim.layer] += taken;
      left += claim.share - taken;
    }
  }
  return shares;
}

/// An expert to select. Of equally busy ones, the one with the oldest copy comes first.
struct Candidate {
  std::uint64_t tokens = 0;
  std::uint64_t version = 0;
  std::uint32_t layer = 0;
  std::uint32_t expert = 0;

  bool operator<(const Candidate& other) const {
    return std::tie(other.tokens, version, layer, expert) <
           std::tie(tokens, other.version, other.layer, other.expert);
  }
};

std::vector<Candidate> CandidatesOf(const Selection& from, const Counts& popularity,
                                    const Counts& version, std::size_t layer) {
  std::vector<Candidate> candidates;
  candidates.reserve(from[layer].size());
  for (const std::uint32_t e : from[layer]) {
    candidates.push_back(
        {popularity[layer][e], version[layer][e], static_cast<std::uint32_t>(layer), e});
  }
  return candidates;
}

/// Keeps the first `count` candidates, in order.
void KeepFirst(std::size_t count, std::vector<Candidate>* candidates) {
  std::partial_sort(candidates->begin(), candidates->begin() + static_cast<std::ptrdiff_t>(count),
                    candidates->end());
  candidates->resize(count);
}

void Take(const std::vector<Candidate>& candidates, BudgetSelection* budget) {
  for (const Candidate& candidate : candidates) {
    budget->selected[candidate.layer].push_back(candidate.expert);
    ++budget->share[candidate.layer];
    budget->saved_tokens += candidate.tokens;
  }
}

/// Makes the common start of both selections. \error kBadInput, kMismatch, kLimit
Result<BudgetSelection> EmptySelection(const Counts& popularity, const Counts& version,
                                       std::uint64_t total) {
  SW_TRY(ValidateExperts(ShapeOf(popularity)));
  SW_TRY(ValidateShape(version, ShapeOf(popularity), "versions"));
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> sums, LayerSums(popularity));
  BudgetSelection budget;
  budget.total = total;
  budget.share.assign(popularity.size(), 0);
  budget.selected.resize(popularity.size());
  budget.at_risk_tokens = std::accumulate(sums.begin(), sums.end(), std::uint64_t{0});
  return budget;
}

}  // namespace

Result<std::uint64_t> BytesPerIteration(std::uint64_t bandwidth, double iteration_s) {
  const double bytes = std::round(static_cast<double>(bandwidth) * iteration_s);
  // Also false for NaN. 2^64 is exact in a double.
  if (bytes >= 0 && bytes < 0x1p64) return static_cast<std::uint64_t>(bytes);
  return Fail(Errc::kUsage, FormatBytes(bandwidth), "/s in iterations of ", iteration_s,
              " s: the budget does not fit in 64 bits");
}

Result<ExpertBudget> BudgetOf(std::uint64_t budget_bytes, std::uint64_t expert_bytes,
                              std::uint64_t nonexpert_bytes) {
  if (expert_bytes == 0) return Fail(Errc::kUsage, "an expert of 0 bytes fits any budget");
  ExpertBudget budget;
  budget.expert_bytes = expert_bytes;
  budget.nonexpert_bytes = nonexpert_bytes;
  if (budget_bytes < nonexpert_bytes) {
    budget.stall_bytes = nonexpert_bytes - budget_bytes;
  } else {
    budget.experts = (budget_bytes - nonexpert_bytes) / expert_bytes;
  }
  return budget;
}

Result<ExpertBudget> BudgetOf(std::uint64_t budget_bytes, const ModelBytes& model,
                              const Keep& keep) {
  std::uint64_t always = 0;
  std::uint64_t largest = 0;
  for (const ComponentBytes& module : model.nonexpert) {
    SW_TRY_ASSIGN(const std::uint64_t bytes, TotalBytes(module));
    SW_TRY_ASSIGN(always, CheckedAdd(always, bytes));
  }
  for (const auto& layer : model.expert) {
    for (const ComponentBytes& expert : layer) {
      SW_TRY_ASSIGN(const std::uint64_t bytes, TotalBytes(expert));
      const std::uint64_t kept = KeptBytes(expert, keep);
      SW_TRY_ASSIGN(always, CheckedAdd(always, kept));
      largest = std::max(largest, bytes - kept);
    }
  }
  return BudgetOf(budget_bytes, largest, always);
}

Result<std::vector<std::uint64_t>> LayerShares(const Counts& popularity, std::uint64_t total) {
  SW_TRY(ValidateExperts(ShapeOf(popularity)));
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> tokens, LayerSums(popularity));
  return SharesUpTo(tokens, ShapeOf(popularity), total);
}

Result<BudgetSelection> SelectFrom(const Selection& from, BudgetSpread spread,
                                   const Counts& popularity, const Counts& version,
                                   std::uint64_t total) {
  SW_TRY_ASSIGN(BudgetSelection budget, EmptySelection(popularity, version, total));
  SW_TRY(Validate(from, ShapeOf(popularity)));
  std::vector<Candidate> candidates;
  if (spread == BudgetSpread::kLayers) {
    SW_TRY_ASSIGN(const std::vector<std::uint64_t> tokens, LayerSums(popularity));
    const std::vector<std::uint64_t> shares = SharesUpTo(tokens, ShapeOf(from), total);
    for (std::size_t m = 0; m < from.size(); ++m) {
      candidates = CandidatesOf(from, popularity, version, m);
      KeepFirst(shares[m], &candidates);
      Take(candidates, &budget);
    }
  } else {
    for (std::size_t m = 0; m < from.size(); ++m) {
      const std::vector<Candidate> layer = CandidatesOf(from, popularity, version, m);
      candidates.insert(candidates.end(), layer.begin(), layer.end());
    }
    KeepFirst(std::min<std::uint64_t>(total, candidates.size()), &candidates);
    Take(candidates, &budget);
  }
  budget.at_risk_tokens -= budget.saved_tokens;
  return budget;
}

Result<BudgetSelection> SelectByLayerShares(const Counts& popularity, const Counts& version,
                                            std::uint64_t total) {
  const Selection all = SelectAll(ShapeOf(popularity));
  return SelectFrom(all, BudgetSpread::kLayers, popularity, version, total);
}

Result<BudgetSelection> SelectGlobally(const Counts& popularity, const Counts& version,
                                       std::uint64_t total) {
  const Selection all = SelectAll(ShapeOf(popularity));
  return SelectFrom(all, BudgetSpread::kGlobal, popularity, version, total);
}

}  // namespace shardwright::partial
