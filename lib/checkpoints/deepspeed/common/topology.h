// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/layout.h"

namespace shardwright::checkpoints {

/// How a DeepSpeed job is spread over ranks: the layout of its native and universal folders.
struct Topology {
  std::uint64_t zero = 0;  ///< ZeRO stage
  std::uint64_t dp = 1;    ///< ranks over which ZeRO partitions (data times sequence parallel)
  std::uint64_t tp = 1;
  std::uint64_t pp = 1;
  std::uint64_t ep = 1;
  DType dtype = DType::kF32;  ///< of the compute weights
  bool bf16_optimizer =
      false;  ///< BF16_Optimizer shards: partitions saved with padding, no zero_stage
  std::uint64_t sub_group = 1'000'000'000;  ///< ZeRO-3 sub_group_size, elements per rank
  bool round_robin = false;
  bool pipeline = false;  ///< a pipeline module (layer files), also with pp = 1
  std::vector<std::vector<std::uint32_t>>
      stages;  ///< layer indices by pipeline stage (layers with state)

  std::uint64_t mp() const { return tp * pp; }
};

/// The neutral layout of a topology; without ranks.
Layout LayoutOf(const Topology& topology);

/// The topology of a layout; of one that DeepSpeed does not know, what its mesh amounts to: ZeRO
/// stage 1 over all data-parallel ranks.
Topology TopologyOf(const Layout& layout);

/// True if native files of both layouts hold the same.
bool SameFiles(const Layout& a, const Layout& b);

}  // namespace shardwright::checkpoints
