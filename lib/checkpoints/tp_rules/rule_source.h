// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/tp_rules/patterns.h"
#include "engine/layout/cut.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// What a checkpoint itself says about how tensor parallelism cuts its parameters.
class RuleSource {
 public:
  virtual ~RuleSource() = default;
  /// The rule of a parameter, from the shapes of its shards on all tensor-parallel ranks; nothing
  /// where the source is silent.
  /// \pre !shards.empty()
  /// \error kBadInput, kUnsupported  the source contradicts itself or the shards
  /// Pure.
  virtual Result<std::optional<Ruled>> RuleFor(const std::string& name,
                                               std::span<const Shape> shards) const = 0;
};

/// Decides how a parameter is cut: rules of the user's pattern files, then what the checkpoint's
/// own sources say, the first that speaks, then the built-in families. With one shard and nobody to
/// ask the rule is kUnknown, which only a target with tp > 1 refuses.
/// \pre !shards.empty()
/// \error kUnsupported if there are several shards and no rule: the text prints the rule to add;
///        and as RuleSource::RuleFor
/// Pure.
Result<Ruled> DecideRule(std::span<const RuleSource* const> own, const Patterns& patterns,
                         const std::string& name, std::span<const Shape> shards);

/// The cut of rank `rank` of `ranks` of a parameter: layout::MakeCut with the parameter's name in
/// the error, and where no rule is known the rule to add.
/// \error as layout::MakeCut
/// Pure.
Result<layout::Cut> CutOf(const Param& param, std::uint64_t ranks, std::uint64_t rank);

}  // namespace shardwright::checkpoints
