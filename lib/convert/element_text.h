// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "engine/layout/shard_map.h"
#include "engine/tensor/dtype.h"

namespace shardwright::convert {

/// Formats one element for people, such as "0.0125" or "17". Adds
/// the bits where the decimal number alone would hide a difference.
std::string ElementText(DType dtype, std::span<const std::byte> element);

/// Formats a plain value of an object graph: "0.001", "[0.9,
/// 0.95]", "'decay'". Cuts off a long value and appends "...".
std::string ValueText(const pickle::Node* node);

/// Returns one line for every scalar that differs, such as "step: 4 and 5". Pure.
std::vector<std::string> ScalarDifferences(const std::vector<checkpoints::Scalar>& a,
                                           const std::vector<checkpoints::Scalar>& b);

/// Returns one line for every hyper-parameter that differs, such as "lr: 0.001 and
/// 0.002". Compares values and ignores spelling: 1 equals 1.0, and a tuple equals a
/// list. A missing key equals the default that optimizers use for it. Of tensors among
/// the options, compares only type and shape. Ignores the name of an expert group, which
/// contains the size of its layout. If the formats differ (\param one_format is false),
/// compares only the keys that both groups have. The keys that define the training of a
/// parameter (lr, betas, eps, weight_decay) are compared even if one group lacks them,
/// unless a format records no options. Then HyperParams are used in their place.
/// Pure.
std::vector<std::string> GroupDifferences(const checkpoints::Group& a, const checkpoints::Group& b,
                                          bool one_format = true);

/// Pair of maps with the tensors of two checkpoints under the same names and states.
struct MapPair {
  layout::ShardMap a;
  layout::ShardMap b;
};

/// Two checkpoints, reduced to the properties that both formats record. Some formats do not record
/// whether a tensor is frozen or a buffer, or that two names are tied. Such properties are noted
/// and not compared between two formats; the elements are compared.
struct Alike {
  /// Maps of all tensors except those in `tied`. Empty if the maps are unchanged.
  std::optional<MapPair> maps;
  std::set<std::string> kinds;  ///< parameters of a kind that only one checkpoint records
  std::set<std::string> ties;   ///< names that only one checkpoint records as tied
  /// Tensors that one checkpoint stores separately and the other under a second name. There
  /// are several pairs, because a parameter can have many names, and a map contains it once.
  std::vector<MapPair> tied;
  std::vector<std::string> notes;  ///< one sentence each
};

/// Reduces two checkpoints to the properties that both formats record. Pure.
Alike MakeAlike(const checkpoints::Checkpoint& a, const checkpoints::Checkpoint& b);

}  // namespace shardwright::convert
