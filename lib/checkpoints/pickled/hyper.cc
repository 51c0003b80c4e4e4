// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/hyper.h"

#include <algorithm>
#include <utility>

#include "support/base/text.h"

namespace shardwright::checkpoints {
namespace {

using pickle::Node;

std::optional<double> OptionNumber(const Node* value, std::span<const Scalar> tensors,
                                   const std::string& place) {
  if (value == nullptr) return std::nullopt;
  if (value->is_tensor()) {
    const Scalar* tensor = FindTensor(tensors, place);
    return tensor == nullptr ? std::nullopt : NumberOf(*tensor);
  }
  const Result<double> plain = pickle::AsFloat(value);
  return plain ? std::optional(*plain) : std::nullopt;
}

bool IsListOrTuple(const Node& node) {
  return node.kind == pickle::Kind::kTuple || node.kind == pickle::Kind::kList;
}

void FindTensors(const Node* value, const std::string& place, const TensorBytes& bytes_of,
                 std::vector<Scalar>* found) {
  if (value == nullptr) return;
  if (IsListOrTuple(*value)) {
    for (std::size_t i = 0; i < value->items.size(); ++i) {
      // Lists of lists are not hyper-parameters.
      if (IsListOrTuple(*value->items[i])) continue;
      FindTensors(value->items[i], place + "." + std::to_string(i), bytes_of, found);
    }
    return;
  }
  if (!value->is_tensor() || Elems(value->tensor->shape) != 1) return;
  Scalar scalar;
  scalar.state = place;
  scalar.is_tensor = true;
  scalar.dtype = value->tensor->dtype;
  scalar.shape = value->tensor->shape;
  Result<std::string> bytes = bytes_of(value);
  if (!bytes) return;
  scalar.bytes = *std::move(bytes);
  if (NumberOf(scalar)) found->push_back(std::move(scalar));
}

}  // namespace

HyperParams HyperOf(const Node* options, std::span<const Scalar> tensors) {
  HyperParams hyper;
  const auto number = [&](std::string_view key) {
    return OptionNumber(FindIn(options, key), tensors, std::string(key));
  };
  hyper.lr = number("lr");
  hyper.eps = number("eps");
  hyper.weight_decay = number("weight_decay");
  hyper.momentum = number("momentum");
  hyper.step = number("step");
  const Node* betas = FindIn(options, "betas");
  if (betas != nullptr && betas->items.size() == 2) {
    const std::optional<double> first = OptionNumber(betas->items[0], tensors, "betas.0");
    const std::optional<double> second = OptionNumber(betas->items[1], tensors, "betas.1");
    if (first && second) hyper.betas = {*first, *second};
  }
  return hyper;
}

std::vector<Scalar> TensorOptions(const Node* options, const TensorBytes& bytes_of) {
  std::vector<Scalar> found;
  if (options == nullptr || !options->is_dict()) return found;
  for (std::size_t i = 0; i < options->entry_count(); ++i) {
    if (!options->key(i)->is_string()) continue;
    FindTensors(options->value(i), options->key(i)->text, bytes_of, &found);
  }
  return found;
}

std::string UnreadTensor(const Node* options, std::span<const Scalar> tensors) {
  if (options == nullptr || !options->is_dict()) return "";
  for (std::size_t i = 0; i < options->entry_count(); ++i) {
    if (!options->key(i)->is_string()) continue;
    const std::string& key = options->key(i)->text;
    const Node& value = *options->value(i);
    if (value.is_tensor() && FindTensor(tensors, key) == nullptr) return key;
    for (std::size_t k = 0; IsListOrTuple(value) && k < value.items.size(); ++k) {
      std::string place = Joined(std::vector<std::string>{key, std::to_string(k)}, ".");
      if (value.items[k]->is_tensor() && FindTensor(tensors, place) == nullptr) return place;
    }
  }
  return "";
}

const Scalar* FindTensor(std::span<const Scalar> tensors, std::string_view place) {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&](const Scalar& one) { return one.state == place; });
  return found == tensors.end() ? nullptr : &*found;
}

const Node* NumberNode(const Scalar& tensor, pickle::Arena* made) {
  const std::optional<double> number = NumberOf(tensor);
  if (!number) return made->None();
  if (tensor.dtype == DType::kBool) return made->Bool(*number != 0);
  if (!IsFloating(tensor.dtype)) return made->Int(static_cast<std::int64_t>(*number));
  return made->Float(*number);
}

const Node* PlainOptions(const Node* options, std::span<const Scalar> tensors,
                         pickle::Arena* made) {
  if (options == nullptr || !options->is_dict() || tensors.empty()) return options;
  Node* plain = CopyDict(*made, options);
  for (std::size_t i = 0; i < options->entry_count(); ++i) {
    if (!options->key(i)->is_string()) continue;
    const std::string& key = options->key(i)->text;
    const Node* value = options->value(i);
    if (const Scalar* tensor = FindTensor(tensors, key); tensor != nullptr && value->is_tensor()) {
      Set(*made, plain, key, NumberNode(*tensor, made));
      continue;
    }
    if (!IsListOrTuple(*value)) continue;
    std::vector<const Node*> items = value->items;
    bool changed = false;
    for (std::size_t k = 0; k < items.size(); ++k) {
      const Scalar* tensor = FindTensor(tensors, key + "." + std::to_string(k));
      if (tensor == nullptr || !items[k]->is_tensor()) continue;
      items[k] = NumberNode(*tensor, made);
      changed = true;
    }
    if (!changed) continue;
    Set(*made, plain, key,
        value->kind == pickle::Kind::kList ? made->List(std::move(items))
                                           : made->Tuple(std::move(items)));
  }
  return plain;
}

}  // namespace shardwright::checkpoints
