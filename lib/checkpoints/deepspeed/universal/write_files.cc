// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/common/entries.h"
#include "checkpoints/deepspeed/common/universal_info.h"
#include "checkpoints/deepspeed/universal/atoms_internal.h"
#include "checkpoints/deepspeed/universal/write_internal.h"
#include "checkpoints/pickled/document.h"
#include "checkpoints/pickled/hyper.h"
#include "engine/layout/states.h"

// Builds the files of the superset form of docs/formats/deepspeed.md, "Recommended superset
// directory". State files are dicts, or bare tensors for stage-3 loaders that cannot open dicts.

namespace shardwright::checkpoints::atoms {

using layout::Cut;
using layout::Split;
using pickle::Node;

const Scalar* StepOf(const Param& param) {
  const auto it = std::find_if(param.scalars.begin(), param.scalars.end(),
                               [](const Scalar& scalar) { return scalar.state == layout::kStep; });
  return it == param.scalars.end() ? nullptr : &*it;
}

namespace {

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

/// Appends the entries of a dict to `out`, without the keys in `written`.
/// \param what  names the dict in errors
Status CopyOthers(const Node& source, std::span<const std::string_view> written,
                  std::string_view what, Graft& graft, Node* out) {
  for (std::size_t i = 0; i < source.entry_count(); ++i) {
    if (IsOneOf(source.key(i), written)) continue;
    auto value = graft.Take(source.value(i));
    if (!value) return Within(what, value.error());
    out->items.push_back(source.key(i));
    out->items.push_back(*value);
  }
  return {};
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
  SW_TRY(CopyOthers(*source, kModelKeys, "client state", graft, root));
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
    SW_TRY(CopyOthers(*source, kOptimizerKeys, "optimizer state", graft, root));
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

}  // namespace

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

}  // namespace shardwright::checkpoints::atoms
