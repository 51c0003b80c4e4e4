// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "files/pickle/machine_internal.h"
#include "support/base/checked.h"
#include "support/base/limits.h"

namespace shardwright::pickle {

using Tag = Value::Tag;

namespace {

bool IsEmptyDict(const Node* node) { return node->is_dict() && node->items.empty(); }

}  // namespace

// Reads ("storage", class, key, location, elements); the legacy stream adds a view.
Result<Value> Machine::LoadPersistent(const Value& id) {
  if (id.tag != Tag::kTuple) return Bad("persistent id is not a tuple");
  const Args items = TupleItems(id);
  const auto is_word = [&](const Value& value, std::string_view word) {
    return (IsString(value) && Text(value) == word) ||
           (IsNode(value, Kind::kBytes) && value.node->text == word);
  };
  if (!items.empty() && is_word(items[0], "module")) {
    return Unsupported("a whole module with its source: only state dicts are read");
  }
  const bool legacy = items.size() == 6 && items[5].tag == Tag::kNone;
  if (items.size() == 6 && !legacy) return Unsupported("a storage that is a view of another");
  if ((items.size() != 5 && !legacy) || !is_word(items[0], "storage")) {
    return Bad("persistent id is not a storage");
  }
  if (IsKnown(items[1], Known::kUnsupportedStorage)) {
    return Unsupported("a quantized storage: " + Describe(items[1]));
  }
  if (!IsKnown(items[1], Known::kStorage)) return Bad("unknown storage: " + Describe(items[1]));
  if (!IsString(items[2]) && !IsNode(items[2], Kind::kBytes))
    return Bad("invalid key of a storage");
  if (items[4].tag != Tag::kInt || items[4].integer < 0)
    return Bad("invalid element count of a storage");
  StorageUse use;
  use.key = IsString(items[2]) ? std::string(Text(items[2])) : items[2].node->text;
  use.dtype = globals_[items[1].slot].meaning.dtype;
  use.untyped = globals_[items[1].slot].meaning.untyped;
  use.elems = static_cast<std::uint64_t>(items[4].integer);
  use.at = op_at_;
  return UseStorage(std::move(use));
}

Result<Value> Machine::UseStorage(StorageUse use) {
  if (use.key.size() > limits::kNameBytes) return Bad("key of a storage is too long");
  Value value;
  value.tag = Tag::kStorage;
  const auto found = storage_slots_.find(use.key);
  if (found == storage_slots_.end()) {
    if (Result<std::uint64_t> bytes = CheckedMul(use.elems, ItemSize(use.dtype)); !bytes) {
      return tl::unexpected<Error>(Located(std::move(bytes).error()));
    }
    if (graph_.storages.size() == std::numeric_limits<std::uint32_t>::max()) {
      return Bad("too many storages");
    }
    SW_TRY(Charge(sizeof(StorageUse) + 64 + 2 * use.key.size()));
    value.slot = graph_.storages.size();
    storage_slots_.emplace(use.key, static_cast<std::uint32_t>(value.slot));
    graph_.storages.push_back(std::move(use));
    return value;
  }
  const StorageUse& first = graph_.storages[found->second];
  if (first.dtype != use.dtype || first.untyped != use.untyped || first.elems != use.elems) {
    return Bad("storage \"" + use.key + "\" is declared twice and differs: " +
               std::to_string(first.elems) + " elements of " + std::string(Name(first.dtype)) +
               ", then " + std::to_string(use.elems) + " of " + std::string(Name(use.dtype)));
  }
  value.slot = found->second;
  return value;
}

Result<std::uint64_t> Machine::CountArg(const Value& value) const {
  if (value.tag == Tag::kInt && value.integer >= 0) {
    return static_cast<std::uint64_t>(value.integer);
  }
  if (value.tag == Tag::kInt) return Bad("a count is negative: " + std::to_string(value.integer));
  return Bad("count expected, found " + Describe(value));
}

Result<Shape> Machine::ShapeArg(const Value& value) const {
  Shape shape;
  if (IsNode(value, Kind::kSize)) {
    for (const Node* item : value.node->items) {
      if (item->integer < 0) return Bad("a size is negative: " + std::to_string(item->integer));
      shape.push_back(static_cast<std::uint64_t>(item->integer));
    }
  } else if (value.tag == Tag::kTuple) {
    const Args items = TupleItems(value);
    if (items.size() > limits::kTensorRank) return Bad("tensor with too many dimensions");
    shape.reserve(items.size());
    for (const Value& item : items) {
      SW_TRY_ASSIGN(const std::uint64_t extent, CountArg(item));
      shape.push_back(extent);
    }
  } else {
    return Bad("sizes of a tensor are " + Describe(value));
  }
  if (shape.size() > limits::kTensorRank) return Bad("tensor with too many dimensions");
  return shape;
}

Status Machine::CheckHooks(const Value& hooks) const {
  if (hooks.tag == Tag::kNone) return {};
  if (hooks.tag == Tag::kNode && IsEmptyDict(hooks.node)) return {};
  return Unsupported("tensor with backward hooks");
}

Status Machine::CheckMetadata(const Value& metadata) const {
  if (metadata.tag == Tag::kNone) return {};
  if (!IsNode(metadata, Kind::kDict)) return Bad("metadata of a tensor is " + Describe(metadata));
  const Node* dict = metadata.node;
  for (std::size_t i = 0; i < dict->entry_count(); ++i) {
    const Node* value = dict->value(i);
    if (value->kind != Kind::kBool || value->integer != 0) {
      const std::string key = dict->key(i)->is_string() ? dict->key(i)->text : "metadata";
      return Unsupported("tensor with " + key + " set: its bytes are not its values");
    }
  }
  return {};
}

Result<DType> Machine::TensorDType(Known known, Args args, const StorageUse& use) const {
  if (known != Known::kTensorV3) {
    if (use.untyped) return Bad("storage \"" + use.key + "\" has no element type");
    return use.dtype;
  }
  if (!use.untyped) return Bad("storage \"" + use.key + "\" has an element type of its own");
  if (args[6].tag != Tag::kGlobal) return Bad("dtype of a tensor is " + Describe(args[6]));
  const std::string& dotted = globals_[args[6].slot].meaning.dotted;
  const std::optional<DType> dtype = DTypeOfGlobal(dotted);
  if (!dtype) return Unsupported("tensor of dtype " + dotted);
  return *dtype;
}

// Arguments: storage, offset, size, stride[, requires_grad, hooks[, dtype (v3)][, metadata]].
Status Machine::FillTensor(Known known, Args args, Tensor& tensor) const {
  const std::size_t required = known == Known::kTensor ? 4 : known == Known::kTensorV2 ? 6 : 7;
  const std::size_t allowed = known == Known::kTensor ? 4 : required + 1;
  if (args.size() < required || args.size() > allowed) {
    return Bad("tensor with " + std::to_string(args.size()) + " arguments");
  }
  if (args[0].tag != Tag::kStorage) return Bad("storage of a tensor is " + Describe(args[0]));
  tensor.storage = static_cast<std::uint32_t>(args[0].slot);
  SW_TRY_ASSIGN(tensor.dtype, TensorDType(known, args, graph_.storages[args[0].slot]));
  SW_TRY_ASSIGN(tensor.offset, CountArg(args[1]));
  SW_TRY_ASSIGN(tensor.shape, ShapeArg(args[2]));
  SW_TRY_ASSIGN(tensor.strides, ShapeArg(args[3]));
  if (known != Known::kTensor) {
    if (args[4].tag != Tag::kBool) return Bad("requires_grad is " + Describe(args[4]));
    tensor.requires_grad = args[4].integer != 0;
    SW_TRY(CheckHooks(args[5]));
    if (args.size() == allowed) SW_TRY(CheckMetadata(args.back()));
  }
  return CheckTensor(tensor);
}

Status Machine::CheckTensor(const Tensor& tensor) const {
  const StorageUse& use = graph_.storages[tensor.storage];
  const std::uint64_t item_bytes = use.untyped ? ItemSize(tensor.dtype) : 1;
  Status inside = CheckBounds(tensor, use.elems / item_bytes);
  if (!inside) {
    inside.error().message += " (storage \"" + use.key + "\")";
    return tl::unexpected<Error>(Located(std::move(inside).error()));
  }
  return {};
}

Result<Value> Machine::CallTensor(Known known, Args args) {
  auto tensor = std::make_unique<Tensor>();
  SW_TRY(FillTensor(known, args, *tensor));
  SW_TRY(Charge(sizeof(Tensor) + 2 * sizeof(std::uint64_t) * tensor->shape.size()));
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kTensor));
  node->tensor = std::move(tensor);
  return OfNode(node);
}

Result<const Node*> Machine::Attributes(const Value& state) {
  if (state.tag == Tag::kNone) return nullptr;
  Value dict = state;
  // (attributes, slots) if the class has slots.
  if (state.tag == Tag::kTuple && TupleItems(state).size() == 2) {
    const Value slots = TupleItems(state)[1];
    const bool no_slots =
        slots.tag == Tag::kNone || (slots.tag == Tag::kNode && IsEmptyDict(slots.node));
    if (!no_slots) return Unsupported("tensor with slots");
    dict = TupleItems(state)[0];
  }
  if (dict.tag == Tag::kNone) return nullptr;
  if (!IsNode(dict, Kind::kDict)) return Unsupported("state of a tensor is " + Describe(dict));
  return IsEmptyDict(dict.node) ? nullptr : dict.node;
}

// (tensor, requires_grad, hooks[, attributes])
Result<Value> Machine::CallParameter(Known known, Args args) {
  const std::size_t count = known == Known::kParameter ? 3 : 4;
  if (args.size() != count || !IsNode(args[0], Kind::kTensor) || args[1].tag != Tag::kBool) {
    return Bad("invalid arguments of a parameter");
  }
  SW_TRY(CheckHooks(args[2]));
  auto tensor = std::make_unique<Tensor>(*args[0].node->tensor);
  tensor->is_parameter = true;
  tensor->requires_grad = args[1].integer != 0;
  if (count == 4) {
    SW_TRY_ASSIGN(tensor->attributes, Attributes(args[3]));
  }
  SW_TRY(Charge(sizeof(Tensor) + 2 * sizeof(std::uint64_t) * tensor->shape.size()));
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kTensor));
  node->tensor = std::move(tensor);
  return OfNode(node);
}

// (rebuild function, class, its arguments, attributes)
Result<Value> Machine::CallFromType(Args args) {
  if (args.size() != 4 || args[0].tag != Tag::kGlobal || args[2].tag != Tag::kTuple) {
    return Bad("invalid arguments of a tensor with attributes");
  }
  if (IsKnown(args[0], Known::kWrapper)) return CallSharded(args);
  const std::string cls = Describe(args[1]);
  const bool parameter =
      cls == "class torch.nn.parameter.Parameter" || cls == "class torch.nn.Parameter";
  if (cls != "class torch.Tensor" && !parameter) return Unsupported("tensor of " + cls);
  const Known known = globals_[args[0].slot].meaning.known;
  const Args inner = TupleItems(args[2]);
  const bool plain =
      known == Known::kTensor || known == Known::kTensorV2 || known == Known::kTensorV3;
  const bool rebuilt = known == Known::kParameter || known == Known::kParameterWithState;
  if (!plain && !rebuilt) return Unsupported("tensor built by " + Describe(args[0]));
  SW_TRY_ASSIGN(const Value value, plain ? CallTensor(known, inner) : CallParameter(known, inner));
  Tensor& tensor = *value.node->tensor;
  tensor.is_parameter = tensor.is_parameter || parameter;
  SW_TRY_ASSIGN(tensor.attributes, Attributes(args[3]));
  return value;
}

// Arguments: (rebuild function, class, its arguments, which
// begin with the class, state). Records the call unchanged.
Result<Value> Machine::CallSharded(Args args) {
  const auto is_sharded = [&](const Value& cls) {
    return cls.tag == Tag::kGlobal && IsShardedTensor(globals_[cls.slot].meaning.dotted);
  };
  const Args inner = TupleItems(args[2]);
  if (!is_sharded(args[1])) return Unsupported("tensor of " + Describe(args[1]));
  if (inner.empty() || !is_sharded(inner[0]) ||
      globals_[inner[0].slot].meaning.dotted != globals_[args[1].slot].meaning.dotted) {
    return Bad("invalid arguments of a tensor of " + Describe(args[1]));
  }
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kObject));
  SW_TRY_ASSIGN(Node * rebuild, NewNode(Kind::kGlobal));
  rebuild->text = "torch._tensor._rebuild_from_type_v2";
  SW_TRY_ASSIGN(Node * tuple, NewNode(Kind::kTuple));
  node->callable = rebuild;
  node->args = tuple;
  // The tuple pool does not move while ToNodes makes nodes from it.
  SW_TRY(ToNodes(args, tuple->items));
  return OfNode(node);
}

// (tensor on the CPU, dtype, device, requires_grad)
Result<Value> Machine::CallDeviceTensor(Args args) {
  if (args.size() != 4 || !IsNode(args[0], Kind::kTensor) || args[1].tag != Tag::kGlobal ||
      args[3].tag != Tag::kBool) {
    return Bad("invalid arguments of a device tensor");
  }
  const Tensor& host = *args[0].node->tensor;
  if (DTypeOfGlobal(globals_[args[1].slot].meaning.dotted) != host.dtype) {
    return Unsupported("device tensor of another dtype than its data");
  }
  auto tensor = std::make_unique<Tensor>(host);
  tensor->requires_grad = args[3].integer != 0;
  SW_TRY(Charge(sizeof(Tensor) + 2 * sizeof(std::uint64_t) * tensor->shape.size()));
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kTensor));
  node->tensor = std::move(tensor);
  return OfNode(node);
}

}  // namespace shardwright::pickle
