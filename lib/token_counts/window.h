// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "support/base/result.h"
#include "token_counts/token_counts.h"
#include "token_counts/trace.h"

namespace shardwright::token_counts {

/// Value of a window that means all records.
inline constexpr std::uint64_t kAllRecords = 0;

/// Part of a recording to make a plan for.
struct LoadWindow {
  std::optional<std::uint64_t> at;  ///< last iteration that counts; absent: the last one
  /// Window sizes: numbers of records up to `at`, or kAllRecords. A plan for several windows is
  /// rated by the worst one. Empty: for each recording all records if a serving engine or an array
  /// has them, otherwise the newest record.
  std::vector<std::uint64_t> windows;
  double half_life = 0;  ///< age in records at which a weight is halved; 0: equal weights
  std::vector<std::uint32_t> layers;  ///< numbers in the model; empty: all
};

/// A recording and the weight of its counts.
struct Recording {
  TokenTrace trace;
  double weight = 1;
};

/// Adds up the counts of a window. With several recordings, it multiplies counts by their weights.
/// \pre at least one recording; weights are positive
/// \error kUsage  an iteration before the first record, a layer that the recording lacks,
///        or a window with more records than there are up to `at`; kBadInput  recordings
///        with different layers or experts; kLimit  records that were added up while reading.
///        Each names the recording.
/// Pure.
Result<TokenCounts> Pick(std::span<const Recording> recordings, const LoadWindow& window);
Result<TokenCounts> Pick(const TokenTrace& trace, const LoadWindow& window);

/// Removes records without tokens, unless all are without, and returns their iterations.
/// Local.
std::vector<std::uint64_t> RemoveIdle(TokenTrace* trace);

/// Returns the index of the last record at or before an iteration.
/// \error kUsage if there is none; kLimit if it was added up with others while reading
Result<std::size_t> RecordAt(const TokenTrace& trace, std::uint64_t iteration);

/// Parses "0-11,14" to ascending numbers. \error kUsage not such a list, or a descending range
Result<std::vector<std::uint32_t>> ParseLayers(std::string_view text);

/// Parses "1,10,all" to numbers of records. \error kUsage not such a list
Result<std::vector<std::uint64_t>> ParseWindows(std::string_view text);

/// Formats ascending numbers for messages: "0-2, 7, 9 and 12 more".
std::string Ranges(std::span<const std::uint64_t> numbers);

}  // namespace shardwright::token_counts
