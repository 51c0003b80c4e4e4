// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/megatron/args.h"
#include "checkpoints/tp_rules/rule_source.h"
#include "engine/layout/cut.h"
#include "engine/layout/rule.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// A parameter, independent of tensor-parallel ranks.
struct Whole {
  Shape shape;  ///< without padding
  layout::SplitRule rule;
  std::uint64_t padding = 0;  ///< padding rows after the vocabulary, which have no meaning
};

/// A part of a rank's shard: elements of the tensor or of
/// its padding, starting at element `first` of the shard.
struct Part {
  layout::CutPtr cut;
  std::uint64_t first = 0;
  bool padding = false;
};

/// Megatron-Core's sharding rules, by parameter name.
/// Source: docs/formats/megatron.md, "Tensor parallelism".
class Rules : public RuleSource {
 public:
  /// \param gated  the first linear layer of an MLP stacks a gate and the values that it multiplies
  Rules(const Args& args, bool gated) : args_(args), gated_(gated) {}

  /// \error kBadInput  shards that contradict the arguments: heads, vocabulary, halves of a gate
  Result<std::optional<Ruled>> RuleFor(const std::string& name,
                                       std::span<const Shape> shards) const override;

 private:
  Status CheckHeads(const std::string& name, std::uint64_t rows) const;

  Args args_;
  bool gated_;
};

/// Returns the whole shape and rule of a parameter, from the shards of all ranks.
/// \error kBadInput  the shards do not fit together; kUnsupported  no rule, prints one to add
/// Pure.
Result<Whole> WholeOf(const Rules& rules, const Patterns& patterns, const std::string& name,
                      std::span<const Shape> shards, const Args& args);

/// Returns the parts of rank `rank` of `ranks`: one or two.
/// \error as for layout::MakeCut; kUnsupported  the vocabulary is empty or not divisible
/// Pure.
Result<std::vector<Part>> PartsOf(const Whole& whole, std::uint64_t ranks, std::uint64_t rank);

/// Returns true if MLPs are gated, from parameters' names and whole or partial shapes.
/// \error kBadInput  rows of a first layer that fit neither kind of MLP; names it
Result<bool> IsGated(std::span<const std::string> names, std::span<const Shape> shapes);

/// Returns true if Megatron's optimizer applies weight decay to a parameter: to matrices, but not
/// to vectors and biases. Args has the exceptions.
/// \param shape  of the parameter or of a shard
/// Source: megatron/core/optimizer/__init__.py, get_standard_config_overrides (from 0.16) and
/// _get_param_groups (before).
bool HasDecay(const Args& args, std::string_view name, const Shape& shape);

/// Returns the number of tensor-parallel ranks that share a parameter. Experts may differ.
std::uint64_t RanksOf(const Args& args, std::string_view name);

}  // namespace shardwright::checkpoints::megatron
