#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "layout/rule.h"
#include "tensor/shape.h"

namespace shardwright::dialect {

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
  /// and rule
  Status AddFile(std::string_view text, const std::string& origin);

  /// Adds the pattern files that ship with the program (compiled in from patterns/*.json).
  Status AddBuiltIn();

  /// The rule for a parameter of a whole or TP-local shape; files added by AddFile before built-in
  /// ones. A built-in family applies only when all its `requires` expressions match some name of
  /// `all_names`.
  std::optional<layout::SplitRule> Find(const std::string& name, const Shape& shape) const;

  /// Chooses which built-in families apply to a model, by its parameter names. Call once before
  /// Find.
  void SelectFor(const std::vector<std::string>& all_names);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Split rules from `universal_checkpoint_info` (versions 0.0-0.4 and affine_map), Python
/// expressions matched at the start of the name: see universal_info.h.

}  // namespace shardwright::dialect
