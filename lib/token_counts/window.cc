// SPDX-License-Identifier: Apache-2.0
#include "token_counts/window.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"

namespace shardwright::token_counts {
namespace {

Result<std::uint32_t> LayerNumber(std::string_view text, std::string_view whole) {
  const auto number = NumberIn<std::uint32_t>(text);
  if (!number || *number >= limits::kMoeLayers) {
    return Fail(Errc::kUsage, "\"", whole, "\": a list of layers below ", limits::kMoeLayers,
                " expected, such as 0-11,14");
  }
  return *number;
}

/// Returns the indices of a window's layers; all layers if it lists none.
Result<std::vector<std::size_t>> LayersIn(const TokenTrace& trace,
                                          const std::vector<std::uint32_t>& layers) {
  std::vector<std::size_t> rows;
  rows.reserve(trace.layer_id.size());
  if (layers.empty()) {
    for (std::size_t row = 0; row < trace.layer_id.size(); ++row) rows.push_back(row);
    return rows;
  }
  for (const std::uint32_t layer : layers) {
    const auto at = std::lower_bound(trace.layer_id.begin(), trace.layer_id.end(), layer);
    if (at == trace.layer_id.end() || *at != layer) {
      return Fail(Errc::kUsage, "layer ", layer, ": the token counts have ", trace.layer_id.size(),
                  " layers, ", trace.layer_id.front(), " to ", trace.layer_id.back());
    }
    rows.push_back(static_cast<std::size_t>(at - trace.layer_id.begin()));
  }
  return rows;
}

/// Sets the numbers of experts of the chosen layers.
/// \param rows  indices of the layers, at least one
void SetExperts(const TokenTrace& trace, const std::vector<std::size_t>& rows, TokenCounts* loads) {
  bool equal = true;
  for (const std::size_t row : rows) {
    loads->layer_experts.push_back(trace.ExpertsOf(row));
    loads->experts = std::max(loads->experts, trace.ExpertsOf(row));
    equal = equal && trace.ExpertsOf(row) == loads->layer_experts.front();
  }
  if (equal) loads->layer_experts.clear();
}

/// Returns the index of a window's first record and the index after its last record.
Result<std::pair<std::size_t, std::size_t>> RangeOf(const TokenTrace& trace,
                                                    const LoadWindow& window,
                                                    std::uint64_t records) {
  std::size_t end = trace.records.size();
  if (window.at) {
    SW_TRY_ASSIGN(const std::size_t last, RecordAt(trace, *window.at));
    end = last + 1;
  }
  const bool all = records == kAllRecords;
  const bool apart = !all || window.half_life > 0;  // needs the records one by one
  if (trace.first_sums > 1 && apart && (all || records >= end)) {
    return Fail(Errc::kLimit, "the oldest ", trace.first_sums,
                " records were added up while reading, since the recording has more than ",
                limits::kMoeCounts,
                " counts: use --window all without --half-life, or a window of at most ", end - 1);
  }
  if (all) records = end;
  if (records > end) {
    return Fail(Errc::kUsage, "window of ", records, " iterations, but there are ", end,
                " up to iteration ", trace.records[end - 1].iteration);
  }
  return std::pair(end - static_cast<std::size_t>(records), end);
}

/// Adds the name of the recording to an error.
tl::unexpected<Error> In(const TokenTrace& trace, const Error& error) {
  if (trace.path.empty()) return tl::unexpected<Error>(error);
  return Within(trace.path, error);
}

/// Names the first layer in which two recordings differ.
/// \pre they differ in a layer, or one of them has more layers
std::string FirstDifference(const TokenTrace& first, const TokenTrace& other) {
  const auto only = [](std::uint32_t layer, const TokenTrace& trace) {
    return StrCat("layer ", layer, " is only in ", trace.path);
  };
  for (std::size_t row = 0;; ++row) {
    const bool in_first = row < first.layer_id.size();
    const bool in_other = row < other.layer_id.size();
    if (!in_other || (in_first && first.layer_id[row] < other.layer_id[row])) {
      return only(first.layer_id[row], first);
    }
    if (!in_first || other.layer_id[row] < first.layer_id[row]) {
      return only(other.layer_id[row], other);
    }
    if (first.ExpertsOf(row) == other.ExpertsOf(row)) continue;
    return StrCat("layer ", first.layer_id[row], " has ", first.ExpertsOf(row), " experts in ",
                  first.path, " and ", other.ExpertsOf(row), " in ", other.path);
  }
}

/// Checks that recordings have the same shape and can be added.
Status CheckShape(const TokenTrace& first, const TokenTrace& other) {
  if (other.experts == first.experts && other.layer_id == first.layer_id &&
      other.layer_experts == first.layer_experts) {
    return {};
  }
  const auto shape = [](const TokenTrace& trace) {
    return StrCat(trace.path, " has ", Plural(trace.layer_id.size(), "layer"), " of ",
                  trace.experts, " experts");
  };
  return Fail(Errc::kBadInput, "the recordings differ: ", shape(first), ", ", shape(other), ": ",
              FirstDifference(first, other));
}

/// Sum of one window, as real numbers, and as whole numbers while it consists of them.
class Sum {
 public:
  explicit Sum(std::size_t cells) : whole_(cells, 0), real_(cells, 0) {}

  /// \param rows  layers of the trace to add
  /// \param experts  the largest number in these layers
  void Add(const TokenTrace& trace, std::size_t record, const std::vector<std::size_t>& rows,
           std::uint32_t experts, double weight) {
    const bool counts = weight == std::floor(weight) && weight <= 1e9;
    const auto times = counts ? static_cast<std::uint64_t>(weight) : 0;
    exact_ = exact_ && counts;
    std::size_t at = 0;
    for (const std::size_t row : rows) {
      for (std::size_t e = 0; e < experts; ++e, ++at) {
        const std::uint64_t tokens = trace.records[record].tokens[row * trace.experts + e];
        real_[at] += weight * static_cast<double>(tokens);
        if (!exact_) continue;
        const auto product = CheckedMul(tokens, times);
        const auto sum = product ? CheckedAdd(whole_[at], *product) : product;
        exact_ = exact_ && sum && *sum <= limits::kMoeTokens;
        if (exact_) whole_[at] = *sum;
      }
    }
    iterations_ += weight * static_cast<double>(record == 0 ? trace.first_sums : 1);
  }

  double Layer(std::size_t layer, std::size_t experts) const {
    const auto begin = real_.begin() + static_cast<std::ptrdiff_t>(layer * experts);
    return std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(experts), 0.0);
  }

  /// Returns whole counts in proportion to the sum, and the number of tokens per count.
  /// This is 1 if the sum consists of whole numbers that fit.
  std::pair<std::vector<std::uint64_t>, double> Counts(std::size_t experts) const {
    double most = 0;
    for (std::size_t l = 0; l * experts < real_.size(); ++l)
      most = std::max(most, Layer(l, experts));
    if (exact_ && most <= static_cast<double>(limits::kMoeTokens)) return {whole_, 1.0};
    // The largest layer gets 2^51 to 2^52 counts, so rounding has no visible effect.
    int exponent = 0;
    (void)std::frexp(most, &exponent);
    const double scale = std::ldexp(1.0, 52 - exponent);
    std::vector<std::uint64_t> counts;
    counts.reserve(real_.size());
    for (const double value : real_) {
      counts.push_back(static_cast<std::uint64_t>(std::floor(value * scale + 0.5)));
    }
    return {std::move(counts), 1 / scale};
  }

  /// Adds each layer's shares of another sum. \param totals by layer: the total to multiply by
  void AddShares(const Sum& other, std::size_t experts, const std::vector<double>& totals) {
    exact_ = false;
    for (std::size_t l = 0; l < totals.size(); ++l) {
      const double all = other.Layer(l, experts);
      if (all <= 0) continue;
      for (std::size_t at = l * experts; at < (l + 1) * experts; ++at) {
        real_[at] += other.real_[at] / all * totals[l];
      }
    }
    iterations_ = std::max(iterations_, other.iterations_);
  }

  double iterations() const { return iterations_; }

 private:
  std::vector<std::uint64_t> whole_;
  std::vector<double> real_;
  bool exact_ = true;
  double iterations_ = 0;
};

/// Returns the mean of the windows' shares, for strategies that use a single window.
Sum MeanOf(const std::vector<Sum>& sums, std::size_t layers, std::size_t experts) {
  std::vector<double> totals(layers, 0);
  for (const Sum& sum : sums) {
    for (std::size_t l = 0; l < layers; ++l) totals[l] = std::max(totals[l], sum.Layer(l, experts));
  }
  for (double& total : totals) total /= static_cast<double>(sums.size());
  Sum mean(layers * experts);
  for (const Sum& sum : sums) mean.AddShares(sum, experts, totals);
  return mean;
}

/// A reference to a recording, and its weight.
using Weighted = std::pair<const TokenTrace*, double>;

Result<TokenCounts> PickFrom(std::span<const Weighted> recordings, const LoadWindow& window) {
  const TokenTrace& main = *recordings.front().first;
  for (const Weighted& other : recordings) SW_TRY(CheckShape(main, *other.first));
  const auto rows_of_main = LayersIn(main, window.layers);
  if (!rows_of_main) return In(main, rows_of_main.error());
  const std::vector<std::size_t>& rows = *rows_of_main;
  std::vector<std::uint64_t> windows = window.windows;
  const bool by_form = windows.empty();
  if (by_form) windows.push_back(1);
  TokenCounts loads;
  SetExperts(main, rows, &loads);
  const std::uint32_t experts = loads.experts;
  loads.layers = static_cast<std::uint32_t>(rows.size());
  for (const std::size_t row : rows) loads.layer_id.push_back(main.layer_id[row]);
  std::vector<Sum> sums;
  for (const std::uint64_t records : windows) {
    Sum& sum = sums.emplace_back(rows.size() * experts);
    std::uint64_t added = 0;
    for (const auto& [trace, weight] : recordings) {
      const auto range = RangeOf(*trace, window, by_form && trace->serving ? kAllRecords : records);
      if (!range) return In(*trace, range.error());
      const auto [begin, end] = *range;
      for (std::size_t r = begin; r < end; ++r) {
        const auto age = static_cast<double>(end - 1 - r);
        const double faded = window.half_life > 0 ? std::exp2(-age / window.half_life) : 1;
        sum.Add(*trace, r, rows, experts, weight * faded);
      }
      added += end - begin;
      if (begin == 0) added += trace->first_sums - 1;
      if (trace == &main) loads.iteration = main.records[end - 1].iteration;
    }
    loads.records = std::max(loads.records, added);
  }
  if (sums.size() > 1) {
    for (const Sum& sum : sums) loads.windows.push_back(sum.Counts(experts).first);
    sums.push_back(MeanOf(sums, rows.size(), experts));
  }
  std::tie(loads.tokens, loads.unit) = sums.back().Counts(experts);
  loads.iterations = sums.back().iterations();
  return loads;
}

}  // namespace

Result<TokenCounts> Pick(std::span<const Recording> recordings, const LoadWindow& window) {
  std::vector<Weighted> weighted;
  weighted.reserve(recordings.size());
  for (const Recording& one : recordings) weighted.emplace_back(&one.trace, one.weight);
  return PickFrom(weighted, window);
}

Result<TokenCounts> Pick(const TokenTrace& trace, const LoadWindow& window) {
  const Weighted one(&trace, 1);
  return PickFrom(std::span(&one, 1), window);
}

std::vector<std::uint64_t> RemoveIdle(TokenTrace* trace) {
  std::vector<TokenTrace::Record>& records = trace->records;
  const auto idle = std::stable_partition(records.begin(), records.end(), [](const auto& record) {
    return std::any_of(record.tokens.begin(), record.tokens.end(), [](auto t) { return t > 0; });
  });
  std::vector<std::uint64_t> removed;
  if (idle == records.begin()) return removed;
  for (auto at = idle; at != records.end(); ++at) removed.push_back(at->iteration);
  records.erase(idle, records.end());
  return removed;
}

Result<std::size_t> RecordAt(const TokenTrace& trace, std::uint64_t iteration) {
  const auto after =
      std::upper_bound(trace.records.begin(), trace.records.end(), iteration,
                       [](std::uint64_t i, const auto& record) { return i < record.iteration; });
  if (after == trace.records.begin() && trace.first_sums > 1) {
    return Fail(Errc::kLimit, "iteration ", iteration, ": the oldest ", trace.first_sums,
                " records, up to iteration ", trace.records.front().iteration,
                ", were added up while reading, since the recording has more than ",
                limits::kMoeCounts, " counts");
  }
  if (after == trace.records.begin()) {
    return Fail(Errc::kUsage, "iteration ", iteration, ": the token counts start at iteration ",
                trace.records.front().iteration);
  }
  return static_cast<std::size_t>(after - trace.records.begin()) - 1;
}

Result<std::vector<std::uint32_t>> ParseLayers(std::string_view text) {
  std::set<std::uint32_t> layers;
  std::string_view rest = text;
  while (true) {
    const std::string_view part = rest.substr(0, rest.find(','));
    const std::size_t dash = part.find('-');
    SW_TRY_ASSIGN(const std::uint32_t first, LayerNumber(part.substr(0, dash), text));
    std::uint32_t last = first;
    if (dash != std::string_view::npos) {
      SW_TRY_ASSIGN(last, LayerNumber(part.substr(dash + 1), text));
    }
    if (last < first) {
      return Fail(Errc::kUsage, "\"", text, "\": the end of a range is before its start");
    }
    for (std::uint32_t layer = first; layer <= last; ++layer) layers.insert(layer);
    if (part.size() == rest.size()) break;
    rest.remove_prefix(part.size() + 1);
  }
  return std::vector<std::uint32_t>(layers.begin(), layers.end());
}

Result<std::vector<std::uint64_t>> ParseWindows(std::string_view text) {
  std::vector<std::uint64_t> windows;
  std::string_view rest = text;
  while (true) {
    const std::string_view part = rest.substr(0, rest.find(','));
    const std::uint64_t records = NumberIn<std::uint64_t>(part).value_or(0);
    if (part != "all" && records == 0) {
      return Fail(Errc::kUsage, "--window \"", text,
                  "\": expected numbers of iterations above 0, or all, with "
                  "commas between them, such as 10 or 1,100,all");
    }
    windows.push_back(part == "all" ? kAllRecords : records);
    if (part.size() == rest.size()) return windows;
    rest.remove_prefix(part.size() + 1);
  }
}

std::string Ranges(std::span<const std::uint64_t> numbers) {
  constexpr std::size_t kShown = 6;
  std::string text;
  std::size_t shown = 0;
  for (std::size_t i = 0; i < numbers.size(); ++shown) {
    if (shown == kShown) return text + " and " + std::to_string(numbers.size() - i) + " more";
    std::size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text.append(shown > 0 ? ", " : "").append(std::to_string(numbers[i]));
    if (last > i) text.append("-").append(std::to_string(numbers[last]));
    i = last + 1;
  }
  return text;
}

}  // namespace shardwright::token_counts
