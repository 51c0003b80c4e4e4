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
#include "files/torch_pt/reader.h"

namespace shardwright::checkpoints::dtensor {

/// What a dimension of a mesh is for.
enum class Role : std::uint8_t { kReplicate, kShard, kTensorParallel };

/// How a parameter is cut beside what the mesh says.
struct ParamSplit {
  std::uint32_t shard_dim = 0;  ///< that fully_shard cuts
  enum class Tp : std::uint8_t {
    kOutside,    ///< it lies on the part of the mesh without tensor parallelism
    kReplicate,  ///< on all of it, and every tensor-parallel rank has the same
    kShard,
  };
  Tp tp = Tp::kOutside;
  std::uint32_t tp_dim = 0;  ///< kShard
};

/// How per-rank files are, or are to be, written.
struct FilesLayout : OwnLayout {
  Trainer trainer = Trainer::kAccelerate;
  MeshForm form = MeshForm::kNew;
  std::string device = "cuda";
  std::vector<std::uint64_t> sizes;  ///< of the mesh of all ranks, outermost first
  std::vector<Role> roles;           ///< of its dimensions
  std::optional<std::vector<std::string>> names;
  BlockIndex blocks = BlockIndex::kFirst;  ///< fsdp_version 1: how the model is wrapped
  int fsdp_version = 2;                    ///< kVerl: 1 has the optimizer's states in flat vectors
  std::string model_item, optimizer_item;  ///< as files are called: "optimizer_0"
  std::map<std::string, ParamSplit> splits;      ///< by parameter, of a source
  std::vector<std::vector<std::string>> groups;  ///< by rank, of a source: of all dimensions
  /// Of a source: what each parameter group lists, in its order, frozen parameters too.
  std::vector<std::vector<std::string>> listed;
  /// Of a source: the optimizer's names by the model's names, if wrappers make them differ.
  std::map<std::string, std::string> optimizer_names;

  /// Returns the optimizer's name of a parameter in the files.
  const std::string& OptimizerName(const std::string& name) const {
    const auto found = optimizer_names.find(name);
    return found == optimizer_names.end() ? name : found->second;
  }

  std::uint64_t ranks() const;
  std::string Json() const override;
};

/// What only the trainer understands: schedules and random states, one document for each rank.
struct OwnFiles : OwnState {
  struct Passed {
    torch_pt::Document document;
    std::vector<std::uint32_t> members;  ///< by storage
  };
  struct One {
    std::string name;  ///< of the item: "extra_state"
    std::vector<Passed> ranks;
    bool same = true;  ///< on all ranks
  };
  Trainer trainer = Trainer::kVerl;
  std::vector<One> items;

  std::vector<std::uint32_t> Members() const override;
  std::vector<std::string> Contents() const override;
};

}  // namespace shardwright::checkpoints::dtensor
