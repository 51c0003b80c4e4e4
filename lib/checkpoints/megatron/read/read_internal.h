// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/megatron/read: reads a Megatron checkpoint as logical tensors.
// A Collector knows how ranks cut parameters and adds their shards to the map.
// legacy*.cc finds the shards in the folders of ranks, and dist*.cc in the items
// of torch_dist. Gradient buffers have no names, so both compute the position of
// a parameter's state from the model's order. Source: docs/formats/megatron.md.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "checkpoints/megatron/args.h"
#include "checkpoints/megatron/megatron.h"
#include "checkpoints/megatron/rules.h"
#include "checkpoints/model/checkpoint.h"
#include "checkpoints/pickled/map_builder.h"
#include "engine/layout/shard_map.h"
#include "files/torch_pt/reader.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// Collects a checkpoint: parameters by name, and their tensors with the fragments found so far.
class Collector {
 public:
  Collector(const SourceSet& source, const Patterns& patterns);

  /// Returns the logical tensor of a parameter in a state. Creates it on the first call.
  /// \returns index into out.map.tensors
  std::uint32_t TensorOf(std::uint32_t param, std::string_view state, DType dtype);
  /// Returns the tensor with the padding rows of a vocabulary. Creates it on the first call.
  std::uint32_t PaddingOf(std::uint32_t param, std::string_view state, DType dtype);

  /// Adds a tensor-parallel rank's shard of a parameter.
  /// \param at  place of the shard's first element
  /// \param rank  one of `ranks` tensor-parallel ranks
  Status AddShard(std::uint32_t param, std::string_view state, DType dtype, layout::Placement at,
                  std::uint64_t ranks, std::uint64_t rank, layout::Role role);

  /// Adds elements [first, last) of a rank's shard. `at` is the place of the first one.
  Status AddRange(std::uint32_t param, std::string_view state, DType dtype, layout::Placement at,
                  std::uint64_t ranks, std::uint64_t rank, std::uint64_t first, std::uint64_t last);

  /// Adds a box of a parameter. Its coordinates count padding rows.
  /// \param at  place of its first element
  Status AddBox(std::uint32_t param, std::string_view state, DType dtype, layout::Placement at,
                const Shape& offsets, const Shape& sizes);

  /// Adds a trained parameter or buffer, given the shapes of its shards.
  /// \returns index into out.params
  Result<std::uint32_t> AddParam(const Rules& rules, const Args& args, const std::string& name,
                                 DType dtype, std::span<const Shape> shards);

  /// Sorts the states, sets the order and verifies the map.
  Result<Checkpoint> Finish();

 private:
  Result<const std::vector<Part>*> PartsFor(std::uint32_t param, std::uint64_t ranks,
                                            std::uint64_t rank);
  Status AddFragment(std::uint32_t param, std::string_view state, DType dtype, bool padding,
                     layout::Fragment fragment);
  std::uint32_t Find(std::uint32_t param, std::string state, DType dtype, Shape shape);

  const Patterns& patterns_;

 public:
  Checkpoint out;
  MapBuilder map;
  std::vector<Whole> wholes;  ///< by parameter
  std::unordered_map<std::string, std::uint32_t> by_name;

 private:
  std::map<std::pair<std::uint32_t, std::string>, std::uint32_t> tensors_;  // into out.map.tensors
  std::map<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>, std::vector<Part>> parts_;
};

/// Makes a value from a node of a pickled container. Finds the members of the tensors in it.
/// \param node  a node of `document`
Value ValueOf(MapBuilder& map, std::uint32_t file, std::uint32_t container,
              std::shared_ptr<const torch_pt::Document> document, const pickle::Node* node);

/// Stores a module's extra state. Skips None of linear layers, which no target needs.
/// \param name  name in the whole model
/// \param value  makes the value; called only if it is stored
void AddModule(const std::string& name, const pickle::Node* node,
               const std::function<Value()>& value, RunState* own);

/// Converts a step that an optimizer stores in its groups
/// to the form of a per-parameter step: one float32.
Scalar StepScalar(double step);

/// Reads a step from a tensor of one element.
/// \error kBadInput  the tensor contains another value
Result<Scalar> ScalarOf(const Container& container, const torch_pt::Document& document,
                        const pickle::Node* node, const std::string& what);

/// Sets mesh and layout of a checkpoint from the arguments of its run.
void FillLayout(const Args& args, MegatronLayout layout, Checkpoint* out);

/// Optimizer groups of all ranks, identified by the same options as in Megatron.
class Groups {
 public:
  /// Returns the format-independent group for a group's options. Adds it if it is new.
  /// \param options  options of a rank's group, with or without "params"
  std::uint32_t Of(pickle::Arena& arena, const pickle::Node* options, bool experts,
                   std::vector<Group>* groups);

 private:
  std::map<std::string, std::uint32_t> known_;
};

/// A parameter of a rank's optimizer.
struct Local {
  std::uint32_t param = 0;
  Shape shape;  ///< shape of the rank's shard
  DType dtype = DType::kF32;
};

/// Assigns the parameters of a rank to its optimizer groups by Megatron's rules (HasDecay).
/// \returns by group: indices into `locals`, ascending
/// \error kUnsupported  the groups follow another rule
Result<std::vector<std::vector<std::size_t>>> ShareOut(const Args& args,
                                                       const Checkpoint& checkpoint,
                                                       const std::vector<Local>& locals,
                                                       const pickle::Node* groups,
                                                       const std::string& where);

/// Checks that stored master weights have all their bits.
/// \param copied  the form copies them into float32 tensors, so only the arguments state it
/// \error kUnsupported  they are remainders of 16 bits
Status CheckMasters(const Args& args, DType dtype, bool copied, const std::string& where);

/// Converts a range of elements in a row-major array to boxes, in order.
std::vector<layout::Box> BoxesOfRange(const Shape& shape, std::uint64_t first, std::uint64_t last);

/// The part of a checkpoint to read.
enum class Reads : std::uint8_t { kAll, kOnlyWeights };

/// Reads torch_dist. Reads::kOnlyWeights implements Format::read_weights.
Result<Checkpoint> ReadDist(const SourceSet& source, const Patterns& patterns, Reads reads);

/// Reads folders mp_rank_*. Reads::kOnlyWeights implements Format::read_weights.
Result<Checkpoint> ReadLegacy(const SourceSet& source, const Patterns& patterns, Reads reads);

}  // namespace shardwright::checkpoints::megatron
