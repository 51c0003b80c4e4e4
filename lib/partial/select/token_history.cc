// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <utility>

#include "partial/select/lost_tokens.h"
#include "support/base/checked.h"
#include "support/base/limits.h"

namespace shardwright::partial {

// A row of totals has, for each layer, the cells of its experts and then one for the layer.
TokenHistory::TokenHistory(LayerExperts experts) : experts_(std::move(experts)) {
  layer_first_.push_back(0);
  for (std::uint32_t n : experts_) layer_first_.push_back(layer_first_.back() + n + 1);
  sums_.assign(layer_first_.back(), 0);
}

Result<TokenHistory> TokenHistory::Make(LayerExperts experts) {
  SW_TRY(ValidateExperts(experts));
  return TokenHistory(std::move(experts));
}

Status TokenHistory::Add(std::uint64_t iteration, const Counts& tokens) {
  SW_TRY(ValidateShape(tokens, experts_, StrCat("tokens of iteration ", iteration)));
  const std::uint64_t newest = iterations_.empty() ? 0 : iterations_.back();
  if (iteration <= newest) {
    return Fail(Errc::kBadInput, "tokens of iteration ", iteration,
                (iterations_.empty() ? ": iterations count from 1"
                                     : StrCat(" follow those of iteration ", newest)));
  }
  const std::size_t cells = layer_first_.back();
  const auto is_full = [&] {
    return sums_.size() + cells > limits::kMoeCounts + limits::kMoeExperts;
  };
  if (is_full()) Merge();
  if (is_full()) {
    return Fail(Errc::kLimit, "tokens of iteration ", iteration, ": the log has more than ",
                limits::kMoeCounts, " token counts up to it");
  }
  std::vector<std::uint64_t> row(sums_.end() - static_cast<std::ptrdiff_t>(cells), sums_.end());
  for (std::size_t m = 0; m < tokens.size(); ++m) {
    std::uint64_t& layer = row[layer_first_[m + 1] - 1];
    for (std::size_t e = 0; e < tokens[m].size(); ++e) {
      std::uint64_t& sum = row[layer_first_[m] + e];
      SW_TRY_ASSIGN(layer, CheckedAdd(layer, tokens[m][e]));
      sum += tokens[m][e];  // at most the layer's sum, so it fits
    }
  }
  sums_.insert(sums_.end(), row.begin(), row.end());
  if (iterations_.empty()) first_ = iteration;
  iterations_.push_back(iteration);
  return {};
}

/// Leaves one row of the iterations up to merge_to_: the last one, with the tokens of all of them.
void TokenHistory::Merge() {
  const std::size_t count = CountUpTo(merge_to_);
  if (count < 2) return;
  const auto rows = static_cast<std::ptrdiff_t>(count - 1);
  const auto cells = static_cast<std::ptrdiff_t>(layer_first_.back());
  iterations_.erase(iterations_.begin(), iterations_.begin() + rows);
  sums_.erase(sums_.begin() + cells, sums_.begin() + (rows + 1) * cells);
}

void TokenHistory::Truncate(std::uint64_t iteration) {
  const std::size_t kept = CountUpTo(iteration);
  iterations_.resize(kept);
  if (kept == 0) first_ = 0;
  sums_.resize((kept + 1) * layer_first_.back());
}

std::size_t TokenHistory::CountUpTo(std::uint64_t iteration) const {
  return static_cast<std::size_t>(
      std::upper_bound(iterations_.begin(), iterations_.end(), iteration) - iterations_.begin());
}

std::uint64_t TokenHistory::Between(std::size_t layer, std::size_t expert, std::uint64_t after,
                                    std::uint64_t last) const {
  if (after >= last) return 0;
  const std::size_t cells = layer_first_.back();
  const std::size_t cell = layer_first_[layer] + expert;
  return sums_[CountUpTo(last) * cells + cell] - sums_[CountUpTo(after) * cells + cell];
}

std::uint64_t TokenHistory::LayerBetween(std::size_t layer, std::uint64_t after,
                                         std::uint64_t last) const {
  return Between(layer, experts_[layer], after, last);
}

}  // namespace shardwright::partial
