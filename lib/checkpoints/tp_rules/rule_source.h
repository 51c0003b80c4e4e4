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

/// Interface for information in a checkpoint about how its parameters are sharded.
class RuleSource {
 public:
  virtual ~RuleSource() = default;
  /// Returns the rule of a parameter, from the shapes of its shards on
  /// all tensor-parallel ranks; nothing if the source has no rule for it.
  /// \pre !shards.empty()
  /// \error kBadInput, kUnsupported  the source contradicts itself or the shapes of the shards
  /// Pure.
  virtual Result<std::optional<Ruled>> RuleFor(const std::string& name,
                                               std::span<const Shape> shards) const = 0;
};

/// Determines the rule of a parameter: from the user's pattern files, then from the first
/// of the checkpoint's own sources that has one, then from built-in families. If there is
/// no rule and only one shard, returns kUnknown; only targets with tp > 1 fail on it.
/// \pre !shards.empty()
/// \error kUnsupported  several shards and no rule; the message
///        contains the rule to add. Other errors as RuleSource::RuleFor
/// Pure.
Result<Ruled> DecideRule(std::span<const RuleSource* const> own, const Patterns& patterns,
                         const std::string& name, std::span<const Shape> shards);

/// Returns the cut for rank `rank` of `ranks` of a parameter, like layout::MakeCut.
/// Adds the parameter's name to errors and, if it has no rule, the rule to add.
/// \error as layout::MakeCut
/// Pure.
Result<layout::Cut> CutOf(const Param& param, std::uint64_t ranks, std::uint64_t rank);

}  // namespace shardwright::checkpoints
