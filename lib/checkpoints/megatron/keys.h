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

/// A key of torch_dist. It stands for one parameter, or for the same
/// parameter of all layers and experts, stacked along leading axes.
struct Key {
  ParamName name;        ///< without the layer and expert if an axis counts them
  bool layers = false;   ///< the first axis counts layers
  bool experts = false;  ///< the next axis counts experts

  std::size_t axes() const { return (layers ? 1U : 0U) + (experts ? 1U : 0U); }
  /// Returns the parameter name of one layer and expert.
  std::string Text(std::uint64_t layer, std::uint64_t expert) const;
};

/// Parses a key. \param key  key of a weight, without prefixes
Key ParseKey(std::string_view key, const Args& args);

/// Returns the key of a parameter. Key::layers and Key::experts are set if it is stacked.
Key KeyOf(std::string_view name, const Args& args);

/// Returns the text of a key as written in the checkpoint.
std::string KeyText(const Key& key);

/// A key of an object: "rng_state/shard_0.1_2.2".
struct ObjectKey {
  std::string name;
  std::vector<std::uint64_t> offset;  ///< in a grid of `shape`
  std::vector<std::uint64_t> shape;
};

/// Parses the key of an object. \error kBadInput  another form
Result<ObjectKey> ParseObjectKey(std::string_view key);
std::string ObjectKeyText(std::string_view name, const std::vector<std::uint64_t>& offset,
                          const std::vector<std::uint64_t>& shape);

/// A key of the distributed optimizer's buckets:
/// "chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16,
/// torch.float32).bucket_idx_3.exp_avg". Also the key of an
/// object stored with them ("...dp_group_idx_0.optimizer").
struct BucketKey {
  std::uint64_t part = 0;  ///< index in a chain of optimizers
  bool chained = false;
  std::uint64_t group = 0;  ///< model-parallel rank
  std::uint64_t buffer = 0;
  std::uint64_t bucket = 0;
  std::string dtypes;  ///< "(torch.bfloat16, torch.float32)"; empty for an object
  std::string slot;    ///< "exp_avg", or the object's name
};

/// Parses a key. Returns nothing for other keys.
std::optional<BucketKey> ParseBucketKey(std::string_view key);
std::string BucketKeyText(const BucketKey& key);

}  // namespace shardwright::checkpoints::megatron
