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

/// Ranks of a training job by what they share out, in the words of every trainer. A dimension that
/// nobody uses is 1.
struct Mesh {
  std::uint64_t dp_replicate = 1;  ///< copies of the state, each whole
  std::uint64_t dp_shard = 1;      ///< ranks over which data parallelism shares out the state
  std::uint64_t tp = 1;            ///< tensor parallel
  std::uint64_t pp = 1;            ///< pipeline stages
  std::uint64_t ep = 1;            ///< expert parallel, within the data-parallel ranks
  std::uint64_t cp = 1;            ///< context parallel

  std::uint64_t dp() const { return dp_replicate * dp_shard; }
};

/// What a layout has beyond the mesh, understood by its format only.
struct OwnLayout {
  virtual ~OwnLayout() = default;
  /// The whole layout as a JSON object, its keys in a fixed order: what manifests, reports and
  /// messages show.
  virtual std::string Json() const = 0;
};

/// How training was, or will be, spread over ranks and files.
struct Layout {
  Mesh mesh;
  DType dtype = DType::kF32;           ///< of the compute weights
  std::optional<std::uint64_t> ranks;  ///< that its files are for; nothing: for any number
  std::shared_ptr<const OwnLayout> own;
  /// Keys of --target that are no part of the layout, as the manifest names them: "loader", "auto".
  std::vector<std::pair<std::string, std::string>> options;

  /// The value of an option, empty without it.
  std::string_view Option(std::string_view key) const;
  /// As OwnLayout::Json, or mesh and dtype where there is nothing more.
  std::string Json() const;
};

}  // namespace shardwright::checkpoints
