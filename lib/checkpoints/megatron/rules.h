// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoints/megatron/args.h"
#include "checkpoints/tp_rules/rule_source.h"
#include "engine/layout/cut.h"
#include "engine/layout/rule.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// A parameter over all tensor-parallel ranks.
struct Whole {
  Shape shape;  ///< without padding
  layout::SplitRule rule;
  std::uint64_t padding = 0;  ///< rows of a vocabulary that follow, which belong to nobody
};

/// What a rank's shard holds: elements of the tensor, or of its padding, from shard element `first`
/// on.
struct Part {
  layout::CutPtr cut;
  std::uint64_t first = 0;
  bool padding = false;
};

/// How Megatron-Core cuts parameters, by their names.
/// Source: docs/formats/megatron.md, "Tensor parallelism".
class Rules : public RuleSource {
 public:
  /// \param gated  the first linear layer of an MLP is a gate and what it gates
  Rules(const Args& args, bool gated) : args_(args), gated_(gated) {}

  /// \error kBadInput  shards that do not fit the arguments: heads, vocabulary, halves of a gate
  Result<std::optional<Ruled>> RuleFor(const std::string& name,
                                       std::span<const Shape> shards) const override;

 private:
  Status CheckHeads(const std::string& name, std::uint64_t rows) const;

  Args args_;
  bool gated_;
};

/// The whole of a parameter, from the shards of all ranks.
/// \error kBadInput  they do not fit together; kUnsupported  no rule, the text prints one to add
/// Pure.
Result<Whole> WholeOf(const Rules& rules, const Patterns& patterns, const std::string& name,
                      std::span<const Shape> shards, const Args& args);

/// What rank `rank` of `ranks` holds; one or two parts.
/// \error as layout::MakeCut; kUnsupported  a vocabulary that does not divide, or has no rows
/// Pure.
Result<std::vector<Part>> PartsOf(const Whole& whole, std::uint64_t ranks, std::uint64_t rank);

/// Whether MLPs are gated, from the names and whole or partial shapes of a model's parameters.
/// \error kBadInput  rows of a first layer that fit neither; names it
Result<bool> IsGated(std::span<const std::string> names, std::span<const Shape> shapes);

/// Tensor-parallel ranks that share a parameter: experts have their own number.
std::uint64_t RanksOf(const Args& args, std::string_view name);

}  // namespace shardwright::checkpoints::megatron
