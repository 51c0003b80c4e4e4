// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoints/dtensor/flat_units_internal.h"
#include "checkpoints/dtensor/mesh_internal.h"
#include "checkpoints/dtensor/names_internal.h"
#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/layout.h"
#include "engine/layout/mesh_cut.h"
#include "files/torch_pt/reader.h"

namespace shardwright::checkpoints::dtensor {

/// The purpose of a mesh dimension.
enum class Role : std::uint8_t { kReplicate, kShard, kTensorParallel };

/// The cut of a parameter, in addition to the mesh.
struct ParamSplit {
  std::uint32_t shard_dim = 0;  ///< dimension that fully_shard cuts
  /// Placements on the tensor-parallel dimensions of the mesh, in their order; never strided.
  /// Empty: the parameter is on the part of the mesh without tensor parallelism.
  std::vector<layout::MeshSplit> tp;
};

/// Layout of per-rank files, of a source or a target.
struct FilesLayout : OwnLayout {
  Trainer trainer = Trainer::kAccelerate;
  MeshForm form = MeshForm::kNew;
  std::string device = "cuda";
  std::vector<std::uint64_t> sizes;  ///< sizes of the mesh of all ranks, outermost first
  std::vector<Role> roles;           ///< purposes of its dimensions
  std::optional<std::vector<std::string>> names;
  BlockIndex blocks = BlockIndex::kFirst;    ///< fsdp_version 1: how the model is wrapped
  int fsdp_version = 2;                      ///< kVerl: 1 stores optimizer states in flat vectors
  std::string model_item, optimizer_item;    ///< names in file names: "optimizer_0"
  std::map<std::string, ParamSplit> splits;  ///< by parameter; sources only
  std::vector<std::vector<std::string>> groups;  ///< by rank: all groups; sources only
  /// Parameters of each group in the group's order, including frozen ones. Sources only.
  std::vector<std::vector<std::string>> listed;
  /// Optimizer's names by the model's names, if wrappers make them differ.
  std::map<std::string, std::string> optimizer_names;

  /// Returns the optimizer's name of a parameter in the files.
  const std::string& OptimizerName(const std::string& name) const {
    const auto found = optimizer_names.find(name);
    return found == optimizer_names.end() ? name : found->second;
  }

  std::uint64_t ranks() const;
  /// Returns the sizes of the mesh's tensor-parallel dimensions.
  std::vector<std::uint64_t> tp_sizes() const;
  std::string Json() const override;
};

/// State that only the trainer can interpret: schedules and random states, one document per rank.
struct OwnFiles : OwnState {
  struct Passed {
    torch_pt::Document document;
    std::vector<std::uint32_t> members;  ///< index into map.members, by storage
  };
  struct One {
    std::string name;  ///< name of the item: "extra_state"
    std::vector<Passed> ranks;
    bool same = true;  ///< equal on all ranks
  };
  Trainer trainer = Trainer::kVerl;
  std::vector<One> items;

  std::vector<std::uint32_t> Members() const override;
  std::vector<std::string> Contents() const override;
};

}  // namespace shardwright::checkpoints::dtensor
