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

// How the dimensions of a device mesh cut a tensor: the arithmetic of PyTorch's DTensor, which
// FSDP2, DCP and per-rank files share. A mesh is the list of its sizes, outermost first; every rank
// has a coordinate in it. All of it is pure.
// Where a tensor that is cut twice along one dimension has so few rows that a rank of the second
// cut gets none, this is what FSDP2's ranks hold (a part of the part that tensor parallelism left);
// PyTorch's own function for a rank's offsets gives other rows there.
// Source: PyTorch 2.15, torch/distributed/tensor: placement_types.py and _utils.py; FSDP2's
// _fsdp_param.py. Checked by execution.

/// What one dimension of a mesh does with a tensor.
struct MeshSplit {
  enum class Kind : std::uint8_t {
    kReplicate,  ///< every rank holds the same
    kShard,      ///< ranks share out a dimension of the tensor
    /// The same, but only after mesh dimensions further right have shared it out among
    /// `split_factor` ranks: FSDP2 on a dimension that tensor parallelism has cut before.
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

/// Which mesh dimensions cut a dimension of a tensor, the first that does so first.
struct SplitOrder {
  std::uint32_t dim = 0;                 ///< of the tensor
  std::vector<std::uint32_t> mesh_dims;  ///< in the order in which they are applied

  friend bool operator==(const SplitOrder&, const SplitOrder&) = default;
};

/// The order in which the splits of a mesh are applied, by tensor dimension, ascending: left to
/// right, but for strided shards, each of which comes where the ranks before it are its factor.
/// \param sizes   of the mesh, none 0
/// \param splits  one for each mesh dimension
/// \error kBadInput  not one split for each mesh dimension; a size or factor of 0; a strided shard
///        whose factor fits no order
Result<std::vector<SplitOrder>> OrderOf(std::span<const std::uint64_t> sizes,
                                        std::span<const MeshSplit> splits);

/// A box of a tensor: what one rank holds. No element where an extent is 0.
struct Piece {
  std::vector<std::uint64_t> offset;
  Shape sizes;

  bool empty() const;
  friend bool operator==(const Piece&, const Piece&) = default;
};

/// The piece of a tensor that the rank at `coordinate` of a mesh holds: each step cuts the interval
/// so far in equal parts, rounded up, of which the last may be smaller or empty.
/// \param shape  of the whole tensor
/// \param order  of OrderOf, or what a file says; mesh dimensions that are not in it replicate
/// \error kBadInput  a coordinate outside the mesh; a tensor or mesh dimension that does not exist,
///        or is named twice
Result<Piece> PieceAt(std::span<const std::uint64_t> shape, std::span<const std::uint64_t> sizes,
                      std::span<const SplitOrder> order, std::span<const std::uint64_t> coordinate);

/// The same, in the order that follows from the splits. \error as OrderOf and the other
Result<Piece> PieceAt(std::span<const std::uint64_t> shape, std::span<const std::uint64_t> sizes,
                      std::span<const MeshSplit> splits, std::span<const std::uint64_t> coordinate);

/// The cut of a shard that is exactly `piece` of a tensor; with an empty piece it holds nothing.
/// \error kBadInput  the piece leaves the tensor
Result<Cut> CutOf(const Shape& shape, const Piece& piece);

/// Where a rank stands in a mesh whose ranks are numbered row-major. \pre position < product
std::vector<std::uint64_t> CoordinateOf(std::span<const std::uint64_t> sizes,
                                        std::uint64_t position);

/// True for one rank of those that hold the same piece: coordinate 0 wherever the mesh replicates.
bool IsFirstCopy(std::span<const MeshSplit> splits, std::span<const std::uint64_t> coordinate);

/// What a writer needs: the split of the mesh dimension that fully_shard adds in front of those
/// that have cut a parameter before (tensor or expert parallelism): Shard(dim), strided if they cut
/// the same dimension.
/// \param inner_sizes, inner  of the mesh dimensions to the right of it
MeshSplit FullyShard(std::uint32_t dim, std::span<const std::uint64_t> inner_sizes,
                     std::span<const MeshSplit> inner);

}  // namespace shardwright::layout
