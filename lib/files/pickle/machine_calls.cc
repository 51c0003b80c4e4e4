// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "files/pickle/machine_internal.h"
#include "files/pickle/opcodes_internal.h"
#include "files/utf8.h"
#include "support/base/limits.h"

namespace shardwright::pickle {

using Tag = Value::Tag;

Status Machine::PushGlobal(std::string_view module, std::string_view name) {
  std::string key = std::string(module) + "\n" + std::string(name);
  Value value;
  value.tag = Tag::kGlobal;
  const auto found = global_slots_.find(key);
  if (found != global_slots_.end()) {
    value.slot = found->second;
    return Push(value);
  }
  Result<Meaning> meaning = Interpret(module, name, protocol_);
  if (!meaning) return tl::unexpected<Error>(Located(std::move(meaning).error()));
  SW_TRY(Charge(sizeof(GlobalSlot) + 64 + 3 * key.size()));
  // Represents a nested class as protocol 2 does: getattr(Outer, "Inner").
  const std::string nested = std::move(meaning->nested);
  value.slot = globals_.size();
  globals_.push_back(GlobalSlot{*std::move(meaning), nullptr});
  if (nested.empty()) {
    global_slots_.emplace(std::move(key), value.slot);
    return Push(value);
  }
  SW_TRY_ASSIGN(Node * node, Nested(value, nested));
  return PushNode(node);
}

Result<Node*> Machine::Nested(Value base, std::string_view path) {
  SW_TRY_ASSIGN(Node * getattr, NewNode(Kind::kGlobal));
  getattr->text = "builtins.getattr";
  while (true) {
    const std::size_t dot = path.find('.');
    const std::string_view name = path.substr(0, dot);
    if (!IsHarmlessAttribute(name)) {
      return Bad("refused: pickle names attribute " + std::string(name) + " of " + Describe(base));
    }
    SW_TRY(Charge(name.size()));
    SW_TRY_ASSIGN(Node * text, NewNode(Kind::kString));
    text->text = name;
    SW_TRY_ASSIGN(Node * args, NewNode(Kind::kTuple));
    SW_TRY_ASSIGN(const Node* of, ToNode(base));
    args->items = {of, text};
    SW_TRY_ASSIGN(Node * node, NewNode(Kind::kObject));
    node->callable = getattr;
    node->args = args;
    if (dot == std::string_view::npos) return node;
    base = OfNode(node);
    path.remove_prefix(dot + 1);
  }
}

Status Machine::OpGlobal() {
  SW_TRY_ASSIGN(const std::string_view module, Line());
  SW_TRY_ASSIGN(const std::string_view name, Line());
  return PushGlobal(module, name);
}

Status Machine::OpStackGlobal() {
  SW_TRY(Need(2));
  const Value name = Pop();
  const Value module = Pop();
  if (!IsString(module) || !IsString(name)) return Bad("STACK_GLOBAL without two strings");
  return PushGlobal(Text(module), Text(name));
}

Status Machine::OpReduce() {
  SW_TRY(Need(2));
  const Value args = Pop();
  const Value callable = Pop();
  SW_TRY_ASSIGN(const Value result, Call(callable, args));
  return Push(result);
}

Status Machine::OpNewObj() {
  SW_TRY(Need(2));
  const Value args = Pop();
  const Value cls = Pop();
  SW_TRY_ASSIGN(const Value result, MakeObject(cls, args, Build::kNewObj));
  return Push(result);
}

Status Machine::OpNewObjEx() {
  SW_TRY(Need(3));
  if (!IsNode(stack_.back(), Kind::kDict) || stack_[stack_.size() - 2].tag != Tag::kTuple) {
    return Bad("NEWOBJ_EX without a tuple and a dict");
  }
  SW_TRY_ASSIGN(const Value args, MakeTuple(stack_.size() - 2));
  const Value cls = Pop();
  SW_TRY_ASSIGN(const Value result, MakeObject(cls, args, Build::kNewObjEx));
  return Push(result);
}

Status Machine::OpBuild() {
  SW_TRY(Need(2));
  const Value state = Pop();
  Node* target = stack_.back().tag == Tag::kNode ? stack_.back().node : nullptr;
  const bool takes_state =
      target != nullptr && !IsInnerClass(target) &&
      (target->kind == Kind::kObject || (target->kind == Kind::kDict && target->ordered));
  if (!takes_state) return Bad("BUILD on " + Describe(stack_.back()));
  if (target->state != nullptr) return Unsupported("BUILD twice on " + Describe(stack_.back()));
  const bool mesh = target->kind == Kind::kObject && target->callable->kind == Kind::kGlobal &&
                    IsDeviceMesh(target->callable->text);
  if (mesh && IsNode(state, Kind::kDict)) {
    SW_TRY_ASSIGN(target->state, WithoutMeshes(state.node));
  } else {
    SW_TRY_ASSIGN(target->state, ToNode(state));
  }
  return {};
}

// Removes the attributes of a mesh that refer to other meshes. A mesh and
// the mesh that it is a part of refer to each other, which would be a cycle.
Result<const Node*> Machine::WithoutMeshes(const Node* attributes) {
  SW_TRY(Charge(attributes->items.size() * kItemBytes));
  SW_TRY_ASSIGN(Node * kept, NewNode(Kind::kDict));
  for (std::size_t i = 0; i < attributes->entry_count(); ++i) {
    const Node* key = attributes->key(i);
    if (key->is_string() && LeadsToMeshes(key->text)) continue;
    kept->items.push_back(key);
    kept->items.push_back(attributes->value(i));
  }
  return kept;
}

Status Machine::OpBinPersId() {
  SW_TRY(Need(1));
  const Value id = Pop();
  SW_TRY_ASSIGN(const Value storage, LoadPersistent(id));
  return Push(storage);
}

Result<Value> Machine::Call(const Value& callable, const Value& args) {
  if (args.tag != Tag::kTuple) return Bad("REDUCE without a tuple of arguments");
  if (callable.tag != Tag::kGlobal) return CallOther(callable, args, Build::kReduce);
  return CallKnown(globals_[callable.slot].meaning.known, callable, args);
}

Result<Value> Machine::CallKnown(Known known, const Value& callable, const Value& args) {
  const Args items = TupleItems(args);
  switch (known) {
    case Known::kOther:
      return CallOther(callable, args, Build::kReduce);
    case Known::kOrderedDict:
      return CallOrderedDict(items);
    case Known::kSize:
      return CallSize(items);
    case Known::kSet:
      return CallSet(Kind::kSet, items);
    case Known::kFrozenSet:
      return CallSet(Kind::kFrozenSet, items);
    case Known::kBytes:
      return CallBytes(items);
    case Known::kByteArray:
      return CallByteArray(items);
    case Known::kEncode:
      return CallEncode(items);
    case Known::kGetattr:
      return CallGetattr(items);
    case Known::kNewObj:
      return CallNewObj(items);
    case Known::kNewObjEx:
      return CallNewObjEx(items);
    case Known::kTensor:
    case Known::kTensorV2:
    case Known::kTensorV3:
      return CallTensor(known, items);
    case Known::kParameter:
    case Known::kParameterWithState:
      return CallParameter(known, items);
    case Known::kFromType:
      return CallFromType(items);
    case Known::kDeviceTensor:
      return CallDeviceTensor(items);
    case Known::kStorage:
      return Unsupported("a storage built by a call of " + Describe(callable));
    case Known::kWrapper:
    case Known::kUnsupportedTensor:
    case Known::kUnsupportedStorage:
      return Unsupported("sparse, quantized, nested, meta and wrapper tensors: " +
                         Describe(callable));
  }
  return Bad("call of " + Describe(callable));
}

// Records the call unchanged, to write it back. Accepts getattr(Outer, "Inner") as the callable.
Result<Value> Machine::CallOther(const Value& callable, const Value& args, Build build) {
  const bool nested = callable.tag == Tag::kNode && IsInnerClass(callable.node);
  if (callable.tag != Tag::kGlobal && !nested) {
    return Bad("call of something that is not a class: " + Describe(callable));
  }
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kObject));
  node->build = build;
  SW_TRY_ASSIGN(node->callable, ToNode(callable));
  SW_TRY_ASSIGN(node->args, ToNode(args));
  return OfNode(node);
}

Result<Value> Machine::MakeObject(const Value& cls, const Value& args, Build build) {
  if (args.tag != Tag::kTuple) return Bad("NEWOBJ without a tuple of arguments");
  const Known known = cls.tag == Tag::kGlobal ? globals_[cls.slot].meaning.known : Known::kOther;
  const bool fills = known == Known::kOrderedDict || known == Known::kSet;
  if (fills && !TupleItems(args).empty()) {
    return Bad("NEWOBJ of " + Describe(cls) + " with arguments, which it does not take");
  }
  const bool is_value = fills || known == Known::kSize || known == Known::kFrozenSet;
  if (build == Build::kNewObj && is_value) return CallKnown(known, cls, args);
  if (known != Known::kOther) return Bad("NEWOBJ of " + Describe(cls));
  return CallOther(cls, args, build);
}

Result<Value> Machine::CallOrderedDict(Args args) {
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kDict));
  node->ordered = true;
  if (args.empty()) return OfNode(node);
  if (args.size() != 1 || !IsNode(args[0], Kind::kList))
    return Bad("invalid arguments of OrderedDict");
  const Node* pairs = args[0].node;
  SW_TRY(Charge(2 * pairs->items.size() * kItemBytes));
  for (const Node* pair : pairs->items) {
    const bool sequence = pair->kind == Kind::kList || pair->kind == Kind::kTuple;
    if (!sequence || pair->items.size() != 2) return Bad("OrderedDict of items that are not pairs");
    node->items.insert(node->items.end(), pair->items.begin(), pair->items.end());
  }
  return OfNode(node);
}

Result<Value> Machine::CallSize(Args args) {
  if (args.size() != 1 || args[0].tag != Tag::kTuple) return Bad("invalid arguments of torch.Size");
  const Args extents = TupleItems(args[0]);
  for (const Value& extent : extents) {
    if (extent.tag != Tag::kInt)
      return Bad("torch.Size: integer expected, found " + Describe(extent));
  }
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kSize));
  SW_TRY(ToNodes(extents, node->items));
  return OfNode(node);
}

Result<Value> Machine::CallSet(Kind kind, Args args) {
  SW_TRY_ASSIGN(Node * node, NewNode(kind));
  if (args.empty()) return OfNode(node);
  if (args.size() != 1 || !IsNode(args[0], Kind::kList)) return Bad("invalid arguments of a set");
  SW_TRY(Charge(args[0].node->items.size() * kItemBytes));
  node->items = args[0].node->items;
  return OfNode(node);
}

Result<Value> Machine::CallBytes(Args args) {
  if (args.size() == 1 && IsNode(args[0], Kind::kBytes)) return args[0];
  if (!args.empty()) return Bad("invalid arguments of bytes");
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kBytes));
  return OfNode(node);
}

Result<Value> Machine::CallByteArray(Args args) {
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kByteArray));
  if (args.empty()) return OfNode(node);
  if (args.size() == 1 && IsNode(args[0], Kind::kBytes)) {
    SW_TRY(Charge(args[0].node->text.size()));
    node->text = args[0].node->text;
    return OfNode(node);
  }
  SW_TRY_ASSIGN(const Value bytes, CallEncode(args));
  node->text = bytes.node->text;
  return OfNode(node);
}

// Reads bytes in protocol 2: a text with the bytes as its code points.
Result<Value> Machine::CallEncode(Args args) {
  if (args.size() != 2 || !IsString(args[0]) || !IsString(args[1])) {
    return Bad("invalid arguments of _codecs.encode");
  }
  const std::string_view encoding = Text(args[1]);
  if (encoding != "latin1" && encoding != "latin-1") {
    return Unsupported("bytes in encoding " + std::string(encoding.substr(0, 40)));
  }
  SW_TRY(Charge(Text(args[0]).size()));
  SW_TRY_ASSIGN(std::string bytes, Latin1(Text(args[0])));
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kBytes));
  node->text = std::move(bytes);
  return OfNode(node);
}

Result<std::string> Machine::Latin1(std::string_view text) const {
  std::string bytes;
  bytes.reserve(text.size());
  std::size_t i = 0;
  while (i < text.size()) {
    const std::size_t run = AsciiBytes(text.substr(i));
    bytes.append(text.substr(i, run));
    i += run;
    if (i == text.size()) break;
    const auto lead = static_cast<unsigned char>(text[i]);
    if (lead != 0xC2 && lead != 0xC3) return Bad("bytes with a code point over 255");
    // PushString has checked that a continuation byte follows.
    const auto next = static_cast<unsigned char>(text[i + 1]);
    bytes.push_back(static_cast<char>(((lead & 3U) << 6) | (next & 0x3FU)));
    i += 2;
  }
  return bytes;
}

Result<Value> Machine::CallGetattr(Args args) {
  const bool typed = args.size() == 2 && IsString(args[1]) &&
                     (args[0].tag == Tag::kGlobal || IsNode(args[0], Kind::kObject));
  if (!typed) return Bad("invalid arguments of getattr");
  const bool nested = args[0].tag == Tag::kGlobal || IsInnerClass(args[0].node);
  if (!nested) return Bad("refused: pickle reads an attribute of " + Describe(args[0]));
  // Copies the two values, because the tuple pool may move while nodes are made.
  const Value base = args[0];
  const std::string name(Text(args[1]));
  // Only the name of a global may contain several classes.
  if (name.find('.') != std::string::npos) return Bad("attribute \"" + name + "\" of a class");
  SW_TRY_ASSIGN(Node * node, Nested(base, name));
  return OfNode(node);
}

Result<Value> Machine::CallNewObj(Args args) {
  if (args.empty()) return Bad("invalid arguments of copyreg.__newobj__");
  const Value cls = args[0];
  const std::vector<Value> rest(args.begin() + 1, args.end());
  const std::size_t first = stack_.size();
  for (const Value& value : rest) SW_TRY(Push(value));
  SW_TRY_ASSIGN(const Value tuple, MakeTuple(first));
  return MakeObject(cls, tuple, Build::kNewObj);
}

Result<Value> Machine::CallNewObjEx(Args args) {
  if (args.size() != 3 || args[1].tag != Tag::kTuple || !IsNode(args[2], Kind::kDict)) {
    return Bad("invalid arguments of copyreg.__newobj_ex__");
  }
  const Value cls = args[0];
  const std::array<Value, 2> rest = {args[1], args[2]};
  const std::size_t first = stack_.size();
  for (const Value& value : rest) SW_TRY(Push(value));
  SW_TRY_ASSIGN(const Value tuple, MakeTuple(first));
  return MakeObject(cls, tuple, Build::kNewObjEx);
}

}  // namespace shardwright::pickle
