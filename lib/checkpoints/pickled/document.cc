// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/document.h"

#include <algorithm>
#include <utility>

namespace shardwright::checkpoints {

const pickle::Node* Document::AddFilled(Fill fill, DType dtype, Shape shape, bool requires_grad) {
  pickle::Tensor tensor;
  tensor.storage = static_cast<std::uint32_t>(storages.size());
  tensor.dtype = dtype;
  tensor.strides = ContiguousStrides(shape);
  tensor.requires_grad = requires_grad;
  storages.push_back({.dtype = dtype, .untyped = false, .elems = Elems(shape)});
  fills.push_back(std::move(fill));
  tensor.shape = std::move(shape);
  return arena.TensorOf(std::move(tensor));
}

const pickle::Node* Document::AddTensor(std::uint32_t tensor, DType dtype, Shape shape,
                                        bool requires_grad) {
  Fill fill;
  fill.kind = Fill::Kind::kTensor;
  fill.tensor = tensor;
  return AddFilled(std::move(fill), dtype, std::move(shape), requires_grad);
}

const pickle::Node* Document::AddInline(std::string bytes, DType dtype, Shape shape) {
  Fill fill;
  fill.bytes = std::move(bytes);
  return AddFilled(std::move(fill), dtype, std::move(shape), false);
}

bool Graft::HoldsTensor(const pickle::Node* node) {
  if (node == nullptr) return false;
  if (node->is_tensor()) return true;
  if (const auto known = holds_.find(node); known != holds_.end()) return known->second;
  const auto any = [this](const std::vector<const pickle::Node*>& nodes) {
    return std::any_of(nodes.begin(), nodes.end(),
                       [this](const pickle::Node* child) { return HoldsTensor(child); });
  };
  const bool holds = any(node->items) || any(node->list_items) || any(node->dict_items) ||
                     HoldsTensor(node->callable) || HoldsTensor(node->args) ||
                     HoldsTensor(node->state);
  holds_.emplace(node, holds);
  return holds;
}

Result<std::vector<const pickle::Node*>> Graft::TakeAll(
    const std::vector<const pickle::Node*>& nodes) {
  std::vector<const pickle::Node*> taken;
  taken.reserve(nodes.size());
  for (const pickle::Node* node : nodes) {
    SW_TRY_ASSIGN(const pickle::Node* copy, Take(node));
    taken.push_back(copy);
  }
  return taken;
}

Result<const pickle::Node*> Graft::TakeTensor(const pickle::Tensor& source) {
  auto [at, fresh] =
      storages_.try_emplace(source.storage, static_cast<std::uint32_t>(document_.storages.size()));
  if (fresh) {
    const auto& storages = source_.storages;
    if (source.storage >= storages.size() || source.storage >= members_.size()) {
      return Fail(Errc::kBadInput, "a passed tensor's storage ", source.storage,
                  " is not in the source");
    }
    const torch_pt::Document::StorageRef& ref = storages[source.storage];
    const std::uint64_t item = ref.untyped ? 1 : ItemSize(ref.dtype);
    document_.storages.push_back(
        {.dtype = ref.dtype, .untyped = ref.untyped, .elems = ref.bytes / item});
    Fill fill;
    fill.kind = Fill::Kind::kMember;
    fill.member = members_[source.storage];
    document_.fills.push_back(std::move(fill));
  }
  pickle::Tensor tensor = source;
  tensor.storage = at->second;
  SW_TRY_ASSIGN(tensor.attributes, Take(source.attributes));
  return document_.arena.TensorOf(std::move(tensor));
}

Result<const pickle::Node*> Graft::Take(const pickle::Node* node) {
  if (!HoldsTensor(node)) return node;
  if (const auto known = copies_.find(node); known != copies_.end()) return known->second;
  const pickle::Node* taken = nullptr;
  if (node->is_tensor()) {
    SW_TRY_ASSIGN(taken, TakeTensor(*node->tensor));
  } else {
    pickle::Node* copy = document_.arena.New(node->kind);
    copy->ordered = node->ordered;
    copy->build = node->build;
    copy->integer = node->integer;
    copy->real = node->real;
    copy->text = node->text;
    SW_TRY_ASSIGN(copy->items, TakeAll(node->items));
    SW_TRY_ASSIGN(copy->list_items, TakeAll(node->list_items));
    SW_TRY_ASSIGN(copy->dict_items, TakeAll(node->dict_items));
    SW_TRY_ASSIGN(copy->callable, Take(node->callable));
    SW_TRY_ASSIGN(copy->args, Take(node->args));
    SW_TRY_ASSIGN(copy->state, Take(node->state));
    taken = copy;
  }
  copies_.emplace(node, taken);
  return taken;
}

}  // namespace shardwright::checkpoints
