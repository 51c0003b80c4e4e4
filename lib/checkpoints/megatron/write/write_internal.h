// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/megatron/write: writes any checkpoint as torch_dist or legacy files.
// target.cc resolves --target to a layout. dist.cc makes an item of every box that
// a rank has of a tensor, and legacy.cc a file for every rank. shards.h computes the
// contents of ranks and their gradient buffers, common.cc the arguments and groups
// in common.pt. items.h writes items into files. Source: docs/formats/megatron.md.

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

/// Returns the state of a Megatron source, or null if the source has another format.
const RunState* RunStateOf(const Checkpoint& source);

/// Returns the arguments of a run that resumes in a layout.
Args TargetArgs(const Checkpoint& source, const MegatronLayout& to);

/// Returns the text of the tracker file: an iteration from 1 on, or "release".
std::string TrackerText(const Checkpoint& source);

/// State that both writers share while they build a target.
class Writing {
 public:
  Writing(const Checkpoint& from, const MegatronLayout& layout);

  /// Returns a parameter's whole shape and rule: the source's rule, or Megatron's rule
  /// for modules of that name. Adds the padding rows that Megatron adds to a vocabulary.
  Whole WholeFor(const Param& param) const;
  const layout::LogicalTensor* SourceTensor(const std::string& name, std::string_view state) const;
  /// Returns a tensor of the target, or of its padding. Creates it on the first call.
  std::uint32_t TensorOf(const std::string& name, bool padding, std::string_view state, DType dtype,
                         const Shape& shape);
  /// Returns true if the source's padding has the same shape. If not, padding is zero.
  bool KeepsPadding(const Param& param, std::string_view state, const Shape& padding) const;
  /// Describes the source's own state that the target cannot store.
  std::vector<std::string> Left() const;
  /// Returns the reasons why Megatron-LM cannot resume the target.
  std::vector<std::string> Warnings() const;

  const Checkpoint& source;
  const MegatronLayout& to;
  Args args;
  /// Groups of the target: the source's, or those of a new Megatron run (NewRun).
  std::vector<Group> groups;
  plan::TargetBuilder builder;
  Items items;
  std::string tag;
  bool has_optimizer = false;
  bool keeps_random = false;     ///< the source has random states for every rank
  std::uint64_t vocab_rows = 0;  ///< with padding; 0: unknown

 private:
  std::vector<Group> GroupsOfNewRun();

  pickle::Arena arena_;  ///< owns the options of the groups of a new run
  layout::TensorIndex index_of_source_;
  std::optional<Rules> rules_;  // nothing if first linear layers of MLPs fit no Megatron model
  std::map<std::pair<std::string, std::string>, std::uint32_t> tensors_;  // by name and state
};

/// A group of one of the target's optimizers.
struct TargetGroup {
  pickle::Node* options = nullptr;
  std::vector<std::uint32_t> from;  ///< indexes into Writing::groups
};

/// Returns the groups of a chained optimizer, those with weight decay first.
/// \param experts  selects the second optimizer
std::vector<TargetGroup> GroupsOf(pickle::Arena& arena, const Writing& writing, bool chained,
                                  bool experts, const std::optional<double>& step);

/// Returns the options of a group of Megatron: all that identify it, and those of torch's Adam.
/// \param max_rate, min_rate  learning rates of the schedule
/// \param decays  the group has weight decay
pickle::Node* NewOptions(pickle::Arena& arena, const HyperParams& hyper, double max_rate,
                         double min_rate, bool decays);

/// Returns true if experts have a separate optimizer.
bool IsChained(const Checkpoint& source, const MegatronLayout& to);

/// Returns false for checkpoints of programs that do not store the run's arguments. An incomplete
/// set of arguments would be worse than none, because Megatron's loader compares them.
bool HasArgs(const Checkpoint& source);

/// Returns true if torch_dist has an object for a module of the source. The output layer of a GPT
/// has one only in legacy files, where it is None.
bool HasExtraState(const Checkpoint& source, std::string_view name);

/// Returns a module's extra state, or None if the source does not have it.
/// \param name  a key of RunState::modules
Result<const pickle::Node*> ModuleNode(Document* document, const Checkpoint& source,
                                       const std::string& name);

/// Returns the loss scaler state of a run in float16: the
/// source's, or a new one. Returns null for other runs.
/// \param experts  selects the second optimizer of a chain
Result<const pickle::Node*> ScalerNode(Document* document, const Checkpoint& source, bool experts);

struct StateBuffer;

/// Returns the types of a buffer's parameters and gradients, which are part of Megatron's names.
const pickle::Node* TypesNode(pickle::Arena& arena, const StateBuffer& buffer);

/// Returns the arguments of the run, updated for the target's layout.
const pickle::Node* ArgsNode(pickle::Arena& arena, const Writing& writing);

/// Builds common.pt, which contains all rank-independent state of a checkpoint.
/// Pure.
Result<Document> CommonState(const Writing& writing);

/// Adds to a dict the entries of the source's common state that the dict lacks.
Status AddOthers(const Checkpoint& source, Document* document, pickle::Node* root);

/// Writes folders mp_rank_*.
Result<Written> WriteLegacy(const Checkpoint& source, const MegatronLayout& to);

/// Returns the optimizer's step, which must be the same for all parameters.
/// \error kUnsupported  parameters with different steps; names two
Result<std::optional<double>> StepOf(const Checkpoint& source);

}  // namespace shardwright::checkpoints::megatron
