// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoints/megatron/args.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// Which layers of the model the chunks of pipeline stages hold: chunk v of stage p the layers
/// [begin, begin + count).
struct Stage {
  std::uint64_t begin = 0;
  std::uint64_t count = 0;
};

/// By chunk and stage: index v * pp + p, which is also the order of the chunks in the model.
/// \error kUnsupported  a layout of stages that the arguments list; kBadInput  layers that do not
///        divide; names both sides
/// Source: docs/formats/megatron.md, "Pipeline stages". Pure.
Result<std::vector<Stage>> StagesOf(const Args& args);

}  // namespace shardwright::checkpoints::megatron
