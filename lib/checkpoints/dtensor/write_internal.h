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

/// A tensor to be written, in one of its states.
struct StateTensor {
  std::uint32_t param = 0;  ///< into Plan::params
  std::string state;        ///< of engine/layout/states.h: what it is made of
  DType dtype = DType::kF32;
};

/// How a parameter is written.
struct PlannedParam {
  Param param;                            ///< without scalars
  bool plain = false;                     ///< every rank has the whole
  bool on_whole_mesh = true;              ///< else on the part of it without tensor parallelism
  std::vector<layout::MeshSplit> splits;  ///< by dimension of its mesh
  std::uint32_t model = 0;                ///< into Plan::tensors
  std::vector<std::uint32_t> states;      ///< into Plan::tensors, by name of the state
  std::vector<Scalar> scalars;            ///< of the optimizer
};

/// A parameter group to be written.
struct PlannedGroup {
  const pickle::Node* options = nullptr;  ///< without the list of parameters
  std::vector<Scalar> tensors;            ///< as Group::tensors: options to write as tensors
  std::vector<std::uint32_t> params;      ///< into Plan::params, as the group lists them
};

/// Everything that files are made from. Outlives the source checkpoint.
struct FilesPlan {
  FilesLayout layout;
  std::vector<PlannedParam> params;  ///< in the model's order
  std::map<std::string, std::uint32_t> by_name;
  std::vector<StateTensor> tensors;
  bool has_optimizer = false;
  std::vector<PlannedGroup> groups;
  std::vector<FlatUnit> units;      ///< fsdp_version 1: of `flat`
  std::vector<std::uint32_t> flat;  ///< fsdp_version 1: into params, those that are in flat vectors
  std::shared_ptr<const OwnFiles> own;    ///< to be written again, or null
  std::shared_ptr<pickle::Arena> made;    ///< owns nodes of the plan
  std::shared_ptr<pickle::Arena> source;  ///< and those that it shares with the source
  std::vector<std::string> not_carried;

  /// Of the whole mesh, or of the part without tensor parallelism, as `rank` has it.
  DeviceMesh MeshOf(std::uint64_t rank, bool whole) const;
  /// What `rank` holds of a parameter that is not plain.
  Result<layout::Piece> PieceOf(const PlannedParam& param, std::uint64_t rank) const;
  /// True for the rank whose copy of a parameter's piece counts.
  bool Owns(const PlannedParam& param, std::uint64_t rank) const;
  /// How many ranks share out a flat vector, and elements of `unit` on each.
  std::uint64_t shards() const;
  std::uint64_t FlatLength(std::size_t unit) const;
};

/// \error kUnsupported  what files of this kind cannot hold
/// Pure.
Result<FilesPlan> MakePlan(const Checkpoint& source, const FilesLayout& layout);

/// Numbers of flat vectors in Fill::tensor begin here: unit * states + state.
inline constexpr std::uint32_t kFlatTensors = 1U << 31;

// Object graphs of the files of one rank.
Result<std::unique_ptr<Document>> ModelDocument(const FilesPlan& plan, std::uint64_t rank);
Result<std::unique_ptr<Document>> OptimizerDocument(const FilesPlan& plan, std::uint64_t rank);
Result<std::unique_ptr<Document>> OwnDocument(const FilesPlan& plan, std::size_t item,
                                              std::uint64_t rank);

/// metadata.pkl of torch_checkpointing.
Result<std::string> ItemTableBytes(const FilesPlan& plan);

}  // namespace shardwright::checkpoints::dtensor
