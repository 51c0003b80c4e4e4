// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/common/import_foreign.h"
#include "checkpoints/deepspeed/universal/atoms_internal.h"
#include "checkpoints/deepspeed/universal/universal.h"
#include "checkpoints/deepspeed/universal/write_internal.h"
#include "checkpoints/pickled/pickled_file.h"
#include "checkpoints/pickled/torch_optimizer.h"
#include "checkpoints/tp_rules/quantized.h"
#include "engine/layout/states.h"
#include "engine/plan/target_builder.h"
#include "support/base/text.h"
#include "support/os/dir.h"

// Writes the superset form of docs/formats/deepspeed.md, "Recommended superset directory",
// plus files that DeepSpeed's loaders never open: frozen parameters, buffers, other
// optimizer states, and kAtomsFile, from which ReadUniversal restores the entire checkpoint.
// State files are dicts, or bare tensors for stage-3 loaders that cannot open dicts.

namespace shardwright::checkpoints {
namespace {

using atoms::Build;
using atoms::Context;
using atoms::FileId;
using atoms::FileKind;
using atoms::PathOf;
using atoms::StepOf;
using layout::Cut;

// Returns the cut of a parameter's atoms, which is the whole. The loader of stage 3 does not
// pad vocabularies, so for stage 3 the cut includes the padding rows of the target's ranks.
Result<Cut> AtomCut(const Param& param, const Topology& to) {
  if (!param.rule.padded || to.zero != 3) return Cut::Whole(param.shape);
  Shape padded = param.shape;
  padded[0] = 0;
  for (std::uint64_t rank = 0; rank < to.tp; ++rank) {
    SW_TRY_ASSIGN(const Shape shard, layout::ShardShape(param.rule, param.shape, to.tp, rank));
    padded[0] += shard[0];
  }
  const std::vector<std::uint64_t> origin(param.shape.size(), 0);
  return Cut::Make(param.shape, std::move(padded), {{origin, origin, param.shape}});
}

Status CheckNames(const Param& param, const std::vector<std::pair<std::string, DType>>& atoms) {
  for (const auto& [state, dtype] : atoms) {
    const Status file = os::SafeName(StateFile(state));
    if (!file) return Within("\"" + param.name + "\": a state cannot become a file", file.error());
  }
  return {};
}

// Returns the states of a parameter that become atoms.
Result<std::vector<std::pair<std::string, DType>>> AtomsOf(const Checkpoint& source,
                                                           const layout::TensorIndex& index,
                                                           const Param& param, bool converted) {
  std::vector<std::pair<std::string, DType>> atoms;
  if (!param.alias_of.empty()) return atoms;
  const auto stored = [&](std::string_view state) -> std::optional<DType> {
    const auto found = index.Find(param.name, state);
    if (!found) return std::nullopt;
    return source.map.tensors[*found].dtype;
  };
  const std::string needed(NeededState(param.kind));
  std::optional<DType> dtype = stored(needed);
  if (!dtype && param.kind == ParamKind::kTrainable && stored(layout::kWeight)) dtype = DType::kF32;
  if (!dtype) {
    return Fail(Errc::kBadInput, "\"", param.name, "\": the source has no ", needed, " tensor");
  }
  if (param.kind == ParamKind::kFrozen && converted) dtype = param.dtype;
  atoms.emplace_back(needed, *dtype);
  if (param.kind != ParamKind::kTrainable) return atoms;
  for (const std::string& state : source.states) {
    if (const auto found = stored(state)) atoms.emplace_back(state, *found);
  }
  return atoms;
}

// Adds zeros for the states of a trained parameter that has none yet, and the step of another one
// in its group. DeepSpeed's loader for stage 3 requires every state of every trained parameter.
void AddZeroAtoms(const Checkpoint& source, const layout::TensorIndex& index, Param* param,
                  std::vector<std::pair<std::string, DType>>* atoms, std::size_t* first_zero) {
  *first_zero = atoms->size();
  const bool trained = param->kind == ParamKind::kTrainable && param->alias_of.empty();
  if (!trained || atoms->size() > 1 || !param->scalars.empty()) return;
  for (const Param& other : source.params) {
    if (other.group != param->group || other.kind != ParamKind::kTrainable) continue;
    for (const std::string& state : source.states) {
      const auto found = index.Find(other.name, state);
      if (found) atoms->emplace_back(state, source.map.tensors[*found].dtype);
    }
    if (atoms->size() == 1) continue;
    param->scalars = other.scalars;
    return;
  }
}

Result<std::shared_ptr<Context>> MakeContext(const Checkpoint& source, const Topology& topology,
                                             Loader loader) {
  auto context = std::make_shared<Context>();
  context->to = topology;
  context->from = TopologyOf(source.layout);
  context->tag = UniversalTag(source.tag);
  SW_TRY(os::SafeName(context->tag));
  context->params = source.params;
  context->groups = source.groups;
  if (const EngineState* state = EngineStateOf(source)) {
    context->model_states = state->model_states;
    context->optimizer = state->optimizer;
    context->entries = state->entries;
  }
  context->arena = source.arena;
  context->release = ReleaseOf(source);
  SW_TRY_ASSIGN(context->bare, WantsBareStates(source, topology, loader));
  const layout::TensorIndex index(source.map);
  const auto scales = QuantizationTensors(source);
  for (Param& param : context->params) {
    const bool floating =
        param.dtype == DType::kF32 || param.dtype == DType::kF16 || param.dtype == DType::kBF16;
    const bool converted = topology.dtype != source.layout.dtype && floating &&
                           param.kind != ParamKind::kBuffer &&
                           !(param.kind == ParamKind::kFrozen && scales.contains(param.name));
    if (converted) param.dtype = topology.dtype;
    SW_TRY_ASSIGN(auto atoms, AtomsOf(source, index, param, converted));
    AddZeroAtoms(source, index, &param, &atoms, &context->first_zero.emplace_back());
    if (!atoms.empty()) {
      SW_TRY(CheckNames(param, atoms));
    }
    Result<Cut> cut = AtomCut(param, topology);
    if (!cut) return Within("\"" + param.name + "\"", cut.error());
    context->atoms.push_back(std::move(atoms));
    context->cuts.push_back(*std::move(cut));
  }
  SW_TRY(CheckAtomFolders(context->params));
  return context;
}

std::vector<FileId> ListFiles(const Context& context) {
  std::vector<FileId> files;
  for (std::uint32_t mp = 0; mp < context.to.mp(); ++mp) {
    for (const bool stage3 : {false, true}) {
      files.push_back(
          {.kind = FileKind::kModel, .param = 0, .atom = 0, .mp = mp, .stage3 = stage3});
    }
  }
  files.push_back({.kind = FileKind::kOptimizer, .param = 0, .atom = 0, .mp = 0, .stage3 = false});
  for (std::uint32_t param = 0; param < context.params.size(); ++param) {
    if (context.atoms[param].empty()) continue;
    for (std::uint32_t atom = 0; atom < context.atoms[param].size(); ++atom) {
      files.push_back(
          {.kind = FileKind::kAtom, .param = param, .atom = atom, .mp = 0, .stage3 = false});
    }
    if (StepOf(context.params[param]) != nullptr) {
      files.push_back(
          {.kind = FileKind::kStep, .param = param, .atom = 0, .mp = 0, .stage3 = false});
    }
  }
  return files;
}

// Lays out files and adds their payloads to the target's shard map.
class Planner {
 public:
  explicit Planner(std::shared_ptr<const Context> context) : context_(std::move(context)) {}

  Status AddFile(const FileId& id);
  void AddText(std::string path, std::string text) {
    builder_.AddText(std::move(path), std::move(text));
  }
  plan::Target Take() && { return std::move(builder_).Take(); }

 private:
  void AddAtom(const FileId& id, std::uint32_t file, std::uint64_t offset,
               const torch_pt::StorageSpec& spec);

  std::shared_ptr<const Context> context_;
  plan::TargetBuilder builder_;
};

void Planner::AddAtom(const FileId& id, std::uint32_t file, std::uint64_t offset,
                      const torch_pt::StorageSpec& spec) {
  const Param& param = context_->params[id.param];
  layout::Fragment fragment;
  fragment.cut = std::make_shared<const Cut>(context_->cuts[id.param]);
  fragment.at.array = builder_.AddArray(spec.dtype, 1);
  builder_.AddElements(file, offset, fragment.at.array, 0, spec.elems, "data/0");
  if (id.atom >= context_->first_zero[id.param]) return;  // zeros, without elements of the source
  const std::string& state = context_->atoms[id.param][id.atom].first;
  builder_.AddFragment(builder_.AddTensor(param.name, state, spec.dtype, param.shape),
                       std::move(fragment));
}

Status Planner::AddFile(const FileId& id) {
  return AddPickledFile(
      &builder_, PathOf(*context_, id), [context = context_, id] { return Build(*context, id); },
      [&](std::uint32_t file, std::uint64_t offset, std::uint32_t /*tensor*/,
          const torch_pt::StorageSpec& spec,
          std::size_t /*storage*/) { AddAtom(id, file, offset, spec); });
}

}  // namespace

Result<Written> WriteUniversal(const Checkpoint& source, const Topology& topology, Loader loader) {
  if (EngineStateOf(source) == nullptr) {
    SW_TRY_ASSIGN(Adopted adopted, Adopt(source));
    SW_TRY_ASSIGN(Written written, WriteUniversal(adopted.checkpoint, topology, loader));
    written.not_carried.insert(written.not_carried.end(), adopted.not_carried.begin(),
                               adopted.not_carried.end());
    return written;
  }
  SW_TRY_ASSIGN(const auto context, MakeContext(source, topology, loader));
  Checkpoint described;
  described.params = context->params;
  described.groups = context->groups;
  described.states = source.states;
  described.frozen_unknown = source.frozen_unknown;
  described.order_unknown = source.order_unknown;
  described.own_values = source.own_values;
  std::vector<std::vector<std::string>> atoms;
  for (const auto& mine : context->atoms) {
    atoms.emplace_back();
    for (const auto& [state, dtype] : mine) atoms.back().push_back(state);
  }
  SW_TRY_ASSIGN(std::string text, DescribeAtoms(described, topology, atoms));
  Planner planner(context);
  for (const FileId& id : ListFiles(*context)) {
    SW_TRY(planner.AddFile(id));
  }
  planner.AddText(context->tag + "/" + kAtomsFile, std::move(text));
  planner.AddText("latest_universal", context->tag);
  Written written{std::move(planner).Take(),
                  LostClientState(*EngineStateOf(source), context->from, topology)};
  for (std::string& one : StatelessLosses(source)) written.not_carried.push_back(std::move(one));
  for (std::string& one : StepLosses(source)) written.not_carried.push_back(std::move(one));
  std::vector<std::string> blocks;
  for (const Param& param : context->params) {
    const layout::Split split = param.rule.split;
    if (split == layout::Split::kMesh || split == layout::Split::kListed) {
      blocks.push_back(param.name);
    }
  }
  if (!blocks.empty()) {
    written.not_carried.push_back("the split into blocks of " + FirstFew(blocks) +
                                  ": keys of DeepSpeed's atoms cannot express it, so only ucp-load "
                                  "can load them with tp > 1");
  }
  return written;
}

}  // namespace shardwright::checkpoints
