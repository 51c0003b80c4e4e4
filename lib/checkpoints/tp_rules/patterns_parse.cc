// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include <initializer_list>

#include "checkpoints/tp_rules/expression.h"
#include "checkpoints/tp_rules/patterns_internal.h"
#include "engine/layout/mesh_rule.h"
#include "support/base/limits.h"
#include "support/json/json.h"

namespace shardwright::checkpoints {
namespace {

using layout::Split;
using Json = nlohmann::json;

Status CheckKeys(const Json& object, std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return BadInput("key \"", key, "\" is not known");
    }
  }
  return {};
}

Result<std::string> Text(const Json& object, const char* key, bool needed) {
  const auto it = object.find(key);
  if (it == object.end()) {
    if (needed) return BadInput("key \"", key, "\" is missing");
    return std::string();
  }
  if (!it->is_string()) return BadInput("key \"", key, "\": string expected");
  return it->get<std::string>();
}

Result<std::uint64_t> Count(const Json& value, const std::string& key, std::uint64_t least) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() < least ||
      value.get<std::uint64_t>() > (std::uint64_t{1} << 62)) {
    return BadInput("key \"", key, "\": integer of at least ", least, " expected, found ",
                    value.dump());
  }
  return value.get<std::uint64_t>();
}

Result<std::uint64_t> CountOr(const Json& object, const char* key, std::uint64_t least,
                              std::uint64_t otherwise) {
  const auto it = object.find(key);
  if (it == object.end()) return otherwise;
  return Count(*it, key, least);
}

Result<std::uint32_t> Dim(const Json& object, const char* key) {
  SW_TRY_ASSIGN(const std::uint64_t dim, CountOr(object, key, 0, 0));
  if (dim >= limits::kTensorRank) {
    return BadInput("key \"", key, "\": ", dim, " is not a dimension");
  }
  return static_cast<std::uint32_t>(dim);
}

Result<bool> Flag(const Json& object, const char* key) {
  const auto it = object.find(key);
  if (it == object.end()) return false;
  if (!it->is_boolean()) return BadInput("key \"", key, "\": true or false expected");
  return it->get<bool>();
}

Result<std::vector<std::uint64_t>> Counts(const Json& object, const char* key,
                                          std::uint64_t least) {
  std::vector<std::uint64_t> counts;
  const auto it = object.find(key);
  if (it == object.end()) return counts;
  if (it->is_number()) {
    SW_TRY_ASSIGN(const std::uint64_t one, Count(*it, key, least));
    counts.push_back(one);
    return counts;
  }
  if (!it->is_array() || it->empty()) {
    return BadInput("key \"", key, "\": list of integers expected");
  }
  for (const Json& item : *it) {
    SW_TRY_ASSIGN(const std::uint64_t one, Count(item, key, least));
    counts.push_back(one);
  }
  return counts;
}

Result<std::vector<std::int64_t>> View(const Json& object) {
  std::vector<std::int64_t> view;
  const auto it = object.find("view");
  if (it == object.end()) return view;
  bool rest = false;
  if (!it->is_array() || it->empty() || it->size() > limits::kTensorRank) {
    return BadInput("key \"view\": list of integers expected");
  }
  for (const Json& item : *it) {
    if (item.is_number_integer() && item.get<std::int64_t>() == -1 && !rest) {
      rest = true;
      view.push_back(-1);
      continue;
    }
    SW_TRY_ASSIGN(const std::uint64_t extent, Count(item, "view", 1));
    view.push_back(static_cast<std::int64_t>(extent));
  }
  return view;
}

Result<std::unique_ptr<re2::RE2>> Expression(const std::string& text, const std::string& key) {
  auto compiled = CompileExpression(text);
  if (!compiled->ok()) {
    return BadInput("key \"", key, "\": expression \"", text, "\": ", compiled->error());
  }
  return compiled;
}

/// Parses "split" and the keys that belong to it, except "axes".
Result<PatternRule> ParseSplit(const Json& object) {
  SW_TRY(CheckKeys(
      object, {"split", "dim", "sizes", "ratio", "view", "granule", "uneven", "padded", "rows"}));
  PatternRule parsed;
  layout::SplitRule& rule = parsed.rule;
  SW_TRY_ASSIGN(const std::string split, Text(object, "split", true));
  SW_TRY_ASSIGN(rule.dim, Dim(object, "dim"));
  SW_TRY_ASSIGN(rule.sub_sizes, Counts(object, "sizes", 0));
  SW_TRY_ASSIGN(parsed.ratio, Counts(object, "ratio", 1));
  SW_TRY_ASSIGN(parsed.view, View(object));
  SW_TRY_ASSIGN(rule.granule, Counts(object, "granule", 1));
  SW_TRY_ASSIGN(rule.uneven, Flag(object, "uneven"));
  SW_TRY_ASSIGN(rule.padded, Flag(object, "padded"));
  SW_TRY_ASSIGN(parsed.rows, CountOr(object, "rows", 1, 0));
  if (split == "replicated" || split == "average") {
    rule.split = split == "replicated" ? Split::kReplicated : Split::kAverage;
    SW_TRY(CheckKeys(object, {"split"}));
  } else if (split == "dim") {
    rule.split = Split::kDim;
    SW_TRY(CheckKeys(object, {"split", "dim", "granule", "uneven", "padded", "rows"}));
    if (!object.contains("dim")) return BadInput("key \"dim\" is missing");
    if (rule.granule.size() > 1) return BadInput("key \"granule\": one integer expected");
    if (parsed.rows != 0 && !rule.padded) return BadInput("key \"rows\" requires \"padded\"");
    if (rule.padded && (rule.uneven || rule.dim != 0)) {
      return BadInput("key \"padded\" requires dim 0 and equal widths");
    }
  } else if (split == "sub") {
    rule.split = Split::kSub;
    SW_TRY(CheckKeys(object, {"split", "dim", "sizes", "ratio", "view", "granule", "uneven"}));
    if (!object.contains("dim")) return BadInput("key \"dim\" is missing");
    if (rule.sub_sizes.empty() == parsed.ratio.empty()) {
      return BadInput("one of the keys \"sizes\" and \"ratio\" is needed");
    }
    const std::size_t subs = rule.sub_sizes.size() + parsed.ratio.size();
    if (rule.granule.size() > 1 && rule.granule.size() != subs) {
      return BadInput("key \"granule\": one integer, or one for each of the ", subs,
                      " sub-tensors expected");
    }
    if (!parsed.view.empty() && rule.dim >= parsed.view.size()) {
      return BadInput("key \"dim\": ", rule.dim, " is not a dimension of the view");
    }
  } else {
    return BadInput(
        "key \"split\": \"replicated\", \"average\", \"dim\", \"sub\" or \"mesh\" expected, found "
        "\"",
        split, "\"");
  }
  return parsed;
}

/// Parses an axis of a mesh: a split and the number of ranks that make it.
Result<PatternRule> ParseAxis(const Json& object) {
  if (!object.is_object()) return BadInput("object expected");
  SW_TRY_ASSIGN(const std::string split, Text(object, "split", true));
  if (split != "replicated" && split != "dim" && split != "sub") {
    return BadInput("key \"split\": \"replicated\", \"dim\" or \"sub\" expected, found \"", split,
                    "\"");
  }
  SW_TRY_ASSIGN(const std::uint64_t ranks, CountOr(object, "ranks", 1, 0));
  Json rest = object;
  rest.erase("ranks");
  SW_TRY_ASSIGN(PatternRule axis, ParseSplit(rest));
  if (!axis.view.empty()) return BadInput("key \"view\": an axis of a mesh has no view");
  axis.rule.axis_ranks = ranks;
  return axis;
}

Result<PatternRule> ParseMesh(const Json& object) {
  SW_TRY(CheckKeys(object, {"split", "axes"}));
  const auto it = object.find("axes");
  if (it == object.end()) return BadInput("key \"axes\" is missing");
  if (!it->is_array()) return BadInput("key \"axes\": list of objects expected");
  PatternRule parsed;
  parsed.rule.split = Split::kMesh;
  for (const Json& item : *it) {
    Result<PatternRule> axis = ParseAxis(item);
    if (!axis) {
      return Within("axis " + std::to_string(parsed.rule.axes.size() + 1), axis.error());
    }
    parsed.rule.axes.push_back(std::move(axis->rule));
    parsed.axis_ratios.push_back(std::move(axis->ratio));
  }
  SW_TRY(layout::CheckMesh(parsed.rule));
  return parsed;
}

Result<PatternRule> ParsePatternRule(const Json& object) {
  if (!object.is_object()) return BadInput("object expected");
  SW_TRY_ASSIGN(const std::string match, Text(object, "match", true));
  SW_TRY_ASSIGN(auto expression, Expression(match, "match"));
  SW_TRY_ASSIGN(const std::string split, Text(object, "split", true));
  SW_TRY(Text(object, "note", false));
  Json rest = object;
  rest.erase("match");
  rest.erase("note");
  SW_TRY_ASSIGN(PatternRule parsed, split == "mesh" ? ParseMesh(rest) : ParseSplit(rest));
  parsed.match = std::move(expression);
  return parsed;
}

Result<ShapeCondition> ParseCondition(const Json& object) {
  if (!object.is_object()) return BadInput("object expected");
  SW_TRY(CheckKeys(object, {"match", "dim", "times", "of", "of_dim"}));
  ShapeCondition condition;
  SW_TRY_ASSIGN(const std::string match, Text(object, "match", true));
  SW_TRY_ASSIGN(const std::string of, Text(object, "of", true));
  SW_TRY_ASSIGN(condition.match, Expression(match, "match"));
  SW_TRY_ASSIGN(condition.of, Expression(of, "of"));
  SW_TRY_ASSIGN(condition.dim, Dim(object, "dim"));
  SW_TRY_ASSIGN(condition.of_dim, Dim(object, "of_dim"));
  SW_TRY_ASSIGN(condition.times, CountOr(object, "times", 1, 1));
  return condition;
}

using Expressions = std::vector<std::unique_ptr<re2::RE2>>;

Result<PatternFile> ParseFile(const Json& root, const std::string& origin) {
  PatternFile file;
  file.origin = origin;
  if (!root.is_object()) return BadInput("object expected");
  SW_TRY(CheckKeys(root, {"$schema", "version", "family", "requires", "requires_shapes", "rules",
                          "frozen_parameters", "not_parameters", "note"}));
  SW_TRY_ASSIGN(const std::uint64_t version, CountOr(root, "version", 1, 1));
  if (version != 1) return BadInput("key \"version\": 1 expected");
  SW_TRY(Text(root, "$schema", false));
  SW_TRY(Text(root, "family", true));
  SW_TRY(Text(root, "note", false));
  const auto list = [&](const char* key) -> Result<Json> {
    const auto it = root.find(key);
    if (it == root.end()) return Json::array();
    if (!it->is_array()) return BadInput("key \"", key, "\": list expected");
    return *it;
  };
  const auto expressions = [&](const std::string& key) -> Result<Expressions> {
    SW_TRY_ASSIGN(const Json items, list(key.c_str()));
    Expressions out;
    out.reserve(items.size());
    for (const Json& item : items) {
      if (!item.is_string()) return BadInput("key \"", key, "\": list of strings expected");
      SW_TRY_ASSIGN(auto expression, Expression(item.get<std::string>(), key));
      out.push_back(std::move(expression));
    }
    return out;
  };
  SW_TRY_ASSIGN(file.required, expressions("requires"));
  SW_TRY_ASSIGN(file.frozen_parameters, expressions("frozen_parameters"));
  SW_TRY_ASSIGN(file.not_parameters, expressions("not_parameters"));
  SW_TRY_ASSIGN(const Json conditions, list("requires_shapes"));
  for (const Json& item : conditions) {
    Result<ShapeCondition> condition = ParseCondition(item);
    if (!condition) return Within("requires_shapes", condition.error());
    file.conditions.push_back(*std::move(condition));
  }
  if (!root.contains("rules") && file.frozen_parameters.empty() && file.not_parameters.empty()) {
    return BadInput("key \"rules\" is missing");
  }
  SW_TRY_ASSIGN(const Json rules, list("rules"));
  for (const Json& item : rules) {
    const std::string number = "rule " + std::to_string(file.rules.size() + 1);
    Result<PatternRule> rule = ParsePatternRule(item);
    if (!rule) return Within(number, rule.error());
    rule->rule.origin.append(origin).append(" ").append(number);
    file.rules.push_back(*std::move(rule));
  }
  return file;
}

}  // namespace

Result<PatternFile> ParsePatternFile(std::string_view text, const std::string& origin) {
  if (text.size() > limits::kJsonBytes) {
    return Fail(Errc::kLimit, origin, ": ", text.size(), " bytes, at most ", limits::kJsonBytes,
                " are read");
  }
  SW_TRY_ASSIGN(const Json root, json::Parse(text, origin));
  Result<PatternFile> file = ParseFile(root, origin);
  if (!file) return Within(origin, file.error());
  return file;
}

}  // namespace shardwright::checkpoints
