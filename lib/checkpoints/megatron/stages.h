// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoints/megatron/args.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// Layers of the model in a chunk of a pipeline stage.
/// Chunk v of stage p has the layers [begin, begin + count).
struct Stage {
  std::uint64_t begin = 0;
  std::uint64_t count = 0;
};

/// Returns the layers of all chunks, at index v * pp + p, which is also the model's order.
/// \error kUnsupported  the arguments list an explicit layout of stages;
///        kBadInput the layers are not divisible; names both numbers
/// Source: docs/formats/megatron.md, "Pipeline stages". Pure.
Result<std::vector<Stage>> StagesOf(const Args& args);

}  // namespace shardwright::checkpoints::megatron
