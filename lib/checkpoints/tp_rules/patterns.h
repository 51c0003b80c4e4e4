// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/tp_rules: how tensor parallelism cuts a parameter.
// Files hold shards, but not the rule that made them. The rule comes from pattern files of the
// user, from the checkpoint itself (universal_info.h), or from those of a model family that ships
// with the program (patterns/*.json). Nobody guesses: what no rule covers is refused, and the
// message holds the rule to add.

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

/// What is known about how tensor parallelism cuts a parameter: the rule and the whole shape
/// (padding rows of a vocabulary not counted).
struct Ruled {
  layout::SplitRule rule;
  Shape whole;
};

/// Split rules by parameter name: pattern files (patterns/*.json, --patterns FILE) say what
/// checkpoint files do not. Regular expressions are RE2, matched against the full name; the first
/// rule of a file that matches wins.
class Patterns {
 public:
  Patterns();
  ~Patterns();
  Patterns(Patterns&&) noexcept;
  Patterns& operator=(Patterns&&) noexcept;

  /// Adds the rules of one pattern file's text. `origin` is used in messages.
  /// \error kBadInput  not valid against docs/patterns.schema.json, or a bad expression; names file
  ///        and rule
  Status AddFile(std::string_view text, const std::string& origin);

  /// Adds the pattern files that ship with the program (compiled in from patterns/*.json).
  Status AddBuiltIn();

  enum class From : std::uint8_t { kAny, kUser, kBuiltIn };

  /// The rule of a parameter, from the shapes of its shards on all tensor-parallel ranks (one when
  /// tp is 1); files added by AddFile before built-in ones, which apply only in what ForModel
  /// returned.
  /// \pre !shards.empty()
  /// \error kBadInput if the rule does not fit the shards; names the rule and both sides
  Result<std::optional<Ruled>> RuleFor(const std::string& name, std::span<const Shape> shards,
                                       From from = From::kAny) const;

  /// Returns whether the user's files list a tensor as a frozen parameter (true) or as neither a
  /// parameter nor part of one (false); nothing if no file lists it.
  std::optional<bool> IsFrozenParameter(const std::string& name) const;

  /// The rule for a parameter of a whole shape; nothing also where a rule does not fit it.
  std::optional<layout::SplitRule> Find(const std::string& name, const Shape& shape) const;

  /// The patterns for one model: the user's files, and the built-in families whose `requires`
  /// expressions all match some name and whose `requires_shapes` hold. Cheap: rules are shared.
  /// \param shapes  of the parameters, whole or those of one tensor-parallel rank, by name
  /// \pre all_names.size() == shapes.size()
  Patterns ForModel(const std::vector<std::string>& all_names,
                    const std::vector<Shape>& shapes) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A rule in pattern-file form for a parameter that no rule covers, for messages: its choices and
/// the whole shape that each would give.
/// \pre !shards.empty()
std::string RuleToAdd(const std::string& name, std::span<const Shape> shards);

}  // namespace shardwright::checkpoints
