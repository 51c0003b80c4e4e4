// SPDX-License-Identifier: Apache-2.0
#include "partial/store/modules.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "checkpoints/model/name_parts.h"
#include "engine/layout/states.h"
#include "support/base/limits.h"

namespace shardwright::partial {
namespace {

using layout::LogicalTensor;

/// Returns the module name of a parameter that belongs to no expert: up to the part after the first
/// index of a list, "layers.3.attention" of "layers.3.attention.query.weight".
std::string NonExpertModule(std::string_view name) {
  std::size_t length = 0;
  bool indexed = false;  // the part before is the index of a list
  checkpoints::ForEachModule(name, [&](std::string_view part, std::size_t end) {
    length = end;
    return !std::exchange(indexed, checkpoints::IsListIndex(part));
  });
  return std::string(length == 0 ? name : name.substr(0, length));
}

/// Sort key of a module under construction, in the order of Model.
struct Key {
  bool expert = false;
  std::uint32_t layer = 0;
  std::uint32_t id = 0;
  std::string name;
  auto operator<=>(const Key&) const = default;
};

std::string TensorLine(const LogicalTensor& tensor) {
  return tensor.name + '\n' + tensor.state + '\n' + std::string(Name(tensor.dtype)) + '\n' +
         ToString(tensor.shape);
}

/// Returns the input of the fingerprint, sorted to be independent of the order of reading.
std::map<std::string, std::string> Describe(const checkpoints::Checkpoint& checkpoint) {
  std::map<std::string, std::string> lines;
  for (const LogicalTensor& tensor : checkpoint.map.tensors) {
    lines["\"" + tensor.name + "\" " + tensor.state] =
        std::string(Name(tensor.dtype)) + " " + ToString(tensor.shape);
  }
  for (const checkpoints::Param& param : checkpoint.params) {
    if (!param.alias_of.empty())
      lines["\"" + param.name + "\""] = "tied to \"" + param.alias_of + "\"";
  }
  return lines;
}

Status LayOut(const checkpoints::Checkpoint& checkpoint, const std::vector<std::uint32_t>& tensors,
              Module* module) {
  for (const std::uint32_t index : tensors) {
    const LogicalTensor& tensor = checkpoint.map.tensors[index];
    SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(tensor.shape));
    ModulePart& part = module->parts[static_cast<std::size_t>(ComponentOf(tensor.state))];
    part.tensors.push_back({index, part.bytes, elems * ItemSize(tensor.dtype)});
    part.bytes += part.tensors.back().bytes;
  }
  return {};
}

/// Replaces the layer numbers of files by ordinals, and checks for experts 0 .. N-1 in each.
Status NumberExperts(Model* model) {
  for (std::uint32_t i = model->nonexpert_count; i < model->modules.size(); ++i) {
    Module& module = model->modules[i];
    const auto layer = static_cast<std::uint32_t>(module.id.layer);
    if (model->layer_id.empty() || model->layer_id.back() != layer) {
      model->layer_id.push_back(layer);
      model->experts.push_back(0);
      model->first_of_layer.push_back(i);
    }
    const std::uint32_t expected = model->experts.back()++;
    if (static_cast<std::uint32_t>(module.id.expert) != expected) {
      return Fail(Errc::kBadInput, module.name, ": expert ", expected, " of MoE layer ", layer,
                  " expected, found expert ", module.id.expert);
    }
    module.id.layer = static_cast<std::int32_t>(model->layer_id.size() - 1);
  }
  return model->experts.empty() ? Status() : ValidateExperts(model->experts);
}

}  // namespace

std::string_view Name(Component component) {
  switch (component) {
    case Component::kWeights:
      return "weights";
    case Component::kMaster:
      return "master";
    case Component::kMoments:
      return "moments";
  }
  return "";
}

Result<Component> ParseComponent(std::string_view name) {
  for (const Component component : kAllComponents) {
    if (Name(component) == name) return component;
  }
  return Fail(Errc::kUsage, "component \"", name, "\": expected weights, master or moments");
}

Component ComponentOf(std::string_view state) {
  if (state == layout::kWeight || state == layout::kFrozen || state == layout::kBuffer)
    return Component::kWeights;
  return state == layout::kMaster ? Component::kMaster : Component::kMoments;
}

std::vector<std::pair<Part, Mask>> PartsOf(const Module& module, const Mask& keep) {
  const bool in_parts = std::find(keep.begin(), keep.end(), true) != keep.end();
  Mask all;
  for (std::size_t c = 0; c < kComponents; ++c) all[c] = module.parts[c].bytes > 0;
  if (!module.id.is_expert() || !in_parts) return {{Part::kWhole, all}};
  Mask kept{};
  Mask selected{};
  for (std::size_t c = 0; c < kComponents; ++c) (keep[c] ? kept : selected)[c] = all[c];
  std::vector<std::pair<Part, Mask>> parts;
  for (const auto& [part, mask] : {std::pair(Part::kKept, kept), {Part::kSelected, selected}}) {
    if (std::find(mask.begin(), mask.end(), true) != mask.end()) parts.emplace_back(part, mask);
  }
  return parts;
}

Result<Model> DescribeModel(const checkpoints::Checkpoint& checkpoint) {
  std::map<std::string_view, Key> keys;  // by parameter
  for (const checkpoints::Param& param : checkpoint.params) {
    if (!param.alias_of.empty()) continue;
    Key key{param.expert.has_value(), 0, 0, NonExpertModule(param.name)};
    if (param.expert)
      key = {true, param.expert->layer, param.expert->expert,
             param.expert->module.empty() ? NonExpertModule(param.name) : param.expert->module};
    keys.emplace(param.name, std::move(key));
  }
  std::map<Key, std::vector<std::uint32_t>> grouped;
  for (std::uint32_t t = 0; t < checkpoint.map.tensors.size(); ++t) {
    const auto key = keys.find(checkpoint.map.tensors[t].name);
    if (key == keys.end()) {
      return Fail(Errc::kInternal, "tensor \"", checkpoint.map.tensors[t].name,
                  "\": internal error: it belongs to no parameter");
    }
    grouped[key->second].push_back(t);
  }
  if (grouped.size() > limits::kMoeLayers * limits::kMoeExperts) {
    return Fail(Errc::kLimit, checkpoint.tag, ": expected at most ",
                limits::kMoeLayers * limits::kMoeExperts, " modules, found ", grouped.size());
  }
  Model model;
  model.modules.reserve(grouped.size());
  exec::DigestStream digest;
  for (auto& [key, tensors] : grouped) {
    const auto line = [&](std::uint32_t t) { return TensorLine(checkpoint.map.tensors[t]); };
    std::sort(tensors.begin(), tensors.end(),
              [&](std::uint32_t a, std::uint32_t b) { return line(a) < line(b); });
    Module module;
    module.name = key.name;
    if (key.expert) {
      module.id = {static_cast<std::int32_t>(key.layer), static_cast<std::int32_t>(key.id)};
    } else {
      module.id.layer = static_cast<std::int32_t>(model.nonexpert_count++);
    }
    SW_TRY(LayOut(checkpoint, tensors, &module));
    model.modules.push_back(std::move(module));
  }
  SW_TRY(NumberExperts(&model));
  for (const auto& [what, how] : Describe(checkpoint)) {
    std::string text = what;
    text.append("\n").append(how).append("\n");
    digest.Add(std::as_bytes(std::span(text)));
  }
  model.fingerprint = digest.Finish();
  return model;
}

std::string FirstDifference(const checkpoints::Checkpoint& a, const checkpoints::Checkpoint& b) {
  const auto left = Describe(a);
  const auto right = Describe(b);
  for (auto x = left.begin(), y = right.begin(); x != left.end() || y != right.end();) {
    if (y == right.end() || (x != left.end() && x->first < y->first)) {
      return x->first + ": expected " + x->second + ", found none";
    }
    if (x == left.end() || y->first < x->first) {
      return y->first + ": expected none, found " + y->second;
    }
    if (x->second != y->second) {
      return x->first + ": expected " + x->second + ", found " + y->second;
    }
    ++x;
    ++y;
  }
  return "";
}

std::vector<std::uint32_t> PassedMembers(const checkpoints::Checkpoint& checkpoint) {
  std::vector<bool> mapped(checkpoint.map.members.size(), false);
  std::vector<bool> used(checkpoint.map.arrays.size(), false);
  for (const LogicalTensor& tensor : checkpoint.map.tensors) {
    for (const layout::Fragment& fragment : tensor.fragments) used[fragment.at.array] = true;
  }
  for (std::size_t a = 0; a < checkpoint.map.arrays.size(); ++a) {
    if (!used[a]) continue;
    for (const layout::Region& region : checkpoint.map.arrays[a].regions) {
      mapped[region.member] = true;
    }
  }
  std::vector<bool> passed(checkpoint.map.members.size(), false);
  if (checkpoint.own != nullptr) {
    for (const std::uint32_t member : checkpoint.own->Members()) passed[member] = !mapped[member];
  }
  std::vector<std::uint32_t> members;
  for (std::uint32_t m = 0; m < passed.size(); ++m) {
    if (passed[m] && checkpoint.map.members[m].bytes > 0) members.push_back(m);
  }
  return members;
}

ModelBytes BytesOf(const Model& model) {
  ModelBytes bytes;
  for (const std::uint32_t experts : model.experts) bytes.expert.emplace_back().reserve(experts);
  for (const Module& module : model.modules) {
    const ComponentBytes one{module.part(Component::kWeights).bytes,
                             module.part(Component::kMaster).bytes,
                             module.part(Component::kMoments).bytes};
    const bool expert = module.id.is_expert();
    (expert ? bytes.expert[static_cast<std::size_t>(module.id.layer)] : bytes.nonexpert)
        .push_back(one);
  }
  return bytes;
}

}  // namespace shardwright::partial
