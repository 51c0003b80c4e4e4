// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/megatron/write: torch_dist of any checkpoint.
// target.cc makes a layout of --target, dist.cc an item of every box that a rank has of a tensor,
// legacy.cc a file of every rank, shards.h what ranks have and their gradient buffers, common.cc
// the arguments and groups in common.pt; items.h lays items into files. Source:
// docs/formats/megatron.md.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/megatron/args.h"
#include "checkpoints/megatron/megatron.h"
#include "checkpoints/megatron/rules.h"
#include "checkpoints/megatron/write/items.h"
#include "checkpoints/model/checkpoint.h"
#include "checkpoints/pickled/document.h"
#include "engine/layout/shard_map.h"
#include "engine/plan/target_builder.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// Null if the source is of another format.
const RunState* RunStateOf(const Checkpoint& source);

/// The arguments of a run that goes on in a layout.
Args TargetArgs(const Checkpoint& source, const MegatronLayout& to);

/// What both writers need while they put a target together.
class Writing {
 public:
  Writing(const Checkpoint& from, const MegatronLayout& layout);

  /// How the target cuts a parameter: as the source's rule says, else as Megatron cuts modules of
  /// that name. Rows of a vocabulary are padded as Megatron pads them.
  Whole WholeFor(const Param& param) const;
  const layout::LogicalTensor* SourceTensor(const std::string& name, std::string_view state) const;
  /// A tensor of the target, or its padding; made when it is first asked for.
  std::uint32_t TensorOf(const std::string& name, bool padding, std::string_view state, DType dtype,
                         const Shape& shape);
  /// Padding is kept where there is as much as before, else it is zero.
  bool KeepsPadding(const Param& param, std::string_view state, const Shape& padding) const;
  /// What of a Megatron run, or of another trainer's, has no place.
  std::vector<std::string> Left() const;

  const Checkpoint& source;
  const MegatronLayout& to;
  Args args;
  plan::TargetBuilder builder;
  Items items;
  std::string tag;
  bool has_optimizer = false;
  bool keeps_random = false;     ///< every rank has its random states from the source
  std::uint64_t vocab_rows = 0;  ///< with padding, 0: unknown

 private:
  layout::TensorIndex index_of_source_;
  std::optional<Rules> rules_;  // none: first linear layers of MLPs fit no model of Megatron's
  std::map<std::pair<std::string, std::string>, std::uint32_t> tensors_;  // by name and state
};

/// A group of one of the optimizers of the target.
struct TargetGroup {
  pickle::Node* options = nullptr;
  std::vector<std::uint32_t> from;  ///< groups of the source
};

/// The groups of an optimizer of a chain, weight decay first.
/// \param experts  of the second one
std::vector<TargetGroup> GroupsOf(pickle::Arena& arena, const Checkpoint& source, bool chained,
                                  bool experts, const std::optional<double>& step);

/// Experts have an optimizer of their own.
bool IsChained(const Checkpoint& source, const MegatronLayout& to);

/// Returns false for checkpoints of programs that do not store the run's arguments. An incomplete
/// set of arguments would be worse than none, because Megatron's loader compares them.
bool HasArgs(const Checkpoint& source);

/// Returns true if torch_dist has an object for a module of the source. The output layer of a GPT
/// has one only in legacy files, where it is None.
bool HasExtraState(const Checkpoint& source, std::string_view name);

/// What a module keeps beside tensors, None if the source says nothing of it.
/// \param name  as RunState::modules has it
Result<const pickle::Node*> ModuleNode(Document* document, const Checkpoint& source,
                                       const std::string& name);

/// State of the loss scaler of a run in float16: the source's, else one that begins anew; null for
/// other runs.
/// \param experts  of the second optimizer of a chain
Result<const pickle::Node*> ScalerNode(Document* document, const Checkpoint& source, bool experts);

struct StateBuffer;

/// The types of a buffer's parameters and gradients, by which Megatron names it.
const pickle::Node* TypesNode(pickle::Arena& arena, const StateBuffer& buffer);

/// Arguments of the run, with those of the layout set anew.
const pickle::Node* ArgsNode(pickle::Arena& arena, const Writing& writing);

/// Everything of a checkpoint that belongs to no rank: common.pt.
/// Pure.
Result<Document> CommonState(const Writing& writing);

/// Adds to a dict what the source's common state has and the dict has not.
Status AddOthers(const Checkpoint& source, Document* document, pickle::Node* root);

/// Folders mp_rank_*.
Result<Written> WriteLegacy(const Checkpoint& source, const MegatronLayout& to);

/// The step of the optimizer, which is one for all parameters.
/// \error kUnsupported  parameters with different steps; names two
Result<std::optional<double>> StepOf(const Checkpoint& source);

}  // namespace shardwright::checkpoints::megatron
