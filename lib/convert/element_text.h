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

/// One element as a person reads it: "0.0125", "17", and the bits where a number would hide the
/// difference.
std::string ElementText(DType dtype, std::span<const std::byte> element);

/// A plain value of an object graph as text: "0.001", "[0.9, 0.95]", "'decay'". A long one is cut
/// off, with "..." in place of the rest.
std::string ValueText(const pickle::Node* node);

/// A line for every scalar that differs: "step: 4 and 5".
std::vector<std::string> ScalarDifferences(const std::vector<checkpoints::Scalar>& a,
                                           const std::vector<checkpoints::Scalar>& b);

/// A line for every hyper-parameter that differs: "lr: 0.001 and 0.002". Values are compared, not
/// how a format spells them: 1 is 1.0, a tuple is a list. Of two formats only what both of them can
/// say is compared: a group without options says what its HyperParams hold, and of groups of two
/// formats (\param one_format is false) the keys that both have, and those without which nobody
/// knows how a parameter is trained (lr, betas, eps, weight_decay) if one of two trainers has them.
/// A key that one side lacks and the other has at the value which optimizers take without it is no
/// difference. The name of an expert group holds the size of its layout and is not compared; of
/// tensors among options only type and shape are.
/// Pure.
std::vector<std::string> GroupDifferences(const checkpoints::Group& a, const checkpoints::Group& b,
                                          bool one_format = true);

/// Tensors of two checkpoints under the same names and states.
struct MapPair {
  layout::ShardMap a;
  layout::ShardMap b;
};

/// Two checkpoints, reduced to the properties that both formats record. Some formats do not record
/// whether a tensor is frozen or a buffer, or that two names are tied. Such properties are noted
/// and not compared between two formats; the elements are compared.
struct Alike {
  /// All tensors except those in `tied`; nothing: the unchanged maps.
  std::optional<MapPair> maps;
  std::set<std::string> kinds;  ///< parameters whose kind only one side records
  std::set<std::string> ties;   ///< names that only one side records as tied
  /// Tensors that one side stores separately and the other as a second name of a tied parameter.
  /// There are several pairs, because a parameter can have many names and a map holds it once.
  std::vector<MapPair> tied;
  std::vector<std::string> notes;  ///< one sentence each
};

/// Reduces two checkpoints to the properties that both formats record. Pure.
Alike MakeAlike(const checkpoints::Checkpoint& a, const checkpoints::Checkpoint& b);

}  // namespace shardwright::convert
