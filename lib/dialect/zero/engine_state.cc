#include "dialect/zero/engine_state.h"

#include <algorithm>
#include <utility>

#include "dialect/zero/flat.h"

namespace shardwright::dialect {
namespace {

using pickle::Node;

/// Keys of a model file that every engine writes, whether or not they say anything.
constexpr std::array<std::string_view, 8> kEngineKeys = {"global_steps",
                                                         "global_samples",
                                                         "skipped_steps",
                                                         "ds_config",
                                                         "num_experts",
                                                         "csr_tensor_module_names",
                                                         "sparse_tensor_module_names",
                                                         "data_sampler"};

Result<std::uint64_t> IterationOf(const EngineState& state, const std::string& tag) {
  std::optional<std::uint64_t> found;
  for (const Passed& passed : state.model_states) {
    const Node* root = passed.document.root;
    const Node* steps = root == nullptr ? nullptr : root->Find("global_steps");
    if (steps == nullptr) continue;
    Result<std::uint64_t> count = pickle::AsCount(steps);
    if (!count) return Within(tag + ": global_steps", std::move(count).error());
    if (found && *found != *count) {
      return Fail(Errc::kBadInput, tag + ": global_steps: " + std::to_string(*found) + " and " +
                                       std::to_string(*count) + " on different ranks");
    }
    found = *count;
  }
  if (!found) {
    return Fail(Errc::kBadInput,
                tag + ": no \"global_steps\" in the model states: give --iteration");
  }
  return *found;
}

const Node* FindIn(const Node* dict, std::string_view key) {
  return dict == nullptr || !dict->is_dict() ? nullptr : dict->Find(key);
}

std::optional<double> NumberOf(const Node* options, std::string_view key) {
  const Result<double> value = pickle::AsFloat(FindIn(options, key));
  return value ? std::optional(*value) : std::nullopt;
}

HyperParams HyperOf(const Node* options) {
  HyperParams hyper;
  hyper.lr = NumberOf(options, "lr");
  hyper.eps = NumberOf(options, "eps");
  hyper.weight_decay = NumberOf(options, "weight_decay");
  hyper.momentum = NumberOf(options, "momentum");
  hyper.step = NumberOf(options, "step");
  const Node* betas = FindIn(options, "betas");
  if (betas != nullptr && betas->items.size() == 2) {
    const Result<double> first = pickle::AsFloat(betas->items[0]);
    const Result<double> second = pickle::AsFloat(betas->items[1]);
    if (first && second) hyper.betas = {*first, *second};
  }
  return hyper;
}

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return text;
}

}  // namespace

std::vector<std::uint32_t> EngineState::Members() const {
  std::vector<std::uint32_t> all;
  for (const auto* list : {&model_states, &optimizer}) {
    for (const Passed& one : *list) all.insert(all.end(), one.members.begin(), one.members.end());
  }
  return all;
}

std::vector<std::string> EngineState::Contents() const {
  std::vector<std::string> contents;
  const Node* root = model_states.empty() ? nullptr : model_states.front().document.root;
  if (root != nullptr && root->is_dict()) {
    for (std::size_t i = 0; i < root->entry_count(); ++i) {
      if (IsOneOf(root->key(i), kModelKeys) || IsOneOf(root->key(i), kEngineKeys)) continue;
      const Node* value = root->value(i);
      const bool empty = value->is_none() || (value->is_dict() && value->items.empty()) ||
                         (value->is_list() && value->items.empty()) ||
                         (value->kind == pickle::Kind::kSet && value->items.empty());
      if (!empty && root->key(i)->is_string()) contents.push_back("\"" + root->key(i)->text + "\"");
    }
  }
  if (!optimizer.empty()) contents.push_back("the loss scaler");
  return contents;
}

const EngineState* EngineStateOf(const Checkpoint& checkpoint) {
  return dynamic_cast<const EngineState*>(checkpoint.own.get());
}

void TakeEngineState(const Topology& topology, EngineState state, Checkpoint* checkpoint) {
  checkpoint->layout = LayoutOf(topology);
  checkpoint->iteration = IterationOf(state, checkpoint->tag);
  const Node* root = state.model_states.empty() ? nullptr : state.model_states[0].document.root;
  const Result<std::uint64_t> samples = pickle::AsCount(FindIn(root, "global_samples"));
  if (samples) checkpoint->consumed_samples = *samples;
  const Node* type = FindIn(FindIn(FindIn(root, "ds_config"), "optimizer"), "type");
  if (type != nullptr && type->is_string()) checkpoint->optimizer = Lower(type->text);
  for (Param& param : checkpoint->params) {
    if (param.expert) param.expert->module = ExpertModuleOf(param.name);
  }
  for (Group& group : checkpoint->groups) group.hyper = HyperOf(group.options);
  checkpoint->own = std::make_shared<const EngineState>(std::move(state));
}

bool IsOneOf(const Node* key, std::span<const std::string_view> keys) {
  return key->is_string() && std::find(keys.begin(), keys.end(), key->text) != keys.end();
}

}  // namespace shardwright::dialect
