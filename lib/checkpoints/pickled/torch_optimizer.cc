// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/torch_optimizer.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include "checkpoints/pickled/hyper.h"
#include "checkpoints/pickled/wrappers.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::checkpoints {
namespace {

using pickle::Node;

/// Returns true for values that any optimizer can load, even under an unknown key.
bool IsPlain(const Node& node) {
  switch (node.kind) {
    case pickle::Kind::kNone:
    case pickle::Kind::kBool:
    case pickle::Kind::kInt:
    case pickle::Kind::kFloat:
    case pickle::Kind::kString:
      return true;
    case pickle::Kind::kTuple:
    case pickle::Kind::kList:
      return std::all_of(node.items.begin(), node.items.end(),
                         [](const Node* item) { return IsPlain(*item); });
    default:
      return false;
  }
}

/// Returns true for DeepSpeed's bias_correction if it is on; PyTorch always corrects the bias.
bool CorrectsBias(const Node& key, const Node& value) {
  return key.text == "bias_correction" && value.kind == pickle::Kind::kBool && value.integer != 0;
}

}  // namespace

bool AreFrozen(std::span<const std::string> with, std::span<const std::string> without) {
  return !with.empty() && std::all_of(with.begin(), with.end(), IsAdapterName) &&
         std::none_of(without.begin(), without.end(), IsAdapterName);
}

std::string StatelessWarning(const std::vector<std::string>& names) {
  return Plural(names.size(), "parameter") +
         " in the optimizer's groups have no state while others do, as before their first "
         "gradient: they are taken as trained (the files do not record whether the job has frozen "
         "them): " +
         FirstFew(names);
}

std::vector<std::string> StatelessNames(const Checkpoint& source) {
  std::set<std::string_view> stepped;
  for (const layout::LogicalTensor& tensor : source.map.tensors) {
    if (!layout::IsModelState(tensor.state)) stepped.insert(tensor.name);
  }
  std::set<std::int32_t> groups;  // groups with state
  for (const Param& param : source.params) {
    if (stepped.contains(param.name)) groups.insert(param.group);
  }
  std::vector<std::string> names;
  for (const Param& param : source.params) {
    const bool trained = param.kind == ParamKind::kTrainable && param.alias_of.empty();
    if (trained && groups.contains(param.group) && !stepped.contains(param.name)) {
      names.push_back(param.name);
    }
  }
  return names;
}

std::vector<std::string> StatelessLosses(const Checkpoint& source) {
  const std::vector<std::string> names = StatelessNames(source);
  if (names.empty()) return {};
  return {"optimizer state of " + Plural(names.size(), "parameter") +
          ", which the source lacks: they get zero moments and the number of steps of their group, "
          "so their first updates lack the bias correction of new parameters: " +
          FirstFew(names)};
}

std::vector<std::string> StepLosses(const Checkpoint& source) {
  const auto step_of = [](const Param& param) {
    const auto found = std::find_if(param.scalars.begin(), param.scalars.end(),
                                    [](const Scalar& one) { return one.state == layout::kStep; });
    return found == param.scalars.end() ? std::nullopt : NumberOf(*found);
  };
  const Param* first = nullptr;
  std::optional<double> common;
  std::vector<std::string> others;
  for (const Param& param : source.params) {
    const auto step = step_of(param);
    if (!step) continue;
    if (first == nullptr) {
      first = &param;
      common = step;
    } else if (*step != *common) {
      others.push_back(param.name);
    }
  }
  if (first == nullptr || others.empty()) return {};
  return {
      "separate step counts of " + Plural(others.size(), "parameter") +
      ", which differ from that of " + Quoted(first->name) +
      ": DeepSpeed's universal loader gives all parameters that one's step at stage 3, and fails "
      "for groups with different steps at stages 1 and 2; only ucp-load reads each step: " +
      FirstFew(others)};
}

Result<float> TorchStep(const Checkpoint& source, const Param& param) {
  const auto found = std::find_if(param.scalars.begin(), param.scalars.end(),
                                  [](const Scalar& one) { return one.state == layout::kStep; });
  if (found != param.scalars.end()) {
    if (const std::optional<double> step = NumberOf(*found)) return static_cast<float>(*step);
  }
  if (param.group >= 0 && static_cast<std::size_t>(param.group) < source.groups.size()) {
    const auto& step = source.groups[static_cast<std::size_t>(param.group)].hyper.step;
    if (step) return static_cast<float>(*step);
  }
  if (source.iteration) return static_cast<float>(*source.iteration);
  return Fail(Errc::kUnsupported, Quoted(param.name),
              ": the source does not record the number of optimizer steps");
}

const Node* TorchOptions(const Checkpoint& source, const Group& group, pickle::Arena* made,
                         std::set<std::string>* left) {
  pickle::Arena& arena = *made;
  Node* options = arena.Dict();
  const Node* given = PlainOptions(group.options, group.tensors, made);
  const HyperParams& hyper = group.hyper;
  const Node* lr = arena.Float(hyper.lr.value_or(1e-3));
  Set(arena, options, "lr", lr);
  Set(arena, options, "weight_decay", arena.Float(hyper.weight_decay.value_or(0.0)));
  if (hyper.momentum) {
    Set(arena, options, "momentum", arena.Float(*hyper.momentum));
    Set(arena, options, "dampening", arena.Float(0.0));
    Set(arena, options, "nesterov", arena.Bool(false));
  } else {
    const auto [first, second] = hyper.betas.value_or(std::pair(0.9, 0.999));
    Set(arena, options, "betas", arena.Tuple({arena.Float(first), arena.Float(second)}));
    Set(arena, options, "eps", arena.Float(hyper.eps.value_or(1e-8)));
    Set(arena, options, "amsgrad", arena.Bool(false));
    Set(arena, options, "capturable", arena.Bool(false));
    Set(arena, options, "decoupled_weight_decay", arena.Bool(source.optimizer != "adam"));
  }
  Set(arena, options, "maximize", arena.Bool(false));
  Set(arena, options, "foreach", arena.None());
  Set(arena, options, "differentiable", arena.Bool(false));
  Set(arena, options, "fused", arena.None());
  // Schedulers require this key.
  Set(arena, options, "initial_lr", lr);
  if (given == nullptr || !given->is_dict()) return options;
  for (std::size_t i = 0; i < given->entry_count(); ++i) {
    const Node* key = given->key(i);
    if (!key->is_string() || key->text == layout::kStep || key->text == "params") continue;
    const Node* value = given->value(i);
    if (CorrectsBias(*key, *value)) continue;
    if (IsPlain(*value)) {
      Set(arena, options, key->text, value);
    } else {
      left->insert(key->text);
    }
  }
  return options;
}

}  // namespace shardwright::checkpoints
