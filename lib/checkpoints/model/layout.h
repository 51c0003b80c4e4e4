// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/tensor/dtype.h"

namespace shardwright::checkpoints {

/// Ranks of a training job by kind of parallelism, in terms
/// that are common to all trainers. An unused dimension is 1.
struct Mesh {
  std::uint64_t dp_replicate = 1;  ///< complete copies of the state
  std::uint64_t dp_shard = 1;      ///< ranks over which data parallelism shards the state
  std::uint64_t tp = 1;            ///< tensor parallel
  std::uint64_t pp = 1;            ///< pipeline stages
  std::uint64_t ep = 1;            ///< expert parallel, within the data-parallel ranks
  std::uint64_t cp = 1;            ///< context parallel

  std::uint64_t dp() const { return dp_replicate * dp_shard; }
};

/// Layout settings beyond the mesh that only their own format understands.
struct OwnLayout {
  virtual ~OwnLayout() = default;
  /// Returns the whole layout as a JSON object with keys in
  /// a fixed order, for manifests, reports and messages.
  virtual std::string Json() const = 0;
};

/// Distribution of training state over ranks and files, of a source or of a target.
struct Layout {
  Mesh mesh;
  DType dtype = DType::kF32;           ///< of the compute weights
  std::optional<std::uint64_t> ranks;  ///< rank count of its files; nothing: suits any number
  std::shared_ptr<const OwnLayout> own;
  /// --target keys that are not part of the layout, as the manifest names them: "loader", "auto".
  std::vector<std::pair<std::string, std::string>> options;

  /// Returns the value of an option, or empty if it is not set.
  std::string_view Option(std::string_view key) const;
  /// Like OwnLayout::Json; without `own`, describes only mesh and dtype.
  std::string Json() const;
};

}  // namespace shardwright::checkpoints
