// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoints/dtensor/flat_units_internal.h"
#include "checkpoints/dtensor/layout_internal.h"
#include "checkpoints/model/checkpoint.h"
#include "checkpoints/pickled/document.h"
#include "engine/layout/mesh_cut.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dtensor {

/// A tensor of the target: a parameter in one of its states.
struct StateTensor {
  std::uint32_t param = 0;  ///< index into FilesPlan::params
  std::string state;        ///< source state, from engine/layout/states.h
  DType dtype = DType::kF32;
};

/// Output form of a parameter.
struct PlannedParam {
  Param param;                            ///< without scalars
  bool plain = false;                     ///< every rank has the whole parameter
  bool on_whole_mesh = true;              ///< otherwise on the part without tensor parallelism
  std::vector<layout::MeshSplit> splits;  ///< by dimension of its mesh
  std::uint32_t model = 0;                ///< index into FilesPlan::tensors
  std::vector<std::uint32_t> states;      ///< indices into FilesPlan::tensors, by state name
  std::vector<Scalar> scalars;            ///< scalars of the optimizer
};

/// A parameter group of the target.
struct PlannedGroup {
  const pickle::Node* options = nullptr;  ///< without the list of parameters
  std::vector<Scalar> tensors;            ///< as Group::tensors: options written as tensors
  std::vector<std::uint32_t> params;      ///< indices into FilesPlan::params, in the group's order
};

/// All inputs of the writer of files. Outlives the source checkpoint.
struct FilesPlan {
  FilesLayout layout;
  std::vector<PlannedParam> params;  ///< in the model's order
  std::map<std::string, std::uint32_t> by_name;
  std::vector<StateTensor> tensors;
  bool has_optimizer = false;
  std::vector<PlannedGroup> groups;
  std::vector<FlatUnit> units;            ///< fsdp_version 1: units of `flat`
  std::vector<std::uint32_t> flat;        ///< fsdp_version 1: indices into params
  std::shared_ptr<const OwnFiles> own;    ///< the source's own files to write unchanged, or null
  std::shared_ptr<pickle::Arena> made;    ///< owns nodes of the plan
  std::shared_ptr<pickle::Arena> source;  ///< owns the nodes that the plan shares with the source
  std::vector<std::string> not_carried;

  /// Returns the whole mesh, or the part without tensor parallelism, from the view of `rank`.
  DeviceMesh MeshOf(std::uint64_t rank, bool whole) const;
  /// Returns the piece of a parameter on `rank`. \pre the parameter is not plain
  Result<layout::Piece> PieceOf(const PlannedParam& param, std::uint64_t rank) const;
  /// Returns true if this rank owns a parameter's piece (Role::kOwner). Others have replicas.
  bool Owns(const PlannedParam& param, std::uint64_t rank) const;
  /// Returns the number of ranks that share a flat vector. FlatLength: elements of `unit` per rank.
  std::uint64_t shards() const;
  std::uint64_t FlatLength(std::size_t unit) const;
};

/// \error kUnsupported  contents that files of this kind cannot store
/// Pure.
Result<FilesPlan> MakePlan(const Checkpoint& source, const FilesLayout& layout);

/// Numbers of flat vectors in Fill::tensor begin here: unit * states + state.
inline constexpr std::uint32_t kFlatTensors = 1U << 31;

// Build the object graphs of one rank's files.
Result<std::unique_ptr<Document>> ModelDocument(const FilesPlan& plan, std::uint64_t rank);
Result<std::unique_ptr<Document>> OptimizerDocument(const FilesPlan& plan, std::uint64_t rank);
Result<std::unique_ptr<Document>> OwnDocument(const FilesPlan& plan, std::size_t item,
                                              std::uint64_t rank);

/// Returns the bytes of torch_checkpointing's metadata.pkl.
Result<std::string> ItemTableBytes(const FilesPlan& plan);

}  // namespace shardwright::checkpoints::dtensor
