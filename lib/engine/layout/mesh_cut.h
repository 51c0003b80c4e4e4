// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/layout/cut.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::layout {

// Computes how a device mesh shards a tensor, like PyTorch's DTensor. FSDP2, DCP and
// per-rank files all use this arithmetic. A mesh is the list of its sizes, outermost first,
// and every rank has a coordinate in it. All functions are pure. If two mesh dimensions cut
// the same tensor dimension and it has few rows, a rank of the second cut may get none.
// These functions then compute the rows that FSDP2's ranks have (a part of the
// tensor-parallel part); PyTorch's own function for a rank's offsets returns other rows.
// Source: PyTorch 2.15, torch/distributed/tensor: placement_types.py
// and _utils.py; FSDP2's _fsdp_param.py. Checked by execution.

/// Placement of a tensor along one dimension of a mesh.
struct MeshSplit {
  enum class Kind : std::uint8_t {
    kReplicate,  ///< every rank has the same elements
    kShard,      ///< ranks divide a dimension of the tensor
    /// Like kShard, but applied after mesh dimensions further right have divided the dimension
    /// among `split_factor` ranks: FSDP2 on a dimension that tensor parallelism already cuts.
    kStridedShard,
  };
  Kind kind = Kind::kReplicate;
  std::uint32_t dim = 0;           ///< of the tensor; not kReplicate
  std::uint64_t split_factor = 1;  ///< kStridedShard

  static MeshSplit Replicate() { return {}; }
  static MeshSplit Shard(std::uint32_t dim) { return {Kind::kShard, dim, 1}; }
  static MeshSplit StridedShard(std::uint32_t dim, std::uint64_t split_factor) {
    return {Kind::kStridedShard, dim, split_factor};
  }
  bool shards() const { return kind != Kind::kReplicate; }

  friend bool operator==(const MeshSplit&, const MeshSplit&) = default;
};

/// "Replicate", "Shard(0)", "StridedShard(0, 2)".
std::string Explain(const MeshSplit& split);

/// "(StridedShard(0, 2), Shard(0))".
std::string Explain(std::span<const MeshSplit> splits);

/// Lists the mesh dimensions that cut a dimension of a tensor, in order of application.
struct SplitOrder {
  std::uint32_t dim = 0;                 ///< of the tensor
  std::vector<std::uint32_t> mesh_dims;  ///< in the order in which they are applied

  friend bool operator==(const SplitOrder&, const SplitOrder&) = default;
};

/// Returns the order in which the splits of a mesh are applied, per tensor dimension, ascending.
/// It is left to right; a strided shard follows the dimensions with a product equal to its factor.
/// \param sizes   of the mesh, none 0
/// \param splits  one for each mesh dimension
/// \error kBadInput  wrong number of splits; a size or factor
///        is 0; the factor of a strided shard fits no order
Result<std::vector<SplitOrder>> OrderOf(std::span<const std::uint64_t> sizes,
                                        std::span<const MeshSplit> splits);

/// A box of a tensor: the part of one rank. It is empty if an extent is 0.
struct Piece {
  std::vector<std::uint64_t> offset;
  Shape sizes;

  bool empty() const;
  friend bool operator==(const Piece&, const Piece&) = default;
};

/// Returns the piece of a tensor for the rank at `coordinate` of a mesh. Each step cuts the
/// current interval into equal parts, rounded up; the last ones may be smaller or empty.
/// \param shape  of the whole tensor
/// \param order  from OrderOf or from a file; the tensor is replicated over other mesh dimensions
/// \error kBadInput  a coordinate is outside the mesh; a tensor
///        or mesh dimension does not exist or appears twice
Result<Piece> PieceAt(std::span<const std::uint64_t> shape, std::span<const std::uint64_t> sizes,
                      std::span<const SplitOrder> order, std::span<const std::uint64_t> coordinate);

/// Same as above, in the order of OrderOf(sizes, splits). \error as OrderOf and the overload above
Result<Piece> PieceAt(std::span<const std::uint64_t> shape, std::span<const std::uint64_t> sizes,
                      std::span<const MeshSplit> splits, std::span<const std::uint64_t> coordinate);

/// Makes the cut of a shard that is exactly `piece` of a tensor. An empty piece gives an empty cut.
/// \error kBadInput  the piece leaves the tensor
Result<Cut> CutOf(const Shape& shape, const Piece& piece);

/// Returns the coordinate of a rank in a mesh numbered row-major. \pre position < product
std::vector<std::uint64_t> CoordinateOf(std::span<const std::uint64_t> sizes,
                                        std::uint64_t position);

/// Returns true for one rank per distinct piece: coordinate 0 in all replicated mesh dimensions.
bool IsFirstCopy(std::span<const MeshSplit> splits, std::span<const std::uint64_t> coordinate);

/// Returns the split that fully_shard uses for the mesh dimension that it adds in
/// front of those that cut a parameter already (tensor or expert parallelism):
/// Shard(dim), strided if they cut the same dimension. For writers.
/// \param inner_sizes, inner  mesh dimensions to the right of the new one
MeshSplit FullyShard(std::uint32_t dim, std::span<const std::uint64_t> inner_sizes,
                     std::span<const MeshSplit> inner);

}  // namespace shardwright::layout
