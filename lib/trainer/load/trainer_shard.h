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

/// What one rank holds of one tensor of its trainer.
struct TrainerShard {
  std::string name;  ///< of the parameter or buffer
  std::string kind;  ///< kParam, "frozen", "buffer", "fp32", or a state of the optimizer
  Shape shape;       ///< of the whole tensor
  DType dtype = DType::kF32;
  layout::CutPtr cut;  ///< which elements, in which order
};

/// Parses the list of what a rank holds. Each is an object with "name", "kind", "shape", "dtype"
/// and one of: "first" and "count", a range of the flattened tensor; "mesh", "splits" and
/// "coordinate" as DTensors have them, where a split is ["replicate"], ["shard", DIM] or
/// ["strided", DIM, FACTOR]; "offset" and "sizes", a box of the tensor; none, for all of it.
/// \error kUsage  it is none; kBadInput  a range or split that leaves its tensor; names the tensor
/// Pure.
Result<std::vector<TrainerShard>> ParseShards(const nlohmann::json& list);

/// What ParseShards makes the same of again, by the boxes of its cut.
/// \pre !held.cut->is_composed(), and at most one box, as of ParseShards
/// Pure.
nlohmann::json ToJson(const TrainerShard& held);

/// "\"layer.weight\" exp_avg", for messages.
std::string Label(const TrainerShard& held);

}  // namespace shardwright::trainer
