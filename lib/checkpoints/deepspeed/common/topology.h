// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/layout.h"

namespace shardwright::checkpoints {

/// The layout of native and universal folders: how a DeepSpeed job distributes state over ranks.
struct Topology {
  std::uint64_t zero = 0;  ///< ZeRO stage
  std::uint64_t dp = 1;    ///< ranks over which ZeRO partitions (data times sequence parallel)
  std::uint64_t tp = 1;
  std::uint64_t pp = 1;
  std::uint64_t ep = 1;
  DType dtype = DType::kF32;  ///< type of the compute weights
  bool bf16_optimizer =
      false;  ///< BF16_Optimizer shards: partitions include padding, no zero_stage
  std::uint64_t sub_group = 1'000'000'000;  ///< ZeRO-3 sub_group_size, elements per rank
  bool round_robin = false;
  bool pipeline = false;  ///< a pipeline module (layer files), also with pp = 1
  std::vector<std::vector<std::uint32_t>>
      stages;  ///< layer indices by pipeline stage (layers with state)

  std::uint64_t mp() const { return tp * pp; }
};

/// Returns the format-independent layout of a topology, without ranks.
Layout LayoutOf(const Topology& topology);

/// Returns the topology of a layout. A layout of another format
/// becomes ZeRO stage 1 over all data-parallel ranks of its mesh.
Topology TopologyOf(const Layout& layout);

/// Returns true if native files have the same contents in both layouts.
bool SameFiles(const Layout& a, const Layout& b);

}  // namespace shardwright::checkpoints
