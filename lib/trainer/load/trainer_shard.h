// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "engine/layout/cut.h"
#include "engine/tensor/dtype.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::trainer {

/// A parameter that is trained: its compute weight. Other kinds are those of
/// engine/layout/states.h.
inline constexpr std::string_view kParam = "param";

/// One rank's shard of one tensor of its trainer.
struct TrainerShard {
  std::string name;  ///< of the parameter or buffer
  std::string kind;  ///< kParam, "frozen", "buffer", "fp32", or a state of the optimizer
  Shape shape;       ///< of the whole tensor
  DType dtype = DType::kF32;
  layout::CutPtr cut;  ///< its elements and their order
};

/// Parses the list of a rank's shards. Each is an object with "name", "kind", "shape", "dtype" and
/// the keys of one form: "first" and "count", a range of the flattened tensor; "mesh", "splits" and
/// "coordinate" as in DTensors, where a split is ["replicate"], ["shard", DIM] or ["strided", DIM,
/// FACTOR]; "offset" and "sizes", a box of the tensor; no key: the whole tensor.
/// \error kUsage  not such a list; kBadInput  a range or split exceeds its tensor; names the tensor
/// Pure.
Result<std::vector<TrainerShard>> ParseShards(const nlohmann::json& list);

/// Inverse of ParseShards for one shard. Writes the boxes of its cut.
/// \pre `!held.cut->is_composed()`, and at most one box, as ParseShards makes them
/// Pure.
nlohmann::json ToJson(const TrainerShard& held);

/// Formats a shard for messages: "\"layer.weight\" exp_avg".
std::string Label(const TrainerShard& held);

}  // namespace shardwright::trainer
