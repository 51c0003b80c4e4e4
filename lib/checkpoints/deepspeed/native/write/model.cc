// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <functional>

#include "checkpoints/deepspeed/native/write/write_internal.h"

namespace shardwright::checkpoints::deepspeed {

using pickle::Arena;
using pickle::Node;

namespace {

constexpr std::array<std::string_view, 1> kConfigKey = {"ds_config"};

std::uint32_t WeightState(const Geometry& geometry, const Param& param) {
  if (param.kind == ParamKind::kBuffer) return kBuffer;
  if (param.kind == ParamKind::kFrozen) return kFrozen;
  return geometry.plain_fp32 ? kFp32 : kWeight;
}

DType WeightDType(const Geometry& geometry, std::uint32_t param) {
  if (geometry.plain_fp32 && geometry.params[param].kind == ParamKind::kTrainable) {
    return DType::kF32;
  }
  return geometry.dtypes[param][WeightState(geometry, geometry.params[param])].value_or(
      geometry.params[param].dtype);
}

/// Adds a parameter's entire weight of this mp rank.
const Node* WeightNode(Document& document, const Geometry& geometry, std::uint32_t param,
                       std::uint32_t mp) {
  Cutting cutting;
  cutting.kind = Cutting::Kind::kWhole;
  cutting.param = param;
  cutting.state = WeightState(geometry, geometry.params[param]);
  return document.Add(cutting, WeightDType(geometry, param), geometry.ShardShape(param, mp));
}

/// Returns an empty tensor for a parameter that ZeRO-3 partitions. Each type has one storage.
const Node* EmptyNode(Document& document, std::map<DType, const Node*>& empties, DType dtype) {
  const Node*& first = empties[dtype];
  if (first == nullptr) {
    first = document.AddInline({}, dtype, {0});
    return first;
  }
  pickle::Tensor tensor;
  tensor.storage = first->tensor->storage;
  tensor.dtype = dtype;
  tensor.shape = {0};
  tensor.strides = {1};
  return document.arena.TensorOf(std::move(tensor));
}

/// Weights of a mp rank by parameter. Tied names share one tensor.
using Weights = std::map<std::uint32_t, const Node*>;

/// Adds the opaque entries that `belongs` accepts to a state dict.
/// \param local  converts names in the model to keys of the dict
Status PutEntries(Document& document, const Geometry& geometry, const FileId& id, Node* dict,
                  const std::function<bool(const OpaqueEntry&)>& belongs,
                  const std::function<std::string(const std::string&)>& local) {
  std::vector<const OpaqueEntry*> entries;
  for (const OpaqueEntry& entry : geometry.entries) {
    if (belongs(entry)) entries.push_back(&entry);
  }
  return EntryTaker(document).PutInto(dict, entries, geometry.EntryRank(id.mp), local);
}

std::string SameName(const std::string& name) { return name; }

Result<const Node*> ModuleNode(Document& document, const Geometry& geometry, const FileId& id,
                               const Node* source, Weights& weights) {
  Arena& arena = document.arena;
  if (geometry.to.pipeline) return arena.None();
  Node* module = arena.Dict(true);
  std::map<DType, const Node*> empties;
  for (std::uint32_t i = 0; i < geometry.params.size(); ++i) {
    const Param& param = geometry.params[i];
    std::uint32_t data = i;
    if (!param.alias_of.empty()) {
      const auto found = geometry.by_name.find(param.alias_of);
      if (found == geometry.by_name.end()) {
        return Fail(Errc::kBadInput, "\"", param.name, "\" is tied to \"", param.alias_of,
                    "\", which is not in the model");
      }
      data = found->second;
    }
    if (geometry.params[data].expert) continue;
    const Node* value = nullptr;
    if (geometry.to.zero == 3 && geometry.params[data].kind != ParamKind::kBuffer) {
      value = EmptyNode(document, empties, WeightDType(geometry, data));
    } else {
      const Node*& weight = weights[data];
      if (weight == nullptr) weight = WeightNode(document, geometry, data, id.mp);
      value = weight;
    }
    module->items.push_back(arena.String(param.name));
    module->items.push_back(value);
  }
  const auto belongs = [](const OpaqueEntry& entry) { return entry.layers.empty(); };
  SW_TRY(PutEntries(document, geometry, id, module, belongs, SameName));
  if (source != nullptr && source->is_dict()) module->state = source->state;
  return module;
}

const Node* BufferNames(Document& document, const Geometry& geometry, std::uint32_t mp) {
  std::vector<const Node*> names;
  for (std::uint32_t param : geometry.stage_params[geometry.stage_of(mp)]) {
    const Param& named = geometry.params[param];
    const auto other = geometry.by_name.find(named.alias_of);
    const Param& data = other == geometry.by_name.end() ? named : geometry.params[other->second];
    const bool entry = data.entry && !data.undecided;
    if (data.kind == ParamKind::kBuffer && !entry && !data.expert) {
      names.push_back(document.arena.String(named.name));
    }
  }
  return document.arena.List(std::move(names));
}

const Node* ShapesOf(Document& document, const Geometry& geometry, const FlatGroup& group,
                     std::size_t first, std::size_t last, std::uint32_t mp) {
  Arena& arena = document.arena;
  Node* shapes = arena.Dict(true);
  for (std::size_t i = first; i < last; ++i) {
    const std::uint32_t param = group.params[0][i];
    shapes->items.push_back(arena.String(geometry.LocalName(param)));
    shapes->items.push_back(arena.SizeOf(geometry.ShardShape(param, mp)));
  }
  return shapes;
}

const Node* ParamShapes(Document& document, const Geometry& geometry, std::uint32_t mp) {
  if (geometry.to.zero == 0) return document.arena.None();
  std::vector<const Node*> groups;
  for (const FlatGroup& group : geometry.flat[mp]) {
    if (geometry.to.zero < 3) {
      groups.push_back(ShapesOf(document, geometry, group, 0, group.params[0].size(), mp));
      continue;
    }
    for (const SubGroup& sub : group.sub_groups) {
      groups.push_back(ShapesOf(document, geometry, group, sub.first, sub.last, mp));
    }
  }
  return document.arena.List(std::move(groups));
}

/// Returns the parameters that the optimizer does not own: frozen or undecided ones, and trained
/// ones without elements. Adds those frozen after the optimizer was created, as DeepSpeed does.
std::vector<std::uint32_t> FrozenParams(const Geometry& geometry, std::uint32_t mp) {
  std::vector<std::uint32_t> frozen;
  for (std::uint32_t param : geometry.stage_params[geometry.stage_of(mp)]) {
    const Param& named = geometry.params[param];
    if (!named.alias_of.empty() || named.expert) continue;
    if (named.kind == ParamKind::kBuffer && !named.undecided) continue;
    if (named.kind != ParamKind::kTrainable || named.frozen_later ||
        geometry.cut(param, mp)->shard_elems() == 0) {
      frozen.push_back(param);
    }
  }
  return frozen;
}

/// Adds a rank's piece of a frozen ZeRO-3 parameter.
const Node* ShareNode(Document& document, const Geometry& geometry, std::uint32_t param,
                      std::uint32_t mp) {
  const std::uint64_t elems = geometry.cut(param, mp)->shard_elems();
  const std::uint64_t share = ShareElems(elems, geometry.to.dp);
  const DType dtype = WeightDType(geometry, param);
  if (share == 0) return document.AddInline({}, dtype, {share});
  Cutting cutting;
  cutting.kind = Cutting::Kind::kShare;
  cutting.param = param;
  cutting.state = WeightState(geometry, geometry.params[param]);
  return document.Add(cutting, dtype, {share});
}

/// Sets the key with whole frozen parameters for Shardwright's reader. DeepSpeed's
/// files cannot store a frozen parameter at stage 3 unless they contain all of them.
void SetWholeFrozen(Document& document, const Geometry& geometry, const FileId& id, Node* root) {
  Node* whole = document.arena.Dict();
  for (std::uint32_t param : FrozenParams(geometry, id.mp)) {
    if (geometry.params[param].kind != ParamKind::kFrozen) continue;
    whole->items.push_back(document.arena.String(geometry.params[param].name));
    whole->items.push_back(WeightNode(document, geometry, param, id.mp));
  }
  if (!whole->items.empty()) Set(document.arena, root, kWholeFrozen, whole);
}

void SetFrozen(Document& document, const Geometry& geometry, const FileId& id, Node* root,
               Weights& weights) {
  Arena& arena = document.arena;
  // DeepSpeed looks up every frozen parameter of the model in a dict, but none in None. From a dict
  // it would give every expert-parallel rank the frozen experts of the first one.
  if (geometry.to.zero < 2 || geometry.frozen_unknown || geometry.frozen_experts) {
    Set(arena, root, "frozen_param_shapes", arena.None());
    Set(arena, root, "frozen_param_fragments", arena.None());
    if (geometry.to.zero == 3 && id.rank == 0) SetWholeFrozen(document, geometry, id, root);
    return;
  }
  Node* shapes = arena.Dict(true);
  Node* fragments = arena.Dict(true);
  for (std::uint32_t param : FrozenParams(geometry, id.mp)) {
    const Node* name = arena.String(geometry.params[param].name);
    shapes->items.insert(shapes->items.end(),
                         {name, arena.SizeOf(geometry.ShardShape(param, id.mp))});
    const Node* value = nullptr;
    if (geometry.to.zero == 3) {
      value = ShareNode(document, geometry, param, id.mp);
    } else {
      const Node*& weight = weights[param];
      if (weight == nullptr) weight = WeightNode(document, geometry, param, id.mp);
      value = weight;
    }
    fragments->items.insert(fragments->items.end(), {name, value});
  }
  Set(arena, root, "frozen_param_shapes", shapes);
  Set(arena, root, "frozen_param_fragments", fragments);
}

/// Sets kinds that DeepSpeed's lists do not record, for
/// Shardwright's reader. DeepSpeed's loader ignores unknown keys.
void SetKinds(Document& document, const Geometry& geometry, const FileId& id, Node* root) {
  Arena& arena = document.arena;
  const bool listed = geometry.to.zero >= 2 && !geometry.frozen_experts;
  Node* kinds = arena.Dict();
  for (std::uint32_t param : geometry.stage_params[geometry.stage_of(id.mp)]) {
    const Param& named = geometry.params[param];
    if (!named.alias_of.empty() || named.expert) continue;
    const bool frozen = named.kind == ParamKind::kFrozen && !listed;
    const bool entry = named.kind == ParamKind::kBuffer && named.entry && !listed;
    if (!named.undecided && !frozen && !entry) continue;
    const char* kind = named.undecided ? "undecided" : frozen ? "frozen" : "entry";
    kinds->items.insert(kinds->items.end(), {arena.String(named.name), arena.String(kind)});
  }
  if (!kinds->items.empty()) Set(arena, root, kKinds, kinds);
}

/// Returns other names of parameters. Omits those of buffers and other entries: DeepSpeed
/// lists parameters only, and Shardwright's reader finds the others by their common storage.
const Node* SharedParams(Document& document, const Geometry& geometry, const FileId& id) {
  Arena& arena = document.arena;
  Node* shared = arena.Dict();
  bool left_out = false;
  for (const Param& param : geometry.params) {
    const auto other = geometry.by_name.find(param.alias_of);
    const Param& data = other == geometry.by_name.end() ? param : geometry.params[other->second];
    if (data.kind == ParamKind::kBuffer && !data.undecided) continue;
    left_out = left_out || !data.left_out_holder.empty();
    const std::string& holder =
        data.left_out_holder.empty() ? param.alias_of : data.left_out_holder;
    if (holder.empty()) continue;
    shared->items.push_back(arena.String(param.name));
    shared->items.push_back(arena.String(holder));
  }
  // DeepSpeed writes none at stage 0. It is needed only if a name with data was omitted.
  if (geometry.to.zero == 0 && !left_out) return arena.None();
  // DeepSpeed fills it on global rank 0 only.
  return id.mp == 0 && id.rank == 0 ? shared : arena.Dict();
}

const Node* Dimensions(Arena& arena, const Topology& to) {
  Node* dimensions = arena.Dict();
  Set(arena, dimensions, "pp_degree", arena.Count(to.pp));
  Set(arena, dimensions, "tp_degree", arena.Count(to.tp));
  return dimensions;
}

/// Returns the rows of the padded vocabulary over all tensor-parallel ranks, or 0 if there is none.
std::uint64_t PaddedRows(const Geometry& geometry) {
  for (std::uint32_t i = 0; i < geometry.params.size(); ++i) {
    const Param& param = geometry.params[i];
    if (!param.rule.padded || !param.alias_of.empty()) continue;
    return geometry.ShardShape(i, 0).front() * geometry.to.tp;
  }
  return 0;
}

/// Returns the arguments of Megatron-DeepSpeed with the target's sizes. Megatron-DeepSpeed compares
/// them with its own and refuses a checkpoint with others.
/// \param args  the object of MegatronArgs
const Node* MegatronArgsNode(Arena& arena, const Geometry& geometry, const Node* args) {
  const Topology& to = geometry.to;
  const std::pair<const char*, std::uint64_t> sizes[] = {
      {"tensor_model_parallel_size", to.tp},   {"model_parallel_size", to.tp},
      {"pipeline_model_parallel_size", to.pp}, {"data_parallel_size", to.dp},
      {"world_size", to.dp * to.mp()},         {"padded_vocab_size", PaddedRows(geometry)}};
  Node* state = CopyDict(arena, args->state);
  for (const auto& [key, size] : sizes) {
    if (size > 0 && state->Find(key) != nullptr) Set(arena, state, key, arena.Count(size));
  }
  Node* copy = arena.New(pickle::Kind::kObject);
  copy->build = args->build;
  copy->callable = args->callable;
  copy->args = args->args;
  copy->state = state;
  return copy;
}

Status PassThrough(Arena& arena, Graft& graft, const Geometry& geometry, const Node* source,
                   Node* root) {
  const Node* const arguments = MegatronArgs(source) != nullptr ? source->Find("args") : nullptr;
  for (std::size_t i = 0; i < source->entry_count(); ++i) {
    const Node* key = source->key(i);
    if (IsOneOf(key, kModelKeys) || IsOneOf(key, kConfigKey)) continue;
    auto value = graft.Take(source->value(i));
    if (!value) {
      return Within(key->is_string() ? key->text : "client state", std::move(value).error());
    }
    const bool sized = arguments != nullptr && source->value(i) == arguments;
    root->items.push_back(key);
    root->items.push_back(sized ? MegatronArgsNode(arena, geometry, *value) : *value);
  }
  if (root->Find("global_steps") == nullptr) {
    return Fail(Errc::kBadInput, "the source's model states have no \"global_steps\"");
  }
  return {};
}

}  // namespace

Status BuildModel(Document& document, const Geometry& geometry, const FileId& id) {
  Arena& arena = document.arena;
  const Passed& passed = geometry.PassedModel(id.mp);
  const Node* source = passed.document.root;
  Graft graft(document, passed.document, passed.members);
  Weights weights;
  Node* root = arena.Dict();
  SW_TRY_ASSIGN(const Node* module,
                ModuleNode(document, geometry, id, source->Find("module"), weights));
  Set(arena, root, "module", module);
  Set(arena, root, "buffer_names", BufferNames(document, geometry, id.mp));
  const Node* optimizer = arena.None();
  if (geometry.to.zero == 0 && !geometry.has_experts && !geometry.flat[id.mp].empty()) {
    SW_TRY_ASSIGN(optimizer, Stage0Node(document, geometry, id.mp, 0));
  }
  Set(arena, root, "optimizer", optimizer);
  Set(arena, root, "param_shapes", ParamShapes(document, geometry, id.mp));
  SetFrozen(document, geometry, id, root, weights);
  SetKinds(document, geometry, id, root);
  Set(arena, root, "shared_params", SharedParams(document, geometry, id));
  Set(arena, root, "dp_world_size", arena.Count(geometry.to.dp));
  Set(arena, root, "mp_world_size", arena.Count(geometry.to.mp()));
  Set(arena, root, "checkpoint_parallel_dimensions", Dimensions(arena, geometry.to));
  if (const Node* config = source->Find("ds_config")) {
    SW_TRY_ASSIGN(const Node* taken, graft.Take(config));
    Set(arena, root, "ds_config", ConfigNode(arena, geometry, taken));
  }
  Set(arena, root, "ds_version", VersionNode(arena, geometry, source));
  // It is equal on all ranks and can be the largest part of a file, so only rank 0 stores it.
  const Node* info = id.rank == 0 ? geometry.info : nullptr;
  if (geometry.keeps_info && id.rank == 0) {
    SW_TRY_ASSIGN(info, graft.Take(source->Find("universal_checkpoint_info")));
  }
  if (info != nullptr) Set(arena, root, "universal_checkpoint_info", info);
  SW_TRY(PassThrough(arena, graft, geometry, source, root));
  if (root->Find("skipped_steps") == nullptr) Set(arena, root, "skipped_steps", arena.Int(0));
  if (geometry.has_experts && root->Find("num_experts") == nullptr) {
    std::vector<const Node*> counts;
    for (const auto& [layer, experts] : geometry.layer_experts) {
      counts.push_back(arena.Count(experts));
    }
    Set(arena, root, "num_experts", arena.List(std::move(counts)));
  }
  document.root = root;
  return {};
}

namespace {

/// Returns a name within its layer: without the layer's index or the tied module's key.
std::string NameInLayer(const std::string& name) {
  constexpr std::string_view kTied = "tied_modules.";
  std::size_t dot = name.find('.');
  if (name.starts_with(kTied)) dot = name.find('.', kTied.size());
  return dot == std::string::npos ? name : name.substr(dot + 1);
}

bool InLayer(const Param& param, std::uint32_t layer) {
  if (param.tied_layers.empty()) return param.layer == layer;
  return std::find(param.tied_layers.begin(), param.tied_layers.end(), layer) !=
         param.tied_layers.end();
}

}  // namespace

Status BuildLayer(Document& document, const Geometry& geometry, const FileId& id) {
  Arena& arena = document.arena;
  Node* root = arena.Dict(true);
  for (std::uint32_t param : geometry.stage_params[geometry.stage_of(id.mp)]) {
    const Param& named = geometry.params[param];
    if (!InLayer(named, id.layer)) continue;
    root->items.push_back(arena.String(NameInLayer(named.name)));
    root->items.push_back(WeightNode(document, geometry, param, id.mp));
  }
  const auto belongs = [&](const OpaqueEntry& entry) {
    return std::find(entry.layers.begin(), entry.layers.end(), id.layer) != entry.layers.end();
  };
  SW_TRY(PutEntries(document, geometry, id, root, belongs, NameInLayer));
  document.root = root;
  return {};
}

Status BuildExpert(Document& document, const Geometry& geometry, const FileId& id) {
  Arena& arena = document.arena;
  Node* root = arena.Dict();
  for (std::uint32_t param : geometry.expert_params.at({id.layer, id.expert})) {
    root->items.push_back(arena.String(geometry.params[param].name));
    root->items.push_back(WeightNode(document, geometry, param, id.mp));
  }
  document.root = root;
  return {};
}

}  // namespace shardwright::checkpoints::deepspeed
