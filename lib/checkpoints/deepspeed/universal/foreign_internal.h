// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoints/deepspeed/common/universal_info.h"
#include "checkpoints/deepspeed/universal/read_internal.h"

namespace shardwright::checkpoints::atoms {

using pickle::Node;
using reader::NamedShape;
using reader::Ties;

/// The model file of one mp rank.
struct Model {
  std::uint32_t file = 0;
  const Node* root = nullptr;
  std::vector<std::vector<NamedShape>> groups;  // by optimizer group
  std::map<std::string, Shape> shapes;          // trainable
};

/// State of reading a folder that DeepSpeed's converter wrote.
struct Foreign {
  Foreign(const SourceSet& source, const Patterns& patterns)
      : reading(source, patterns), folder(source) {}

  Reading reading;
  Folder folder;
  std::vector<Model> models;  // by mp
  UniversalInfo info;
  Patterns chosen;
  bool only_weights = false;
  bool stage3 = false;
  const Node* optimizer = nullptr;                    // root of zero/optimizer_state.pt
  std::vector<std::uint32_t> sub_groups;              // stage 3: optimizer group of each sub-group
  std::map<std::string, std::uint32_t> sub_group_of;  // stage 3: by parameter
  std::unordered_map<std::string, std::uint32_t> by_name;
  std::map<std::uint64_t, std::shared_ptr<const Passed>> kept;  // by mp: for opaque entries

  Checkpoint& out() { return reading.out; }
  std::uint64_t tp() const { return reading.topology.tp; }
  const std::string& name_of(const Model& model) const { return reading.file_name(model.file); }
};

/// Returns the rule for a parameter, from the user's rules, the folder's
/// info, the keys of its atom (may be null), and the built-in families.
Result<Ruled> RuleOf(const Foreign& foreign, const std::string& name,
                     const std::vector<Shape>& shards, const Atom* atom);

/// Adds buffers, frozen parameters and second names, which have no atoms. Then orders by `module`.
Status AddRest(Foreign* foreign);

}  // namespace shardwright::checkpoints::atoms
