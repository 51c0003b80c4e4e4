// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/tp_rules: rules for how tensor parallelism shards a parameter.
// Files contain shards, but not the rule that made them. The rule comes from the user's
// pattern files, from the checkpoint itself (universal_info.h), or from the files for model
// families that ship with the program (patterns/*.json). The program never guesses: for a
// parameter without a rule the command fails, and the message contains the rule to add.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/layout/rule.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// The tensor-parallel sharding of a parameter: the rule, and
/// the full shape without the padding rows of a vocabulary.
struct Ruled {
  layout::SplitRule rule;
  Shape whole;
};

/// Split rules by parameter name. Pattern files (patterns/*.json, --patterns
/// FILE) supply what checkpoint files lack. Regular expressions are RE2,
/// matched against the full name. The first matching rule of a file applies.
class Patterns {
 public:
  Patterns();
  ~Patterns();
  Patterns(Patterns&&) noexcept;
  Patterns& operator=(Patterns&&) noexcept;

  /// Adds the rules in the text of one pattern file. Messages name the file as `origin`.
  /// \error kBadInput  not valid against docs/patterns.schema.json,
  ///        or an invalid expression; the message names file and rule
  Status AddFile(std::string_view text, const std::string& origin);

  /// Adds the pattern files that ship with the program (compiled in from patterns/*.json).
  Status AddBuiltIn();

  enum class From : std::uint8_t { kAny, kUser, kBuiltIn };

  /// Returns the rule of a parameter, from the shapes of its shards on all
  /// tensor-parallel ranks (one shape if tp is 1). Files added by AddFile take precedence
  /// over built-in ones. Only the patterns that ForModel returns apply built-in files.
  /// \pre !shards.empty()
  /// \error kBadInput  the rule does not fit the shards; names the rule and both values
  Result<std::optional<Ruled>> RuleFor(const std::string& name, std::span<const Shape> shards,
                                       From from = From::kAny) const;

  /// Returns whether the user's files list a tensor as a frozen parameter (true) or as neither a
  /// parameter nor part of one (false); nothing if no file lists it.
  std::optional<bool> IsFrozenParameter(const std::string& name) const;

  /// Returns the rule for a parameter of a full shape; nothing if no rule fits the shape.
  std::optional<layout::SplitRule> Find(const std::string& name, const Shape& shape) const;

  /// Returns the patterns for one model: the user's files, and built-in families if each of their
  /// `requires` expressions matches a name and their `requires_shapes` hold. Shares the rules.
  /// \param shapes  of the parameters, by name: full shapes, or those of one tensor-parallel rank
  /// \pre all_names.size() == shapes.size()
  Patterns ForModel(const std::vector<std::string>& all_names,
                    const std::vector<Shape>& shapes) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Formats the entry to add to a pattern file for a parameter without a rule, for
/// messages: the possible rules, and the full shape that each of them yields.
/// \pre !shards.empty()
std::string RuleToAdd(const std::string& name, std::span<const Shape> shards);

}  // namespace shardwright::checkpoints
