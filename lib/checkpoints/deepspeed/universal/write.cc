// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/common/entries.h"
#include "checkpoints/deepspeed/common/import_foreign.h"
#include "checkpoints/deepspeed/common/universal_info.h"
#include "checkpoints/deepspeed/universal/atoms_internal.h"
#include "checkpoints/deepspeed/universal/universal.h"
#include "checkpoints/pickled/document.h"
#include "checkpoints/pickled/hyper.h"
#include "checkpoints/pickled/pickled_file.h"
#include "checkpoints/pickled/torch_optimizer.h"
#include "checkpoints/tp_rules/quantized.h"
#include "engine/layout/states.h"
#include "engine/plan/target_builder.h"
#include "support/os/dir.h"

// Writes the superset form of docs/formats/deepspeed.md, "Recommended superset directory",
// plus files that DeepSpeed's loaders never open: frozen parameters, buffers, other
// optimizer states, and kAtomsFile, from which ReadUniversal restores the entire checkpoint.
// State files are dicts, or bare tensors for stage-3 loaders that cannot open dicts.

namespace shardwright::checkpoints {
namespace {

using layout::Cut;
using layout::Split;
using pickle::Node;

// Inputs of all atoms of the folder. Outlives the source checkpoint.
struct Context {
  Topology to, from;
  std::string tag;                                                // of the output folder
  std::vector<Param> params;                                      // with the dtypes of the target
  std::vector<std::vector<std::pair<std::string, DType>>> atoms;  // by parameter: state, type
  std::vector<std::size_t> first_zero;  // by parameter: this atom and later ones are zeros
  std::vector<Cut> cuts;                // by parameter: cut of its atoms
  std::vector<Group> groups;
  std::vector<Passed> model_states, optimizer;
  std::vector<OpaqueEntry> entries;
  std::shared_ptr<pickle::Arena> arena;
  const Node* release = nullptr;  // release that saved the source, or null
  bool bare = false;              // states are bare tensors
};

enum class FileKind : std::uint8_t { kAtom, kStep, kModel, kOptimizer };

struct FileId {
  FileKind kind = FileKind::kAtom;
  std::uint32_t param = 0;  // kAtom, kStep
  std::uint32_t atom = 0;   // kAtom: index into Context::atoms[param]
  std::uint32_t mp = 0;     // kModel
  bool stage3 = false;      // kModel: with the file name of stage 3
};

constexpr std::array<std::string_view, 15> kOptimizerKeys = {"base_optimizer_state",
                                                             "base_optimizer_state_step",
                                                             "optimizer_state_dict",
                                                             "single_partition_of_fp32_groups",
                                                             "fp32_flat_groups",
                                                             "fp32_groups",
                                                             "fp32_groups_flat",
                                                             "param_slice_mappings",
                                                             "param_alignment_paddings",
                                                             "group_paddings",
                                                             "partition_count",
                                                             "ds_zero_partition_groups",
                                                             "state",
                                                             "param_groups",
                                                             "ds_version"};

const Node* Number(pickle::Arena& arena, std::uint64_t value) {
  return arena.Int(static_cast<std::int64_t>(value));
}

std::string TwoDigits(std::uint32_t value) {
  return (value < 10 ? "0" : "") + std::to_string(value);
}

const Scalar* StepOf(const Param& param) {
  const auto it = std::find_if(param.scalars.begin(), param.scalars.end(),
                               [](const Scalar& scalar) { return scalar.state == layout::kStep; });
  return it == param.scalars.end() ? nullptr : &*it;
}

const Node* ScalarNode(Document& document, const Scalar& scalar) {
  if (!scalar.is_tensor) {
    return scalar.value != nullptr ? scalar.value : document.arena.None();
  }
  return document.AddInline(scalar.bytes, scalar.dtype, scalar.shape);
}

const Passed* PassedFor(const Context& context, const std::vector<Passed>& all, std::uint32_t mp) {
  const std::uint64_t rank = PassedRank(context.from, context.to, mp, all.size());
  if (all.empty() || all[rank].document.root == nullptr || !all[rank].document.root->is_dict()) {
    return nullptr;
  }
  return &all[rank];
}

// Adds the keys from which DeepSpeed's loader learns how to split the tensor.
void AddSplitKeys(pickle::Arena& arena, const Param& param, Node* root) {
  const layout::SplitRule& rule = param.rule;
  if (rule.split == Split::kDim) {
    Set(arena, root, "cat_dim", Number(arena, rule.dim));
    if (rule.padded) Set(arena, root, "vocab_tensor", arena.Bool(true));
    return;
  }
  if (rule.split != Split::kSub) return;
  const std::vector<std::uint64_t>& sizes = rule.sub_sizes;
  if (rule.view.empty() && rule.dim == 0 && sizes.size() == 2 && sizes[0] == sizes[1]) {
    Set(arena, root, "cat_dim", arena.Int(0));
    Set(arena, root, "param_n_sub_params", arena.Int(2));
    return;
  }
  const Shape& view = rule.view.empty() ? param.shape : rule.view;
  std::vector<const Node*> shape;
  for (std::size_t dim = 0; dim < view.size(); ++dim) {
    if (dim != rule.dim) {
      shape.push_back(Number(arena, view[dim]));
      continue;
    }
    std::vector<const Node*> parts;
    parts.reserve(sizes.size());
    for (std::uint64_t size : sizes) parts.push_back(Number(arena, size));
    shape.push_back(arena.Tuple(std::move(parts)));
  }
  Node* fields = arena.Dict();
  Set(arena, fields, "patterns", arena.List({}));
  Set(arena, fields, "shape", arena.Tuple(std::move(shape)));
  Set(arena, fields, "partition_dim", Number(arena, rule.dim));
  Set(arena, root, "sub_param_shape",
      arena.Object("deepspeed.checkpoint.universal_checkpoint.SubparamShape", fields));
}

void BuildAtom(Document& document, const Context& context, const FileId& id) {
  const Param& param = context.params[id.param];
  const Cut& cut = context.cuts[id.param];
  const DType dtype = context.atoms[id.param][id.atom].second;
  const Node* tensor = document.AddTensor(0, dtype, cut.shard());
  if (context.bare && param.kind == ParamKind::kTrainable) {
    document.root = tensor;
    return;
  }
  Node* root = document.arena.Dict();
  AddSplitKeys(document.arena, param, root);
  Set(document.arena, root, "param", tensor);
  document.root = root;
}

const Node* Dimensions(pickle::Arena& arena, const Topology& to) {
  Node* dimensions = arena.Dict();
  Set(arena, dimensions, "pp_degree", Number(arena, to.pp));
  Set(arena, dimensions, "tp_degree", Number(arena, to.tp));
  return dimensions;
}

// Returns an empty module. DeepSpeed loads no weights from a universal checkpoint's model files.
const Node* EmptyModule(pickle::Arena& arena, Graft& graft, const Node* source, Status* status) {
  if (source != nullptr && source->is_none()) return arena.None();
  Node* module = arena.Dict(true);
  if (source != nullptr && source->state != nullptr) {
    auto state = graft.Take(source->state);
    if (!state) {
      *status = Within("module", state.error());
    } else {
      module->state = *state;
    }
  }
  return module;
}

const Node* Version(pickle::Arena& arena, const Context& context) {
  if (context.release != nullptr) return context.release;
  return arena.String("0.19.8");  // files have this release's form
}

Result<const Node*> Info(Document& document, const Context& context, Graft& graft,
                         const Node* source) {
  if (source != nullptr && context.to.tp == context.from.tp) return graft.Take(source);
  return BuildUniversalInfo(document.arena, context.params, context.to.tp);
}

Status BuildModel(Document& document, const Context& context, const FileId& id) {
  pickle::Arena& arena = document.arena;
  const Passed* passed = PassedFor(context, context.model_states, id.mp);
  if (passed == nullptr) return Fail(Errc::kBadInput, "the source has no model states");
  const Node* source = passed->document.root;
  Graft graft(document, passed->document, passed->members);
  Node* root = arena.Dict();
  Status status;
  Set(arena, root, "module", EmptyModule(arena, graft, source->Find("module"), &status));
  SW_TRY(std::move(status));
  for (std::size_t i = 0; i < source->entry_count(); ++i) {
    if (IsOneOf(source->key(i), kModelKeys)) continue;
    auto value = graft.Take(source->value(i));
    if (!value) return Within("client state", value.error());
    root->items.push_back(source->key(i));
    root->items.push_back(*value);
  }
  for (const char* key : {"global_steps", "global_samples", "skipped_steps"}) {
    if (root->Find(key) == nullptr) Set(arena, root, key, arena.Int(0));
  }
  Set(arena, root, "dp_world_size", Number(arena, context.to.dp));
  Set(arena, root, "mp_world_size", Number(arena, context.to.mp()));
  Set(arena, root, "checkpoint_parallel_dimensions", Dimensions(arena, context.to));
  Set(arena, root, "ds_version", Version(arena, context));
  SW_TRY_ASSIGN(const Node* info,
                Info(document, context, graft, source->Find("universal_checkpoint_info")));
  if (info != nullptr) Set(arena, root, "universal_checkpoint_info", info);
  const bool same_tp = context.to.tp == context.from.tp;
  SW_TRY_ASSIGN(const Node* entries,
                EntriesNode(document, context.entries, same_tp ? id.mp % context.to.tp : 0));
  if (entries != nullptr) Set(arena, root, kOpaqueEntries, entries);
  document.root = root;
  return {};
}

Status BuildOptimizer(Document& document, const Context& context) {
  pickle::Arena& arena = document.arena;
  Node* root = arena.Dict();
  const Passed* passed = PassedFor(context, context.optimizer, 0);
  if (passed != nullptr) {
    const Node* source = passed->document.root;
    Graft graft(document, passed->document, passed->members);
    for (std::size_t i = 0; i < source->entry_count(); ++i) {
      if (IsOneOf(source->key(i), kOptimizerKeys)) continue;
      auto value = graft.Take(source->value(i));
      if (!value) return Within("optimizer state", value.error());
      root->items.push_back(source->key(i));
      root->items.push_back(*value);
    }
  }
  std::vector<const Node*> groups;
  for (const Group& group : context.groups) {
    const Node* given = PlainOptions(group.options, group.tensors, &arena);
    Node* options = given != nullptr ? CopyDict(arena, given) : arena.Dict();
    Set(arena, options, "params", arena.List({Number(arena, groups.size())}));
    groups.push_back(options);
  }
  const Node* param_groups = arena.List(std::move(groups));
  // Stage 3 reads the step from this dict and has one step for all parameters.
  Node* first = arena.Dict();
  for (const Param& param : context.params) {
    const Scalar* step = StepOf(param);
    if (step == nullptr) continue;
    Set(arena, first, "step", ScalarNode(document, *step));
    break;
  }
  Node* state = arena.Dict();
  state->items = {arena.Int(0), first};
  Node* nested = arena.Dict();
  Set(arena, nested, "state", state);
  Set(arena, nested, "param_groups", param_groups);
  Set(arena, root, "ds_version", Version(arena, context));
  Set(arena, root, "param_groups", param_groups);
  Set(arena, root, "optimizer_state_dict", nested);
  document.root = root;
  return {};
}

std::string PathOf(const Context& context, const FileId& id) {
  const std::string folder = context.tag + "/";
  switch (id.kind) {
    case FileKind::kAtom:
      return folder +
             AtomName(context.params[id.param].name, context.atoms[id.param][id.atom].first);
    case FileKind::kStep:
      return folder + AtomName(context.params[id.param].name, layout::kStep);
    case FileKind::kModel:
      return folder + (id.stage3 ? "zero_pp_rank_0_mp_rank_" : "mp_rank_") + TwoDigits(id.mp) +
             "_model_states.pt";
    case FileKind::kOptimizer:
      break;
  }
  return folder + kAtomsFolder + "/" + kOptimizerStateFile;
}

Result<std::unique_ptr<Document>> Build(const Context& context, const FileId& id) {
  auto document = std::make_unique<Document>();
  Status built;
  switch (id.kind) {
    case FileKind::kAtom:
      BuildAtom(*document, context, id);
      break;
    case FileKind::kStep:
      document->root = ScalarNode(*document, *StepOf(context.params[id.param]));
      break;
    case FileKind::kModel:
      built = BuildModel(*document, context, id);
      break;
    case FileKind::kOptimizer:
      built = BuildOptimizer(*document, context);
      break;
  }
  if (!built) return Within(PathOf(context, id), std::move(built).error());
  return document;
}

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
  return written;
}

}  // namespace shardwright::checkpoints
