// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/megatron/buckets.h"
#include "checkpoints/megatron/holdings.h"
#include "checkpoints/megatron/write/write_internal.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// A parameter of a rank.
struct Mine {
  std::uint32_t param = 0;
  std::string name;  ///< name on this rank
  Shape shape;       ///< shape of its shard
  bool shared = false;
  bool copy = false;  ///< the last stage's copy of the embedding
};

/// A gradient buffer of a rank.
struct StateBuffer {
  DType dtype = DType::kF32;  ///< type of its parameters
  DType gradient = DType::kF32;
  std::vector<Mine> mine;
  Buffer buffer;
  /// States in the buffer for each parameter: first the master weight, named "param" there.
  std::vector<std::string> states;
};

/// Returns "param" for master weights, otherwise the state.
std::string_view SlotOf(std::string_view state);

/// Checks that the optimizer of a checkpoint can be written as gradient buffers of torch_dist.
/// \error kUnsupported  Megatron-Core cannot load the buffers, or their order is unknown
/// Pure.
Status CheckBuffers(const Writing& w);

/// Computes the parameters of each rank of a target, and adds their fragments to it.
class Shards {
 public:
  /// \param order  order of the parameters in the model
  Shards(Writing& writing, std::vector<Stage> stages, std::vector<std::uint32_t> order)
      : w_(writing),
        stages_(std::move(stages)),
        order_(std::move(order)),
        chained_(IsChained(writing.source, writing.to)) {}

  /// Returns the parameters of a virtual chunk on a rank, in model order.
  Result<std::vector<Mine>> MineOf(const Rank& rank, std::uint64_t chunk) const;
  /// Returns the trained parameters in `mine` that belong to one optimizer of a chain.
  std::vector<Mine> PartOf(const std::vector<Mine>& mine, bool experts) const;

  /// Adds a rank's shard of a parameter in a state. `array` contains it from element `first` on.
  Status AddShard(const Rank& rank, const Mine& mine, std::string_view state, DType dtype,
                  std::uint32_t array, std::uint64_t first);

  /// Lays out the gradient buffers of a rank.
  /// \param chunks  the rank's parameters, by virtual chunk
  /// \error kUnsupported  torch_dist: as for CheckLoadable; a parameter lacks a state
  Result<std::vector<StateBuffer>> BuffersOf(const Rank& rank,
                                             const std::vector<std::vector<Mine>>& chunks,
                                             bool experts) const;

  bool chained() const { return chained_; }
  const std::vector<Stage>& stages() const { return stages_; }

 private:
  Result<std::vector<Part>> PartsFor(const Whole& whole, const Param& param, std::uint64_t t) const;
  Result<StateBuffer> BufferOf(const Rank& rank, std::vector<Mine> mine, std::uint64_t chunk,
                               bool experts) const;

  Writing& w_;
  std::vector<Stage> stages_;
  std::vector<std::uint32_t> order_;
  bool chained_;
  std::set<std::pair<std::uint32_t, std::uint64_t>> owned_;  // tensor, tensor rank
};

}  // namespace shardwright::checkpoints::megatron
