// SPDX-License-Identifier: Apache-2.0
#include "trainer/load/load_result_json.h"

#include <array>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/pickled/torch_optimizer.h"

namespace shardwright::trainer {
namespace {

using nlohmann::json;
using pickle::Kind;
using pickle::Node;

/// Attributes of a loss scaler, as DeepSpeed's optimizers store it.
constexpr std::array<std::string_view, 9> kScalerKeys = {
    "loss_scaler",        "dynamic_loss_scale", "overflow",     "cur_scale", "cur_iter",
    "last_overflow_iter", "scale_factor",       "scale_window", "clip_grad"};

/// Converts graphs to JSON. A node can have many parents, so the size of the output is limited.
class Plain {
 public:
  explicit Plain(std::vector<std::string>* left) : left_(*left) {}

  std::optional<json> Of(const Node* node, const std::string& path) {
    std::optional<json> out;
    if (node != nullptr && made_++ < kMost) out = Make(*node, path);
    if (!out) left_.push_back(path);
    return out;
  }

 private:
  static constexpr std::size_t kMost = 1000000;

  std::optional<json> Make(const Node& node, const std::string& path) {
    switch (node.kind) {
      case Kind::kNone:
        return json(nullptr);
      case Kind::kBool:
        return json(node.integer != 0);
      case Kind::kInt:
        return json(node.integer);
      case Kind::kFloat:
        if (std::isfinite(node.real)) return json(node.real);
        return json{{"float", std::isnan(node.real) ? "nan" : node.real > 0 ? "inf" : "-inf"}};
      case Kind::kString:
        return json(node.text);
      case Kind::kList:
        return Items(node, path);
      case Kind::kTuple:
      case Kind::kSize: {
        std::optional<json> items = Items(node, path);
        return items ? std::optional<json>(json{{"tuple", *std::move(items)}}) : std::nullopt;
      }
      case Kind::kDict:
        return json{{"dict", Entries(node, path)}};
      case Kind::kObject:
        return Object(node, path);
      default:
        return std::nullopt;
    }
  }

  /// Returns all items or none, because positions in a list have a meaning.
  std::optional<json> Items(const Node& node, const std::string& path) {
    json items = json::array();
    for (const Node* item : node.items) {
      std::optional<json> one = Of(item, path + "[" + std::to_string(items.size()) + "]");
      if (!one) return std::nullopt;
      items.push_back(*std::move(one));
    }
    return items;
  }

  json Entries(const Node& dict, const std::string& path) {
    json entries = json::array();
    for (std::size_t i = 0; i < dict.entry_count(); ++i) {
      const Node* key = dict.key(i);
      const bool number = key->kind == Kind::kInt;
      if (!number && !key->is_string()) {
        left_.push_back(path + ", a key that is a " + pickle::Describe(key));
        continue;
      }
      const std::string name = number ? std::to_string(key->integer) : key->text;
      std::string place = path.empty() ? std::string() : path + ".";
      place += name;
      std::optional<json> value = Of(dict.value(i), place);
      if (!value) continue;
      entries.push_back(json::array({number ? json(key->integer) : json(name), *std::move(value)}));
    }
    return entries;
  }

  std::optional<json> Object(const Node& node, const std::string& path) {
    const bool named = node.callable != nullptr && node.callable->kind == Kind::kGlobal;
    const bool plain = node.state != nullptr && node.state->is_dict() && node.list_items.empty() &&
                       node.dict_items.empty();
    if (!named || !plain) return std::nullopt;
    const bool rebuilt = node.callable->text == "copyreg._reconstructor" && node.args != nullptr &&
                         !node.args->items.empty() && node.args->items[0]->kind == Kind::kGlobal;
    return json{{"object", rebuilt ? node.args->items[0]->text : node.callable->text},
                {"dict", Entries(*node.state, path)}};
  }

  std::vector<std::string>& left_;
  std::size_t made_ = 0;
};

/// Returns the entries of a dict that `wanted` accepts, in the form of PlainJson.
template <class Wanted>
json Chosen(const Node* dict, const std::string& path, std::vector<std::string>* left,
            const Wanted& wanted) {
  if (dict == nullptr || !dict->is_dict()) return nullptr;
  json entries = json::array();
  for (std::size_t i = 0; i < dict->entry_count(); ++i) {
    const Node* key = dict->key(i);
    if (!key->is_string() || !wanted(key)) continue;
    const std::optional<json> value = Plain(left).Of(dict->value(i), path + key->text);
    if (value) entries.push_back(json::array({key->text, *value}));
  }
  return {{"dict", std::move(entries)}};
}

/// Returns the options of the source, and adds its
/// format-independent values under the names that optimizers use.
json OptionsOf(const checkpoints::Group& group, std::vector<std::string>* left) {
  json options = Chosen(group.options, "option ", left, [](const Node*) { return true; });
  json entries = options.is_null() ? json::array() : std::move(options["dict"]);
  const auto add = [&](const char* key, json value) {
    for (const json& entry : entries) {
      if (entry[0] == key) return;
    }
    entries.push_back(json::array({key, std::move(value)}));
  };
  const checkpoints::HyperParams& hyper = group.hyper;
  if (hyper.lr) add("lr", *hyper.lr);
  if (hyper.betas) add("betas", {{"tuple", {hyper.betas->first, hyper.betas->second}}});
  if (hyper.eps) add("eps", *hyper.eps);
  if (hyper.weight_decay) add("weight_decay", *hyper.weight_decay);
  if (hyper.momentum) add("momentum", *hyper.momentum);
  if (hyper.step) add("step", *hyper.step);
  return {{"dict", std::move(entries)}};
}

void TellGroups(const checkpoints::Checkpoint& from, std::vector<std::string>* left, json* out) {
  json& groups = (*out)["groups"] = json::array();
  for (const checkpoints::Group& group : from.groups) {
    json params = json::array();
    for (const std::uint32_t param : group.params) params.push_back(from.params[param].name);
    groups.push_back({{"params", std::move(params)}, {"options", OptionsOf(group, left)}});
  }
  json& steps = (*out)["steps"] = json::object();
  json& holders = (*out)["holders"] = json::object();
  for (const checkpoints::Param& param : from.params) {
    if (!param.alias_of.empty()) holders[param.name] = param.alias_of;
    if (param.kind != checkpoints::ParamKind::kTrainable || param.group < 0) continue;
    if (const Result<float> step = checkpoints::TorchStep(from, param)) steps[param.name] = *step;
  }
}

void TellEngine(const checkpoints::Checkpoint& from, std::vector<std::string>* left, json* out) {
  (*out)["engine"] = nullptr;
  (*out)["scaler"] = nullptr;
  const checkpoints::EngineState* state = checkpoints::EngineStateOf(from);
  if (state == nullptr) {
    if (from.own != nullptr) {
      for (const std::string& one : from.own->Contents()) left->push_back(one);
    }
    return;
  }
  if (!state->entries.empty()) left->push_back(checkpoints::DescribeEntries(state->entries));
  if (!state->model_states.empty()) {
    (*out)["engine"] = Chosen(state->model_states[0].document.root, "", left, [](const Node* key) {
      return !checkpoints::IsOneOf(key, checkpoints::kModelKeys);
    });
  }
  if (!state->optimizer.empty()) {
    (*out)["scaler"] =
        Chosen(state->optimizer[0].document.root, "optimizer ", left,
               [](const Node* key) { return checkpoints::IsOneOf(key, kScalerKeys); });
  }
}

}  // namespace

json PlainJson(const Node* node, const std::string& path, std::vector<std::string>* left) {
  std::optional<json> made = Plain(left).Of(node, path);
  return made ? *std::move(made) : json(nullptr);
}

json TellSource(const convert::Input& input) {
  const checkpoints::Checkpoint& from = input.checkpoint;
  std::vector<std::string> left = from.left_out;
  for (const convert::MapUsed& map : input.mapped) {
    left.insert(left.end(), map.left_behind.begin(), map.left_behind.end());
  }
  json out = {{"step", nullptr}, {"samples", nullptr}, {"origin", from.origin}, {"tag", from.tag}};
  if (from.iteration) out["step"] = *from.iteration;
  if (from.consumed_samples) out["samples"] = *from.consumed_samples;
  TellGroups(from, &left, &out);
  TellEngine(from, &left, &out);
  out["not_carried"] = left;
  return out;
}

void TellLoad(const Loaded& loaded, json* told) {
  (*told)["missing"] = loaded.missing;
  (*told)["unused"] = loaded.unused;
  (*told)["bytes_read"] = loaded.bytes_read;
  (*told)["bytes_filled"] = loaded.bytes_filled;
  (*told)["members_verified"] = loaded.members_verified;
}

json LoadResultJson(const Loaded& loaded) {
  json out = TellSource(*loaded.input);
  TellLoad(loaded, &out);
  return out;
}

}  // namespace shardwright::trainer
