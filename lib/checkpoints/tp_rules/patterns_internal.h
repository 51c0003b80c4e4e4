// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <re2/re2.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/tp_rules/patterns.h"

namespace shardwright::checkpoints {

/// One rule of a pattern file. Sizes that depend on the tensor are computed when it is applied.
struct PatternRule {
  std::unique_ptr<re2::RE2> match;
  layout::SplitRule rule;            ///< without view, widths, and sub-tensor sizes from `ratio`
  std::vector<std::uint64_t> ratio;  ///< proportions of sub-tensors, instead of rule.sub_sizes
  std::vector<std::vector<std::uint64_t>> axis_ratios;  ///< the same for each of rule.axes
  std::vector<std::int64_t> view;                       ///< -1: the remaining elements
  std::uint64_t rows = 0;  ///< padded: the number of real rows, 0 if the file omits it
};

/// Requires that dimension `dim` of the first parameter that `match` matches
/// equals `times` dimension `of_dim` of the first parameter that `of` matches.
struct ShapeCondition {
  std::unique_ptr<re2::RE2> match, of;
  std::uint32_t dim = 0, of_dim = 0;
  std::uint64_t times = 1;
};

struct PatternFile {
  std::string origin;
  std::vector<std::unique_ptr<re2::RE2>> required;
  std::vector<ShapeCondition> conditions;
  std::vector<PatternRule> rules;
  std::vector<std::unique_ptr<re2::RE2>> frozen_parameters;
  std::vector<std::unique_ptr<re2::RE2>> not_parameters;
};

/// Parses the text of one pattern file (docs/patterns.schema.json).
/// \error kBadInput  names origin, rule number and key
Result<PatternFile> ParsePatternFile(std::string_view text, const std::string& origin);

struct BuiltInPatternFile {
  std::string_view origin;
  std::string_view text;
};

/// Returns the files patterns/*.json of the source tree, sorted by name.
std::span<const BuiltInPatternFile> BuiltInPatternFiles();

}  // namespace shardwright::checkpoints
