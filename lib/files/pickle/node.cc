// SPDX-License-Identifier: Apache-2.0
#include "files/pickle/node.h"

#include "support/base/checked.h"

namespace shardwright::pickle {

namespace {

std::string_view KindName(Kind kind) {
  switch (kind) {
    case Kind::kNone:
      return "None";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
    case Kind::kLong:
      return "integer";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return "string";
    case Kind::kBytes:
      return "bytes";
    case Kind::kByteArray:
      return "bytearray";
    case Kind::kTuple:
      return "tuple";
    case Kind::kList:
      return "list";
    case Kind::kSet:
      return "set";
    case Kind::kFrozenSet:
      return "frozenset";
    case Kind::kDict:
      return "dict";
    case Kind::kSize:
      return "torch.Size";
    case Kind::kGlobal:
      return "class";
    case Kind::kObject:
      return "object";
    case Kind::kTensor:
      return "tensor";
  }
  return "value";
}

tl::unexpected<Error> Expected(std::string_view what, const Node* found) {
  return Fail(Errc::kBadInput, what, " expected, found ", Describe(found));
}

}  // namespace

const Node* Node::Find(std::string_view key) const {
  if (kind != Kind::kDict) return nullptr;
  for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
    if (items[i]->is_string() && items[i]->text == key) return items[i + 1];
  }
  return nullptr;
}

const Node* FindIn(const Node* dict, std::string_view key) {
  return dict == nullptr ? nullptr : dict->Find(key);
}

const Node* FindInt(const Node* dict, std::int64_t key) {
  if (dict == nullptr || !dict->is_dict()) return nullptr;
  for (std::size_t i = 0; i < dict->entry_count(); ++i) {
    const Node* found = dict->key(i);
    if (found->kind == Kind::kInt && found->integer == key) return dict->value(i);
  }
  return nullptr;
}

std::string Describe(const Node* node) {
  if (node == nullptr) return "nothing";
  std::string text(KindName(node->kind));
  switch (node->kind) {
    case Kind::kTensor:
      return text + " " + std::string(Name(node->tensor->dtype)) + " " +
             ToString(node->tensor->shape);
    case Kind::kGlobal:
      return text + " " + node->text;
    case Kind::kObject: {
      const Node* callable = node->callable;
      if (callable == nullptr) return text;
      return text + " " + (callable->kind == Kind::kGlobal ? callable->text : "of a nested class");
    }
    default:
      return text;
  }
}

Result<std::int64_t> AsInt(const Node* node) {
  if (node != nullptr && (node->kind == Kind::kInt || node->kind == Kind::kBool)) {
    return node->integer;
  }
  return Expected("integer", node);
}

Result<std::uint64_t> AsCount(const Node* node) {
  if (node != nullptr && node->kind == Kind::kInt) {
    if (node->integer >= 0) return static_cast<std::uint64_t>(node->integer);
    return Fail(Errc::kBadInput, "count expected, found ", node->integer);
  }
  return Expected("count", node);
}

Result<double> AsFloat(const Node* node) {
  if (node != nullptr && node->kind == Kind::kFloat) return node->real;
  if (node != nullptr && node->kind == Kind::kInt) return static_cast<double>(node->integer);
  return Expected("float", node);
}

Result<std::string_view> AsString(const Node* node) {
  if (node != nullptr && node->is_string()) return std::string_view(node->text);
  return Expected("string", node);
}

Result<Shape> AsShape(const Node* node) {
  const bool sequence = node != nullptr && (node->kind == Kind::kSize ||
                                            node->kind == Kind::kTuple || node->is_list());
  if (!sequence) return Expected("shape", node);
  Shape shape;
  shape.reserve(node->items.size());
  for (const Node* item : node->items) {
    SW_TRY_ASSIGN(const std::uint64_t extent, AsCount(item));
    shape.push_back(extent);
  }
  return shape;
}

Status CheckBounds(const Tensor& tensor, std::uint64_t elems) {
  if (tensor.shape.size() != tensor.strides.size()) {
    return Fail(Errc::kBadInput, "tensor with ", tensor.shape.size(), " sizes but ",
                tensor.strides.size(), " strides");
  }
  SW_TRY_ASSIGN(std::uint64_t count, CountElems(tensor.shape));
  SW_TRY_ASSIGN(count, CheckedMul(count, ItemSize(tensor.dtype)));
  if (count == 0) return {};
  std::uint64_t last = tensor.offset;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    SW_TRY_ASSIGN(const std::uint64_t step, CheckedMul(tensor.shape[i] - 1, tensor.strides[i]));
    SW_TRY_ASSIGN(last, CheckedAdd(last, step));
  }
  if (last >= elems) {
    return Fail(Errc::kBadInput, "tensor ", ToString(tensor.shape), " reaches element ", last,
                " of a storage of ", elems);
  }
  return {};
}

}  // namespace shardwright::pickle
