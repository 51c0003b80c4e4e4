// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "checkpoints/megatron/args.h"
#include "engine/tensor/dtype.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// A parameter of a gradient buffer.
struct BufferParam {
  std::uint64_t elems = 0;
  bool shared = false;  ///< an embedding that another stage has too: a bucket of its own
};

/// Where parameters lie in a gradient buffer, and so in what the distributed optimizer saves of it.
/// Buckets are stored without the padding at their end.
struct Buffer {
  std::vector<std::uint64_t> offsets;    ///< by parameter, in its bucket
  std::vector<std::uint32_t> bucket_of;  ///< by parameter
  std::vector<std::uint64_t>
      unpadded;  ///< elements of each bucket, gaps between parameters counted
  std::vector<std::uint64_t> padded;

  /// Elements of all buckets.
  std::uint64_t stored() const;
  /// Of a parameter, buckets laid end to end.
  std::uint64_t stored_offset(std::size_t param) const;
};

/// How buckets are closed.
struct BucketRule {
  std::optional<std::uint64_t> elems;  ///< a bucket of so many is full; nothing: no limit
  std::uint64_t shards = 1;            ///< ranks that share out a bucket
  bool pad_for_network = false;
};

/// Parameters lie in the reverse of their order in the model, each at a multiple of 64 elements.
/// \param params  in the order of the model
/// Source: docs/formats/megatron.md, "Buffers". Pure.
Buffer LayOut(std::span<const BufferParam> params, const BucketRule& rule);

/// The same where a checkpoint tells how many elements its buckets have.
/// \error kBadInput  the parameters do not fill them; names both sides
/// Pure.
Result<Buffer> LayOutIn(std::span<const BufferParam> params,
                        std::span<const std::uint64_t> unpadded);

/// Parameters that share a buffer.
struct BufferOf {
  DType dtype = DType::kF32;
  std::vector<std::size_t> params;  ///< ascending
};

/// The buffers of a virtual chunk: one for each type of its parameters, in the order of the first
/// of each.
/// \param types  by parameter, in the order of the model
/// Pure.
std::vector<BufferOf> BuffersOf(std::span<const DType> types);

/// The type in which gradients of parameters are summed.
DType GradientType(const Args& args, DType dtype);

/// Checks buckets against what Megatron-Core loads from torch_dist.
/// \param params  those that were laid out
/// \param shards  ranks that share out a bucket
/// \error kUnsupported  a rank has no parameter in a bucket
/// Pure.
Status CheckLoadable(std::span<const BufferParam> params, const Buffer& buffer,
                     std::uint64_t shards);

/// The rule of a chunk of a stage.
/// \param elems  of all parameters of the stage's ranks
/// Pure.
BucketRule BucketRuleOf(const Args& args, std::uint64_t stage, std::uint64_t chunk,
                        std::uint64_t elems, bool experts);

}  // namespace shardwright::checkpoints::megatron
