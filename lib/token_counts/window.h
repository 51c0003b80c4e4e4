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

/// Number of records that stands for all of them.
inline constexpr std::uint64_t kAllRecords = 0;

/// Which part of a recording a plan is made for.
struct LoadWindow {
  std::optional<std::uint64_t> at;  ///< last iteration that counts; absent: the recording's last
  /// Records up to `at` that are added up, or kAllRecords. With several windows a plan is as good
  /// as it is in the worst of them. Empty: all records of a serving engine, else the newest.
  std::vector<std::uint64_t> windows;
  double half_life = 0;  ///< records after which a record counts half; 0: all count the same
  std::vector<std::uint32_t> layers;  ///< numbers in the model; empty: all
};

/// A recording, and how often its counts are added.
struct Recording {
  TokenTrace trace;
  double weight = 1;
};

/// Adds up the counts of a window, those of several recordings with their weights.
/// \pre at least one recording; weights are positive
/// \error kUsage  an iteration before the first one, a layer that the recording lacks, a window
///        that is longer than what there is up to `at`; kBadInput  recordings with different
///        layers or experts
/// Pure.
Result<TokenCounts> Pick(std::span<const Recording> recordings, const LoadWindow& window);
Result<TokenCounts> Pick(const TokenTrace& trace, const LoadWindow& window);

/// Removes records without a token, unless no record has any, and returns their iterations.
/// Local.
std::vector<std::uint64_t> RemoveIdle(TokenTrace* trace);

/// The last record at or before an iteration. \error kUsage  if there is none
Result<std::size_t> RecordAt(const TokenTrace& trace, std::uint64_t iteration);

/// "0-11,14" as ascending numbers. \error kUsage  not such a list, or a range that runs backward
Result<std::vector<std::uint32_t>> ParseLayers(std::string_view text);

/// "1,10,all" as numbers of records. \error kUsage  not such a list
Result<std::vector<std::uint64_t>> ParseWindows(std::string_view text);

/// Ascending numbers as a text for messages: "0-2, 7, 9 and 12 more".
std::string Ranges(std::span<const std::uint64_t> numbers);

}  // namespace shardwright::token_counts
