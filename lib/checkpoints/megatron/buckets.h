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
  bool shared = false;  ///< an embedding that another stage also has: gets its own bucket
};

/// Positions of parameters in a gradient buffer, and therefore in the distributed
/// optimizer's files. Buckets are stored without the padding at their end.
struct Buffer {
  std::vector<std::uint64_t> offsets;    ///< by parameter, in its bucket
  std::vector<std::uint32_t> bucket_of;  ///< by parameter
  std::vector<std::uint64_t>
      unpadded;  ///< elements of each bucket, including the gaps between its parameters
  std::vector<std::uint64_t> padded;

  /// Returns the number of elements in all buckets.
  std::uint64_t stored() const;
  /// Returns the offset of a parameter if buckets are stored consecutively.
  std::uint64_t stored_offset(std::size_t param) const;
};

/// Rules for closing a bucket.
struct BucketRule {
  std::optional<std::uint64_t> elems;  ///< a bucket of this size is full; nothing: no limit
  std::uint64_t shards = 1;            ///< ranks that share a bucket
  bool pad_for_network = false;
};

/// Lays out parameters in the reverse order of the model, each at a multiple of 64 elements.
/// \param params  in model order
/// Source: docs/formats/megatron.md, "Buffers". Pure.
Buffer LayOut(std::span<const BufferParam> params, const BucketRule& rule);

/// Lays out parameters in buckets of the numbers of elements that a checkpoint records.
/// \error kBadInput  the parameters do not fill the buckets; names both numbers
/// Pure.
Result<Buffer> LayOutIn(std::span<const BufferParam> params,
                        std::span<const std::uint64_t> unpadded);

/// Parameters that share a buffer.
struct BufferOf {
  DType dtype = DType::kF32;
  std::vector<std::size_t> params;  ///< ascending
};

/// Returns the buffers of a virtual chunk, one for each type of
/// its parameters, ordered by the first parameter of each type.
/// \param types  by parameter, in model order
/// Pure.
std::vector<BufferOf> BuffersOf(std::span<const DType> types);

/// Returns the type in which a run accumulates the gradients of parameters.
DType GradientType(const Args& args, DType dtype);

/// Checks that Megatron-Core can load these buckets from torch_dist.
/// \param params  the parameters in `buffer`
/// \param shards  number of ranks that share a bucket
/// \error kUnsupported  a rank has no parameter in a bucket
/// Pure.
Status CheckLoadable(std::span<const BufferParam> params, const Buffer& buffer,
                     std::uint64_t shards);

/// Returns the bucket rule for a chunk of a stage.
/// \param elems  elements of all parameters on the stage's ranks
/// Pure.
BucketRule BucketRuleOf(const Args& args, std::uint64_t stage, std::uint64_t chunk,
                        std::uint64_t elems, bool experts);

}  // namespace shardwright::checkpoints::megatron
