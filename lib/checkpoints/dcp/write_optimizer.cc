// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/dcp/write_internal.h"
#include "checkpoints/pickled/document.h"
#include "checkpoints/pickled/hyper.h"
#include "checkpoints/pickled/torch_optimizer.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

// Writes the states and the parameter groups of the optimizer.

namespace shardwright::checkpoints::dcp {

namespace file_format = shardwright::dcp;
using pickle::Node;

const std::string& FolderWriter::OptimizerName(const std::string& param) const {
  if (own_ != nullptr) return own_->OptimizerName(param);
  const auto running = source_.running_names.find(param);
  return running == source_.running_names.end() ? param : running->second;
}

file_format::Entry FolderWriter::SlotEntry(const std::string& param, const std::string& key) const {
  const Naming& naming = layout_.naming;
  const std::string& name = OptimizerName(param);
  if (naming.flat) return EntryOf(naming.optimizer, {{"state." + name + "." + key}});
  return EntryOf(naming.optimizer, {{"state"}, {name}, {key}});
}

Status FolderWriter::AddScalar(const Param& param, const Scalar& scalar) {
  file_format::Entry entry = SlotEntry(param.name, scalar.state);
  if (!scalar.is_tensor) {
    return AddObject(optimizer(), std::move(entry),
                     scalar.value != nullptr ? scalar.value : arena_.None());
  }
  return AddTensorValue(std::move(entry), scalar);
}

/// Adds an optimizer tensor of one known element.
Status FolderWriter::AddTensorValue(file_format::Entry entry, const Scalar& scalar) {
  entry.is_tensor = true;
  entry.dtype = scalar.dtype;
  entry.shape = scalar.shape;
  SW_TRY(optimizer()->Begin(std::move(entry)));
  return optimizer()->AddInline(Next(), Shape(scalar.shape.size(), 0), scalar.shape, scalar.bytes);
}

Status FolderWriter::AddScalars(const Param& param) {
  bool counts = index_.Find(param.name, layout::kFirstMoment).has_value();
  for (const Scalar& scalar : param.scalars) {
    const bool step = scalar.state == layout::kStep;
    counts = counts || step;
    if (step && own_ == nullptr) continue;
    SW_TRY(AddScalar(param, scalar));
  }
  stepped_ = stepped_ || counts;
  if (own_ != nullptr || !counts) return {};
  SW_TRY_ASSIGN(const float steps, TorchStep(source_, param));
  Scalar step;
  step.state = layout::kStep;
  step.is_tensor = true;
  step.bytes.assign(reinterpret_cast<const char*>(&steps), sizeof steps);
  return AddScalar(param, step);
}

Status FolderWriter::AddStates(const Param& param) {
  for (const std::string& state : source_.states) {
    const auto found = index_.Find(param.name, state);
    if (!found) continue;
    SW_TRY(AddTensor(optimizer(), SlotEntry(param.name, state), param, state,
                     source_.map.tensors[*found].dtype, std::nullopt));
  }
  return AddScalars(param);
}

/// Writes a tuple that contains tensors as one item, like PyTorch.
Status FolderWriter::AddTuple(file_format::Entry entry, const Group& group, const std::string& key,
                              const Node* value) {
  Document document;
  std::vector<const Node*> items = value->items;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Scalar* tensor =
        FindTensor(group.tensors, Joined(std::vector<std::string>{key, std::to_string(i)}, "."));
    if (tensor == nullptr) continue;
    items[i] = document.AddInline(tensor->bytes, tensor->dtype, tensor->shape);
  }
  document.root = document.arena.Tuple(std::move(items));
  SW_TRY(optimizer()->Begin(std::move(entry)));
  return optimizer()->AddDocument(Next(), {}, {}, document);
}

/// Writes an option of a group. Like PyTorch, writes a list that contains tensors per item.
/// \param steps  the option's path below the optimizer
Status FolderWriter::AddOption(const Group& group, const std::string& key, const Node* value,
                               std::vector<PathStep> steps) {
  const auto add = [&](const Scalar* tensor, const Node* plain) -> Status {
    file_format::Entry entry = EntryOf(layout_.naming.optimizer, steps);
    if (tensor == nullptr) return AddObject(optimizer(), std::move(entry), plain);
    return AddTensorValue(std::move(entry), *tensor);
  };
  const Scalar* tensor = FindTensor(group.tensors, key);
  // Schedulers start from the current learning rate, in the form in which it is stored.
  const bool begins = key == "initial_lr" && FindIn(group.options, key) == nullptr;
  if (begins) tensor = FindTensor(group.tensors, "lr");
  const bool list = value->kind == pickle::Kind::kTuple || value->kind == pickle::Kind::kList;
  const bool parted =
      list && std::any_of(group.tensors.begin(), group.tensors.end(),
                          [&](const Scalar& one) { return one.state.starts_with(key + "."); });
  if (!parted) return add(tensor, value);
  if (value->kind == pickle::Kind::kTuple) {
    return AddTuple(EntryOf(layout_.naming.optimizer, steps), group, key, value);
  }
  for (std::size_t i = 0; i < value->items.size(); ++i) {
    const std::string number = std::to_string(i);
    steps.push_back({number, true});
    SW_TRY(add(FindTensor(group.tensors, Joined(std::vector<std::string>{key, number}, ".")),
               value->items[i]));
    steps.pop_back();
  }
  return {};
}

Status FolderWriter::AddGroups() {
  const Naming& naming = layout_.naming;
  for (std::size_t g = 0; g < source_.groups.size(); ++g) {
    const Group& group = source_.groups[g];
    const Node* options = own_ != nullptr && group.options != nullptr
                              ? group.options
                              : TorchOptions(source_, group, &arena_, &left_options_);
    std::vector<std::string> names;
    if (own_ != nullptr) {
      names = own_->groups[g];
    } else {
      for (const std::uint32_t i : group.params) {
        names.push_back(OptimizerName(source_.params[i].name));
      }
      for (const Param& param : source_.fused) {
        if (param.group == static_cast<std::int32_t>(g)) names.push_back(OptimizerName(param.name));
      }
    }
    for (std::size_t k = 0; k < options->entry_count(); ++k) {
      const std::string& key = options->key(k)->text;
      if (!naming.flat) {
        SW_TRY(AddOption(group, key, options->value(k),
                         {{"param_groups"}, {std::to_string(g), true}, {key}}));
        continue;
      }
      for (const std::string& name : names) {
        SW_TRY(AddOption(
            group, key, options->value(k),
            {{Joined(std::vector<std::string>{"param_groups", name, std::string(key)}, ".")}}));
      }
    }
    if (naming.flat) continue;
    std::vector<const Node*> list;
    list.reserve(names.size());
    for (const std::string& name : names) list.push_back(arena_.String(name));
    SW_TRY(AddObject(
        optimizer(),
        EntryOf(naming.optimizer, {{"param_groups"}, {std::to_string(g), true}, {"params"}}),
        arena_.List(std::move(list))));
  }
  return {};
}

Status FolderWriter::AddOptimizer() {
  if (!HasOptimizer()) return {};
  for (const Param& param : source_.params) {
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    SW_TRY(AddStates(param));
  }
  for (const Param& param : source_.fused) SW_TRY(AddStates(param));
  return AddGroups();
}

}  // namespace shardwright::checkpoints::dcp
