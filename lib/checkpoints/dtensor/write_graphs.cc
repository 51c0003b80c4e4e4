// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/dtensor/local_shard_internal.h"
#include "checkpoints/dtensor/write_internal.h"
#include "files/pickle/writer.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dtensor {
namespace {

using pickle::Node;

/// Creates the tensors of one file.
class Tensors {
 public:
  Tensors(const FilesPlan& plan, std::uint64_t rank, Document* document)
      : plan_(plan), rank_(rank), document_(*document) {}

  Result<const Node*> Make(std::uint32_t number) {
    const StateTensor& tensor = plan_.tensors[number];
    const PlannedParam& param = plan_.params[tensor.param];
    if (param.plain) return document_.AddTensor(number, tensor.dtype, param.param.shape);
    SW_TRY_ASSIGN(layout::Piece piece, plan_.PieceOf(param, rank_));
    // Storages are numbered by first use: the piece, then the mesh if it is new.
    const Node* local = document_.AddTensor(number, tensor.dtype, std::move(piece.sizes));
    const Mesh& mesh = MeshFor(param.on_whole_mesh);
    return DTensorNode(document_.arena, local, mesh.node, plan_.layout.form, mesh.sizes,
                       param.splits, param.param.shape, tensor.dtype);
  }

 private:
  struct Mesh {
    const Node* node = nullptr;
    std::vector<std::uint64_t> sizes;
  };

  const Mesh& MeshFor(bool whole) {
    const bool parallel = std::find(plan_.layout.roles.begin(), plan_.layout.roles.end(),
                                    Role::kTensorParallel) != plan_.layout.roles.end();
    Mesh& mesh = whole || !parallel ? whole_ : part_;
    if (mesh.node == nullptr) {
      const DeviceMesh device = plan_.MeshOf(rank_, whole || !parallel);
      mesh.sizes = device.sizes;
      mesh.node = MeshNode(document_, device, rank_);
    }
    return mesh;
  }

  const FilesPlan& plan_;
  std::uint64_t rank_;
  Document& document_;
  Mesh whole_, part_;
};

const Node* SlotNode(Document& document, const Scalar& scalar) {
  if (!scalar.is_tensor) {
    return scalar.value != nullptr ? scalar.value : document.arena.None();
  }
  return document.AddInline(scalar.bytes, scalar.dtype, scalar.shape);
}

/// Builds the optimizer's states of one parameter.
Result<Node*> SlotsOf(const PlannedParam& param, const FilesPlan& plan, Tensors* tensors,
                      Document* document) {
  Node* slots = document->arena.Dict();
  for (const Scalar& scalar : param.scalars) {
    Set(document->arena, slots, scalar.state, SlotNode(*document, scalar));
  }
  for (const std::uint32_t number : param.states) {
    SW_TRY_ASSIGN(const Node* tensor, tensors->Make(number));
    Set(document->arena, slots, plan.tensors[number].state, tensor);
  }
  return slots;
}

const Node* IdNode(const FilesPlan& plan, Document* document, std::size_t id,
                   const std::string& name) {
  if (plan.layout.trainer == Trainer::kVerl) {
    return document->arena.Int(static_cast<std::int64_t>(id));
  }
  return document->arena.String(name);
}

/// Returns the options of a group, as tensors where the source has tensors.
const Node* WithTensors(const PlannedGroup& group, Document* document) {
  pickle::Arena& arena = document->arena;
  Node* options = CopyDict(arena, group.options);
  for (const Scalar& tensor : group.tensors) {
    if (options->Find(tensor.state) != nullptr) {
      Set(arena, options, tensor.state,
          document->AddInline(tensor.bytes, tensor.dtype, tensor.shape));
      continue;
    }
    const std::size_t dot = std::min(tensor.state.rfind('.'), tensor.state.size());
    const std::string key = tensor.state.substr(0, dot);
    const Node* list = options->Find(key);
    if (list == nullptr) continue;
    std::vector<const Node*> items = list->items;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (tensor.state != Joined(std::vector<std::string>{key, std::to_string(i)}, ".")) continue;
      items[i] = document->AddInline(tensor.bytes, tensor.dtype, tensor.shape);
    }
    Set(arena, options, key,
        list->kind == pickle::Kind::kList ? arena.List(std::move(items))
                                          : arena.Tuple(std::move(items)));
  }
  return options;
}

/// Adds the states of flat vectors, one for each unit.
void AddFlatStates(const FilesPlan& plan, Document* document, Node* state) {
  pickle::Arena& arena = document->arena;
  for (std::size_t unit = 0; unit < plan.units.size(); ++unit) {
    const PlannedParam& first = plan.params[plan.flat[plan.units[unit].params.front()]];
    Node* slots = arena.Dict();
    for (const Scalar& scalar : first.scalars) {
      Set(arena, slots, scalar.state, SlotNode(*document, scalar));
    }
    for (std::size_t s = 0; s < first.states.size(); ++s) {
      const StateTensor& tensor = plan.tensors[first.states[s]];
      const auto number = static_cast<std::uint32_t>(kFlatTensors + unit * first.states.size() + s);
      Set(arena, slots, tensor.state,
          document->AddTensor(number, tensor.dtype, {plan.FlatLength(unit)}));
    }
    if (slots->items.empty()) continue;
    state->items.push_back(arena.Int(static_cast<std::int64_t>(unit)));
    state->items.push_back(slots);
  }
}

}  // namespace

Result<std::unique_ptr<Document>> ModelDocument(const FilesPlan& plan, std::uint64_t rank) {
  auto document = std::make_unique<Document>();
  pickle::Arena& arena = document->arena;
  Node* root = arena.Dict(plan.layout.trainer != Trainer::kAccelerate);
  Tensors tensors(plan, rank, document.get());
  // Aliases of a tensor may precede the name that has the data.
  std::map<std::string, const Node*> made;
  for (const PlannedParam& param : plan.params) {
    const std::string& holder =
        param.param.alias_of.empty() ? param.param.name : param.param.alias_of;
    const Node*& node = made[holder];
    if (node == nullptr) {
      const auto at = plan.by_name.find(holder);
      if (at == plan.by_name.end()) {
        return BadInput(Quoted(param.param.name), " is tied to ", Quoted(holder),
                        ", which is missing");
      }
      SW_TRY_ASSIGN(node, tensors.Make(plan.params[at->second].model));
    }
    root->items.push_back(arena.String(param.param.name));
    root->items.push_back(node);
  }
  document->root = root;
  return document;
}

Result<std::unique_ptr<Document>> OptimizerDocument(const FilesPlan& plan, std::uint64_t rank) {
  auto document = std::make_unique<Document>();
  pickle::Arena& arena = document->arena;
  Tensors tensors(plan, rank, document.get());
  Node* state = arena.Dict();
  std::vector<const Node*> groups;
  const bool flat = plan.layout.fsdp_version == 1;
  const bool named_groups = plan.layout.trainer == Trainer::kTorchCheckpointing;
  if (flat) AddFlatStates(plan, document.get(), state);
  std::size_t id = 0;
  for (const PlannedGroup& group : plan.groups) {
    std::vector<const Node*> ids;
    for (std::size_t i = 0; i < (flat ? plan.units.size() : group.params.size()); ++i, ++id) {
      if (flat) {
        ids.push_back(arena.Int(static_cast<std::int64_t>(id)));
        continue;
      }
      const PlannedParam& param = plan.params[group.params[i]];
      ids.push_back(IdNode(plan, document.get(), id, plan.layout.OptimizerName(param.param.name)));
      SW_TRY_ASSIGN(Node * slots, SlotsOf(param, plan, &tensors, document.get()));
      if (slots->items.empty()) continue;
      state->items.push_back(ids.back());
      state->items.push_back(slots);
    }
    Node* options = CopyDict(arena, WithTensors(group, document.get()));
    Set(arena, options, named_groups ? "param_names" : "params", arena.List(std::move(ids)));
    groups.push_back(options);
  }
  Node* root = arena.Dict();
  Set(arena, root, "state", state);
  Set(arena, root, "param_groups", arena.List(std::move(groups)));
  if (named_groups) Set(arena, root, "_optimizer_state_format_version", arena.Int(1));
  document->root = root;
  return document;
}

Result<std::unique_ptr<Document>> OwnDocument(const FilesPlan& plan, std::size_t item,
                                              std::uint64_t rank) {
  auto document = std::make_unique<Document>();
  const OwnFiles::One& one = plan.own->items[item];
  const OwnFiles::Passed& passed = one.ranks[rank % one.ranks.size()];
  Graft graft(*document, passed.document, passed.members);
  auto root = graft.Take(passed.document.root);
  if (!root) return Within(one.name, std::move(root).error());
  document->root = *root;
  return document;
}

namespace {

/// Formats the path of a tensor for torch_checkpointing: JSON without spaces.
std::string PathText(std::initializer_list<std::string_view> words) {
  std::string text;
  for (const std::string_view word : words) {
    text += text.empty() ? "[\"" : ",\"";
    for (const char c : word) {
      if (c == '"' || c == '\\') text += '\\';
      text += c;
    }
    text += '"';
  }
  return text + "]";
}

class TableMaker {
 public:
  explicit TableMaker(const FilesPlan& plan) : plan_(plan) {}

  Result<std::string> Make();

 private:
  const Node* Counts(const std::vector<std::uint64_t>& values, bool tuple) {
    std::vector<const Node*> nodes;
    nodes.reserve(values.size());
    for (const std::uint64_t value : values) {
      nodes.push_back(arena_.Int(static_cast<std::int64_t>(value)));
    }
    return tuple ? arena_.Tuple(std::move(nodes)) : arena_.List(std::move(nodes));
  }
  const Node* Placements(const std::vector<layout::MeshSplit>& splits);
  const Node* Sharding(const Shape& shape, DType dtype, const DeviceMesh& mesh,
                       const std::vector<layout::MeshSplit>& splits);
  void Add(Node* paths, const std::string& path, const Shape& shape, DType dtype,
           const PlannedParam* param);
  const Node* ItemNode(Node* paths);

  const FilesPlan& plan_;
  pickle::Arena arena_;
};

const Node* TableMaker::Placements(const std::vector<layout::MeshSplit>& splits) {
  std::vector<const Node*> nodes;
  for (const layout::MeshSplit& split : splits) {
    const bool strided = split.kind == layout::MeshSplit::Kind::kStridedShard;
    Node* node = arena_.Dict();
    Set(arena_, node, "type",
        arena_.String(!split.shards() ? "Replicate"
                      : strided       ? "StridedShard"
                                      : "Shard"));
    if (split.shards()) Set(arena_, node, "dim", arena_.Int(split.dim));
    if (strided) {
      Set(arena_, node, "split_factor", arena_.Int(static_cast<std::int64_t>(split.split_factor)));
    }
    nodes.push_back(node);
  }
  return arena_.List(std::move(nodes));
}

const Node* TableMaker::Sharding(const Shape& shape, DType dtype, const DeviceMesh& mesh,
                                 const std::vector<layout::MeshSplit>& splits) {
  Node* spec = arena_.Dict();
  Set(arena_, spec, "device_type", arena_.String(mesh.device));
  Set(arena_, spec, "mesh_shape", Counts(mesh.sizes, true));
  Set(arena_, spec, "mesh_data", Counts(mesh.ranks, true));
  std::vector<const Node*> names;
  if (mesh.names) {
    for (const std::string& name : *mesh.names) names.push_back(arena_.String(name));
  }
  Set(arena_, spec, "mesh_dim_names", mesh.names ? arena_.Tuple(std::move(names)) : arena_.None());
  Node* data = arena_.Dict();
  Set(arena_, data, "global_shape", Counts(shape, false));
  Set(arena_, data, "dtype", arena_.String("torch." + std::string(Name(dtype))));
  Set(arena_, data, "stride", Counts(ContiguousStrides(shape), false));
  Set(arena_, data, "mesh_spec", spec);
  Set(arena_, data, "placements", Placements(splits));
  Node* sharding = arena_.Dict();
  Set(arena_, sharding, "type", arena_.String("DTensorShardingMetadata"));
  Set(arena_, sharding, "data", data);
  return sharding;
}

/// \param param  null, or a plain parameter: every rank has the whole tensor
void TableMaker::Add(Node* paths, const std::string& path, const Shape& shape, DType dtype,
                     const PlannedParam* param) {
  std::vector<const Node*> groups;
  const auto add = [&](const DeviceMesh& mesh, const std::vector<layout::MeshSplit>& splits) {
    Node* group = arena_.Dict();
    Set(arena_, group, "ranks", Counts(mesh.ranks, true));
    Set(arena_, group, "sharding_metadata", Sharding(shape, dtype, mesh, splits));
    groups.push_back(group);
  };
  if (param == nullptr || param->plain) {
    DeviceMesh world;
    world.device = plan_.layout.device;
    world.sizes = {plan_.layout.ranks()};
    for (std::uint64_t i = 0; i < world.sizes[0]; ++i) world.ranks.push_back(i);
    add(world, {layout::MeshSplit::Replicate()});
  } else {
    // Each sibling part of the mesh has the tensor, so each part gets an entry.
    for (std::uint64_t rank = 0; rank < plan_.layout.ranks(); ++rank) {
      const DeviceMesh mesh = plan_.MeshOf(rank, param->on_whole_mesh);
      if (mesh.ranks.front() == rank) add(mesh, param->splits);
    }
  }
  Set(arena_, paths, path, arena_.List(std::move(groups)));
}

const Node* TableMaker::ItemNode(Node* paths) {
  Node* info = arena_.Dict();
  for (std::uint64_t rank = 0; rank < plan_.layout.ranks(); ++rank) {
    info->items.push_back(arena_.Int(static_cast<std::int64_t>(rank)));
    info->items.push_back(arena_.None());
  }
  Node* item = arena_.Dict();
  Set(arena_, item, "nested_path_to_metadata", paths);
  Set(arena_, item, "rank_to_layout_info", info);
  return item;
}

Result<std::string> TableMaker::Make() {
  Node* items = arena_.Dict();
  Node* model = arena_.Dict();
  for (const PlannedParam& planned : plan_.params) {
    const std::string& holder =
        planned.param.alias_of.empty() ? planned.param.name : planned.param.alias_of;
    const PlannedParam& param = plan_.params[plan_.by_name.at(holder)];
    Add(model, PathText({planned.param.name}), param.param.shape, plan_.tensors[param.model].dtype,
        &param);
  }
  Set(arena_, items, plan_.layout.model_item, ItemNode(model));
  if (plan_.has_optimizer) {
    Node* optimizer = arena_.Dict();
    for (const PlannedParam& param : plan_.params) {
      const std::string& name = plan_.layout.OptimizerName(param.param.name);
      for (const Scalar& scalar : param.scalars) {
        if (!scalar.is_tensor) continue;
        Add(optimizer, PathText({"state", name, scalar.state}), scalar.shape, scalar.dtype,
            nullptr);
      }
      for (const std::uint32_t number : param.states) {
        const StateTensor& tensor = plan_.tensors[number];
        Add(optimizer, PathText({"state", name, tensor.state}), param.param.shape, tensor.dtype,
            &param);
      }
    }
    Set(arena_, items, plan_.layout.optimizer_item, ItemNode(optimizer));
  }
  Node* root = arena_.Dict();
  Set(arena_, root, "version", arena_.String("2.0"));
  Set(arena_, root, "world_size", arena_.Int(static_cast<std::int64_t>(plan_.layout.ranks())));
  Set(arena_, root, "metadata", items);
  SW_TRY_ASSIGN(pickle::Dumped dumped, pickle::Dump(root, {}));
  return std::move(dumped.bytes);
}

}  // namespace

Result<std::string> ItemTableBytes(const FilesPlan& plan) { return TableMaker(plan).Make(); }

}  // namespace shardwright::checkpoints::dtensor
