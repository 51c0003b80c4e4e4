// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/megatron/args.h"
#include "checkpoints/megatron/names.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// What a key of torch_dist stands for: one parameter, or all that are alike in every layer and
/// expert, stacked along leading axes.
struct Key {
  ParamName name;        ///< without the layer and expert that an axis counts
  bool layers = false;   ///< the first axis counts layers
  bool experts = false;  ///< the next axis counts experts

  std::size_t axes() const { return (layers ? 1U : 0U) + (experts ? 1U : 0U); }
  /// The name of one of them.
  std::string Text(std::uint64_t layer, std::uint64_t expert) const;
};

/// \param key  of a weight, without prefixes
Key ParseKey(std::string_view key, const Args& args);

/// The key of a parameter, and whether it is one of a stack.
Key KeyOf(std::string_view name, const Args& args);

/// As it stands in the checkpoint.
std::string KeyText(const Key& key);

/// A key of an object: "rng_state/shard_0.1_2.2".
struct ObjectKey {
  std::string name;
  std::vector<std::uint64_t> offset;  ///< in a grid of `shape`
  std::vector<std::uint64_t> shape;
};

/// \error kBadInput  another form
Result<ObjectKey> ParseObjectKey(std::string_view key);
std::string ObjectKeyText(std::string_view name, const std::vector<std::uint64_t>& offset,
                          const std::vector<std::uint64_t>& shape);

/// A key of the distributed optimizer's buckets:
/// "chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16,
/// torch.float32).bucket_idx_3.exp_avg", or of an object beside them
/// ("...dp_group_idx_0.optimizer").
struct BucketKey {
  std::uint64_t part = 0;  ///< of a chain of optimizers
  bool chained = false;
  std::uint64_t group = 0;  ///< model-parallel rank
  std::uint64_t buffer = 0;
  std::uint64_t bucket = 0;
  std::string dtypes;  ///< "(torch.bfloat16, torch.float32)"; empty for an object
  std::string slot;    ///< "exp_avg", or the object's name
};

/// Nothing for another key.
std::optional<BucketKey> ParseBucketKey(std::string_view key);
std::string BucketKeyText(const BucketKey& key);

}  // namespace shardwright::checkpoints::megatron
