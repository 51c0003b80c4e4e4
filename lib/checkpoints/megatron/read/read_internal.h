// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/megatron/read: a checkpoint of Megatron's as logical tensors.
// A Collector knows how ranks cut parameters and enters their shards into the map. legacy*.cc finds
// the shards in folders of ranks, dist*.cc in the items of torch_dist; both work out from the order
// of the model where gradient buffers, which have no names, keep a parameter's state. Source:
// docs/formats/megatron.md.

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

/// Collects a checkpoint: parameters by name, and tensors of them with the fragments found so far.
class Collector {
 public:
  Collector(const SourceSet& source, const Patterns& patterns);

  /// The logical tensor of a parameter in a state; made when it is first asked for.
  /// \returns index into out.map.tensors
  std::uint32_t TensorOf(std::uint32_t param, std::string_view state, DType dtype);
  /// The same for the rows that pad a vocabulary.
  std::uint32_t PaddingOf(std::uint32_t param, std::string_view state, DType dtype);

  /// Adds what a tensor-parallel rank holds of a parameter.
  /// \param at    where the rank's shard begins
  /// \param rank  of `ranks`
  Status AddShard(std::uint32_t param, std::string_view state, DType dtype, layout::Placement at,
                  std::uint64_t ranks, std::uint64_t rank, layout::Role role);

  /// Adds elements [first, last) of a rank's shard, of which the first lies at `at`.
  Status AddRange(std::uint32_t param, std::string_view state, DType dtype, layout::Placement at,
                  std::uint64_t ranks, std::uint64_t rank, std::uint64_t first, std::uint64_t last);

  /// Adds a box of a parameter, rows that pad it counted.
  /// \param at  where its first element lies
  Status AddBox(std::uint32_t param, std::string_view state, DType dtype, layout::Placement at,
                const Shape& offsets, const Shape& sizes);

  /// A trained parameter or buffer with the shapes of its shards.
  /// \returns index into out.params
  Result<std::uint32_t> AddParam(const Rules& rules, const Args& args, const std::string& name,
                                 DType dtype, std::span<const Shape> shards);

  /// Ends with sorted states, order and a proof of the map.
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

/// A value of a pickled container with the members of the tensors in it.
/// \param node  in the document
Value ValueOf(MapBuilder& map, std::uint32_t file, std::uint32_t container,
              std::shared_ptr<const torch_pt::Document> document, const pickle::Node* node);

/// Keeps what a module has beside tensors, where a target needs it.
/// \param name   in the whole model
/// \param value  makes it; asked for only then
void AddModule(const std::string& name, const pickle::Node* node,
               const std::function<Value()>& value, RunState* own);

/// A step that an optimizer keeps in its groups, as it keeps it by parameter elsewhere: one
/// float32.
Scalar StepScalar(double step);

/// A step that a tensor of one element holds.
/// \error kBadInput  it holds something else
Result<Scalar> ScalarOf(const Container& container, const torch_pt::Document& document,
                        const pickle::Node* node, const std::string& what);

/// Sets mesh and layout of a checkpoint from the arguments of its run.
void FillLayout(const Args& args, MegatronLayout layout, Checkpoint* out);

/// Optimizer groups of all ranks, told apart by what Megatron tells them apart by.
class Groups {
 public:
  /// The neutral group of a group's options; made when it is new.
  /// \param options  of a rank's group, "params" among them or not
  std::uint32_t Of(pickle::Arena& arena, const pickle::Node* options, bool experts,
                   std::vector<Group>* groups);

 private:
  std::map<std::string, std::uint32_t> known_;
};

/// A parameter of a rank's optimizer.
struct Local {
  std::uint32_t param = 0;
  Shape shape;  ///< of the rank's shard
  DType dtype = DType::kF32;
};

/// Shares the parameters of a rank out to its optimizer groups, as Megatron does: weight decay for
/// matrices, none for vectors.
/// \returns by group: indices into `locals`, ascending
/// \error kUnsupported  groups of another kind
Result<std::vector<std::vector<std::size_t>>> ShareOut(const Checkpoint& checkpoint,
                                                       const std::vector<Local>& locals,
                                                       const pickle::Node* groups,
                                                       const std::string& where);

/// A stretch of a row-major array as boxes of it, in order.
std::vector<layout::Box> BoxesOfRange(const Shape& shape, std::uint64_t first, std::uint64_t last);

/// The part of a checkpoint that a reader reads.
enum class Reads : std::uint8_t { kAll, kOnlyWeights };

/// Reads torch_dist. Reads::kOnlyWeights implements Format::read_weights.
Result<Checkpoint> ReadDist(const SourceSet& source, const Patterns& patterns, Reads reads);

/// Reads folders mp_rank_*. Reads::kOnlyWeights implements Format::read_weights.
Result<Checkpoint> ReadLegacy(const SourceSet& source, const Patterns& patterns, Reads reads);

}  // namespace shardwright::checkpoints::megatron
