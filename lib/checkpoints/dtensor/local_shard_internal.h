// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoints/dtensor/mesh_internal.h"
#include "engine/layout/mesh_cut.h"
#include "engine/tensor/dtype.h"
#include "engine/tensor/shape.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dtensor {

/// A piece of a tensor and the plain tensor with its elements.
struct LocalPiece {
  layout::Piece piece;
  const pickle::Node* local = nullptr;
};

/// One rank's pickled form of a tensor.
struct RankTensor {
  enum class Kind : std::uint8_t {
    kPlain,    ///< whole: every rank has all elements
    kDTensor,  ///< one piece, described by mesh and splits
    kSharded,  ///< pieces with their offsets: a ShardedTensor of FSDP1
  };
  Kind kind = Kind::kPlain;
  Shape shape;  ///< of the whole tensor
  DType dtype = DType::kF32;
  std::shared_ptr<const DeviceMesh> mesh;  ///< kDTensor
  std::vector<layout::MeshSplit> splits;   ///< kDTensor, by mesh dimension
  std::vector<LocalPiece> pieces;          ///< without empty ones
  std::vector<layout::Piece> all_pieces;   ///< kSharded: pieces of all ranks, in the file's order
};

/// Reads tensors of one rank's file. Reads a mesh that several tensors share only once.
class TensorReader {
 public:
  /// Creates a reader for a file of rank `rank`. The file's nodes must outlive it.
  explicit TensorReader(std::uint64_t rank) : rank_(rank) {}

  /// \error kBadInput  not a tensor, or its parts contradict each other; kUnsupported
  ///        pending sums over ranks (Partial), or other kinds of placements
  Result<RankTensor> Read(const pickle::Node* node);

 private:
  Result<RankTensor> ReadPlain(const pickle::Node* node) const;
  Result<RankTensor> ReadDTensor(const pickle::Node* args);
  Result<RankTensor> ReadSharded(const pickle::Node* args) const;
  Result<std::shared_ptr<const DeviceMesh>> MeshOf(const pickle::Node* node);

  std::uint64_t rank_;
  std::unordered_map<const pickle::Node*, std::shared_ptr<const DeviceMesh>> meshes_;
};

/// Returns true for a tensor of any kind.
bool IsTensor(const pickle::Node* node);

/// Pickles a DTensor.
/// \param local  the plain tensor of this rank
/// \param mesh  a node that MeshNode made, in the form `form`
/// \pre the splits have an order
const pickle::Node* DTensorNode(pickle::Arena& arena, const pickle::Node* local,
                                const pickle::Node* mesh, MeshForm form,
                                const std::vector<std::uint64_t>& mesh_sizes,
                                const std::vector<layout::MeshSplit>& splits, const Shape& shape,
                                DType dtype);

}  // namespace shardwright::checkpoints::dtensor
