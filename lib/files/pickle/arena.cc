// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "files/pickle/node.h"

namespace shardwright::pickle {

Node* Arena::New(Kind kind) {
  Node& node = nodes_.emplace_back();
  node.kind = kind;
  return &node;
}

const Node* Arena::None() {
  if (none_ == nullptr) none_ = New(Kind::kNone);
  return none_;
}

const Node* Arena::Bool(bool value) {
  const Node*& node = value ? true_ : false_;
  if (node == nullptr) {
    Node* made = New(Kind::kBool);
    made->integer = value ? 1 : 0;
    node = made;
  }
  return node;
}

const Node* Arena::Int(std::int64_t value) {
  Node* node = New(Kind::kInt);
  node->integer = value;
  return node;
}

const Node* Arena::Float(double value) {
  Node* node = New(Kind::kFloat);
  node->real = value;
  return node;
}

const Node* Arena::String(std::string_view value) {
  Node* node = New(Kind::kString);
  node->text = value;
  return node;
}

const Node* Arena::Global(std::string_view dotted) {
  Node* node = New(Kind::kGlobal);
  node->text = dotted;
  return node;
}

const Node* Arena::List(std::vector<const Node*> items) {
  Node* node = New(Kind::kList);
  node->items = std::move(items);
  return node;
}

const Node* Arena::Tuple(std::vector<const Node*> items) {
  Node* node = New(Kind::kTuple);
  node->items = std::move(items);
  return node;
}

const Node* Arena::SizeOf(const Shape& shape) {
  Node* node = New(Kind::kSize);
  node->items.reserve(shape.size());
  for (std::uint64_t extent : shape) node->items.push_back(Int(static_cast<std::int64_t>(extent)));
  return node;
}

const Node* Arena::TensorOf(Tensor tensor) {
  Node* node = New(Kind::kTensor);
  node->tensor = std::make_unique<Tensor>(std::move(tensor));
  return node;
}

Node* Arena::Dict(bool ordered) {
  Node* node = New(Kind::kDict);
  node->ordered = ordered;
  return node;
}

const Node* Arena::Object(std::string_view dotted, const Node* state) {
  const Node* callable = Global(dotted);
  const Node* args = Tuple({});
  Node* node = New(Kind::kObject);
  node->build = Build::kNewObj;
  node->callable = callable;
  node->args = args;
  node->state = state;
  return node;
}

namespace {

bool IsKey(const Node* node, std::string_view key) {
  return node->is_string() && node->text == key;
}

}  // namespace

void Set(Arena& arena, Node* dict, std::string_view key, const Node* value) {
  for (std::size_t i = 0; i + 1 < dict->items.size(); i += 2) {
    if (IsKey(dict->items[i], key)) {
      dict->items[i + 1] = value;
      return;
    }
  }
  dict->items.push_back(arena.String(key));
  dict->items.push_back(value);
}

Node* CopyDict(Arena& arena, const Node* dict) {
  Node* copy = arena.Dict(dict->ordered);
  copy->items = dict->items;
  copy->state = dict->state;
  return copy;
}

bool Remove(Node* dict, std::string_view key) {
  for (std::size_t i = 0; i + 1 < dict->items.size(); i += 2) {
    if (IsKey(dict->items[i], key)) {
      const auto at = dict->items.begin() + static_cast<std::ptrdiff_t>(i);
      dict->items.erase(at, at + 2);
      return true;
    }
  }
  return false;
}

}  // namespace shardwright::pickle
