// SPDX-License-Identifier: Apache-2.0
#include "files/pickle/writer.h"

#include <limits>
#include <unordered_map>

#include "files/pickle/emitter.h"
#include "files/pickle/names_internal.h"
#include "files/pickle/opcodes_internal.h"

namespace shardwright::pickle {

namespace {

bool IsShareable(const Node& node) {
  return node.kind != Kind::kNone && node.kind != Kind::kBool && node.kind != Kind::kInt &&
         node.kind != Kind::kFloat && node.kind != Kind::kGlobal;
}

class Dumper {
 public:
  explicit Dumper(std::span<const StorageUse> storages)
      : storages_(storages), keys_(storages.size(), kNoKey) {}

  Result<Dumped> Run(const Node* root);

 private:
  static constexpr std::uint32_t kNoKey = std::numeric_limits<std::uint32_t>::max();

  void CountUses(const Node* node);
  Status Emit(const Node* node);
  Status EmitBody(const Node& node);
  Status EmitSequence(const Node& node);
  Status EmitCalled(std::string_view callable, const std::vector<const Node*>& items);
  Status EmitItems(const std::vector<const Node*>& items, std::size_t width, op::Code one,
                   op::Code many);
  Status EmitDict(const Node& node);
  Status EmitObject(const Node& node);
  Status EmitTensor(const Node& node);
  Status EmitStrided(const Tensor& tensor, bool requires_grad);
  Status EmitStridedArgs(const Tensor& tensor, bool requires_grad, bool typed);
  Status EmitStorage(std::uint32_t index);
  Status EmitText(std::string_view text) { return out_.Text(text); }
  Status EmitBytes(std::string_view bytes);
  Status EmitLong(std::string_view digits);
  void EmitInt(std::int64_t number) { out_.Int(number); }
  void EmitFloat(double number) { out_.Float(number); }
  void EmitExtents(std::span<const std::uint64_t> extents);
  void EmitHooks();
  void EmitWord(std::string_view word) { out_.Word(word); }
  Status EmitGlobal(std::string_view dotted);
  void EmitKnown(std::string_view dotted) { out_.Global(dotted); }
  void Op(op::Code code) { out_.Op(code); }
  void Fixed(std::uint64_t number, unsigned bytes) { out_.Fixed(number, bytes); }

  std::span<const StorageUse> storages_;
  std::vector<std::uint32_t> keys_;
  std::vector<std::uint32_t> order_;
  std::unordered_map<const Node*, std::uint32_t> uses_;
  std::unordered_map<const Node*, std::uint32_t> memo_;
  Emitter out_;
};

Result<Dumped> Dumper::Run(const Node* root) {
  // CheckGraph limits the depth of the recursions below.
  SW_TRY(CheckGraph(root));
  CountUses(root);
  SW_TRY(Emit(root));
  for (std::uint32_t i = 0; i < keys_.size(); ++i) {
    if (keys_[i] == kNoKey) order_.push_back(i);
  }
  return Dumped{std::move(out_).Finish(), std::move(order_)};
}

void Dumper::CountUses(const Node* node) {
  if (node == nullptr || !IsShareable(*node) || ++uses_[node] > 1) return;
  for (const auto* list : {&node->items, &node->list_items, &node->dict_items}) {
    for (const Node* item : *list) CountUses(item);
  }
  CountUses(node->callable);
  CountUses(node->args);
  CountUses(node->state);
  if (node->tensor) CountUses(node->tensor->attributes);
}

Status Dumper::Emit(const Node* node) {
  if (!IsShareable(*node)) return EmitBody(*node);
  const auto seen = memo_.find(node);
  if (seen != memo_.end()) {
    out_.Get(seen->second);
    return {};
  }
  SW_TRY(EmitBody(*node));
  if (uses_[node] > 1) {
    memo_[node] = out_.Put();
  }
  return {};
}

Status Dumper::EmitBody(const Node& node) {
  switch (node.kind) {
    case Kind::kNone:
      Op(op::kNone);
      return {};
    case Kind::kBool:
      Op(node.integer != 0 ? op::kNewTrue : op::kNewFalse);
      return {};
    case Kind::kInt:
      EmitInt(node.integer);
      return {};
    case Kind::kFloat:
      EmitFloat(node.real);
      return {};
    case Kind::kLong:
      return EmitLong(node.text);
    case Kind::kString:
      return EmitText(node.text);
    case Kind::kBytes:
      return EmitBytes(node.text);
    case Kind::kByteArray:
      EmitKnown("builtins.bytearray");
      SW_TRY(EmitBytes(node.text));
      Op(op::kTuple1);
      Op(op::kReduce);
      return {};
    case Kind::kGlobal:
      return EmitGlobal(node.text);
    case Kind::kTuple:
    case Kind::kList:
    case Kind::kSet:
    case Kind::kFrozenSet:
    case Kind::kSize:
      return EmitSequence(node);
    case Kind::kDict:
      return EmitDict(node);
    case Kind::kObject:
      return EmitObject(node);
    case Kind::kTensor:
      return EmitTensor(node);
  }
  return Fail(Errc::kBadInput, "a value of unknown kind cannot be written");
}

Status Dumper::EmitSequence(const Node& node) {
  if (node.kind == Kind::kList) {
    Op(op::kEmptyList);
    return EmitItems(node.items, 1, op::kAppend, op::kAppends);
  }
  if (node.kind == Kind::kSet) return EmitCalled("builtins.set", node.items);
  if (node.kind == Kind::kFrozenSet) return EmitCalled("builtins.frozenset", node.items);
  if (node.kind == Kind::kSize) EmitKnown("torch.Size");
  const std::size_t count = node.items.size();
  if (count > 3) Op(op::kMark);
  for (const Node* item : node.items) SW_TRY(Emit(item));
  out_.Tuple(count);
  if (node.kind == Kind::kSize) {
    Op(op::kTuple1);
    Op(op::kReduce);
  }
  return {};
}

// Emits callable([items]).
Status Dumper::EmitCalled(std::string_view callable, const std::vector<const Node*>& items) {
  EmitKnown(callable);
  Op(op::kEmptyList);
  SW_TRY(EmitItems(items, 1, op::kAppend, op::kAppends));
  Op(op::kTuple1);
  Op(op::kReduce);
  return {};
}

Status Dumper::EmitItems(const std::vector<const Node*>& items, std::size_t width, op::Code one,
                         op::Code many) {
  if (items.size() % width != 0) return Fail(Errc::kBadInput, "dict with a key without a value");
  for (std::size_t first = 0; first < items.size(); first += Emitter::kBatch * width) {
    const std::size_t last = std::min(items.size(), first + Emitter::kBatch * width);
    const bool single = last - first == width;
    if (!single) Op(op::kMark);
    for (std::size_t i = first; i < last; ++i) SW_TRY(Emit(items[i]));
    Op(single ? one : many);
  }
  return {};
}

Status Dumper::EmitDict(const Node& node) {
  if (node.ordered) {
    EmitHooks();
  } else {
    Op(op::kEmptyDict);
  }
  SW_TRY(EmitItems(node.items, 2, op::kSetItem, op::kSetItems));
  if (node.state == nullptr) return {};
  if (!node.ordered) return Fail(Errc::kBadInput, "a plain dict cannot have attributes");
  SW_TRY(Emit(node.state));
  Op(op::kBuild);
  return {};
}

Status Dumper::EmitObject(const Node& node) {
  const bool whole =
      node.callable != nullptr && node.args != nullptr && node.args->kind == Kind::kTuple;
  const bool keyword = node.build == Build::kNewObjEx;
  if (!whole || (keyword && node.args->items.size() != 2)) {
    return Fail(Errc::kBadInput, Describe(&node), " lacks its class or arguments");
  }
  // Protocol 2 has no NEWOBJ_EX opcode: emit the equivalent call by name.
  if (keyword) EmitKnown("copyreg.__newobj_ex__");
  SW_TRY(Emit(node.callable));
  if (keyword) {
    SW_TRY(Emit(node.args->items[0]));
    SW_TRY(Emit(node.args->items[1]));
    Op(op::kTuple3);
  } else {
    SW_TRY(Emit(node.args));
  }
  Op(node.build == Build::kNewObj ? op::kNewObj : op::kReduce);
  SW_TRY(EmitItems(node.list_items, 1, op::kAppend, op::kAppends));
  SW_TRY(EmitItems(node.dict_items, 2, op::kSetItem, op::kSetItems));
  if (node.state == nullptr) return {};
  SW_TRY(Emit(node.state));
  Op(op::kBuild);
  return {};
}

Status Dumper::EmitTensor(const Node& node) {
  if (node.tensor == nullptr) return Fail(Errc::kBadInput, "a tensor node without a tensor");
  const Tensor& tensor = *node.tensor;
  if (tensor.is_parameter) {
    EmitKnown(tensor.attributes != nullptr ? "torch._utils._rebuild_parameter_with_state"
                                           : "torch._utils._rebuild_parameter");
    Op(op::kMark);
    SW_TRY(EmitStrided(tensor, false));
    Op(tensor.requires_grad ? op::kNewTrue : op::kNewFalse);
    EmitHooks();
    if (tensor.attributes != nullptr) SW_TRY(Emit(tensor.attributes));
    Op(op::kTuple);
    Op(op::kReduce);
    return {};
  }
  if (tensor.attributes == nullptr) return EmitStrided(tensor, tensor.requires_grad);
  EmitKnown("torch._tensor._rebuild_from_type_v2");
  Op(op::kMark);
  SW_TRY(EmitStrided(tensor, tensor.requires_grad));
  SW_TRY(Emit(tensor.attributes));
  Op(op::kTuple);
  Op(op::kReduce);
  return {};
}

// Emits a call of the rebuild function; with attributes, as arguments of _rebuild_from_type_v2.
Status Dumper::EmitStrided(const Tensor& tensor, bool requires_grad) {
  if (tensor.storage >= storages_.size()) {
    return Fail(Errc::kBadInput, "tensor refers to storage ", tensor.storage, " of ",
                storages_.size());
  }
  const StorageUse& use = storages_[tensor.storage];
  const bool typed = !use.untyped && !StorageClass(use.dtype).empty();
  if (!use.untyped && use.dtype != tensor.dtype) {
    return Fail(Errc::kBadInput, "tensor of ", Name(tensor.dtype), " in a storage of ",
                Name(use.dtype));
  }
  if (!IsKnownToTorch(tensor.dtype)) {
    return Fail(Errc::kUnsupported, "tensor of ", Name(tensor.dtype), ": PyTorch has no such type");
  }
  SW_TRY(CheckBounds(tensor, use.untyped ? use.elems / ItemSize(tensor.dtype) : use.elems));
  EmitKnown(typed ? "torch._utils._rebuild_tensor_v2" : "torch._utils._rebuild_tensor_v3");
  const bool as_arguments = tensor.attributes != nullptr && !tensor.is_parameter;
  if (as_arguments) EmitKnown("torch.Tensor");
  SW_TRY(EmitStridedArgs(tensor, requires_grad, typed));
  if (!as_arguments) Op(op::kReduce);
  return {};
}

Status Dumper::EmitStridedArgs(const Tensor& tensor, bool requires_grad, bool typed) {
  Op(op::kMark);
  SW_TRY(EmitStorage(tensor.storage));
  EmitInt(static_cast<std::int64_t>(tensor.offset));
  EmitExtents(tensor.shape);
  EmitExtents(tensor.strides);
  Op(requires_grad ? op::kNewTrue : op::kNewFalse);
  EmitHooks();
  if (!typed) EmitKnown("torch." + std::string(Name(tensor.dtype)));
  Op(op::kTuple);
  return {};
}

Status Dumper::EmitStorage(std::uint32_t index) {
  if (keys_[index] == kNoKey) {
    keys_[index] = static_cast<std::uint32_t>(order_.size());
    order_.push_back(index);
  }
  const StorageUse& use = storages_[index];
  const std::string_view cls = use.untyped ? std::string_view() : StorageClass(use.dtype);
  Op(op::kMark);
  EmitWord("storage");
  EmitKnown(cls.empty() ? "torch.storage.UntypedStorage" : "torch." + std::string(cls));
  SW_TRY(EmitText(std::to_string(keys_[index])));
  EmitWord("cpu");
  const bool as_bytes = cls.empty() && !use.untyped;
  EmitInt(static_cast<std::int64_t>(as_bytes ? use.elems * ItemSize(use.dtype) : use.elems));
  Op(op::kTuple);
  Op(op::kBinPersId);
  return {};
}

Status Dumper::EmitBytes(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) {
      text.push_back(c);
    } else {
      text.push_back(static_cast<char>(0xC0U | (byte >> 6)));
      text.push_back(static_cast<char>(0x80U | (byte & 0x3FU)));
    }
  }
  EmitKnown("_codecs.encode");
  SW_TRY(EmitText(text));
  EmitWord("latin1");
  Op(op::kTuple2);
  Op(op::kReduce);
  return {};
}

Status Dumper::EmitLong(std::string_view digits) {
  if (digits.size() > 255) return Fail(Errc::kBadInput, "integer of more than 255 bytes");
  Op(op::kLong1);
  Fixed(digits.size(), 1);
  out_.Raw(digits);
  return {};
}

void Dumper::EmitExtents(std::span<const std::uint64_t> extents) {
  if (extents.size() > 3) Op(op::kMark);
  for (std::uint64_t extent : extents) EmitInt(static_cast<std::int64_t>(extent));
  out_.Tuple(extents.size());
}

// Emits an empty OrderedDict: the hooks of every tensor, or the start of an ordered dict.
void Dumper::EmitHooks() {
  EmitKnown("collections.OrderedDict");
  Op(op::kEmptyTuple);
  Op(op::kReduce);
}

Status Dumper::EmitGlobal(std::string_view dotted) {
  const std::size_t dot = dotted.rfind('.');
  if (dot == std::string_view::npos) {
    return Fail(Errc::kBadInput, "class without a module: ", dotted);
  }
  // Never write a global that our reader rejects.
  SW_TRY(Interpret(dotted.substr(0, dot), dotted.substr(dot + 1), 2));
  EmitKnown(dotted);
  return {};
}

}  // namespace

Result<Dumped> Dump(const Node* root, std::span<const StorageUse> storages) {
  return Dumper(storages).Run(root);
}

}  // namespace shardwright::pickle
