// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>

#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/read/read_internal.h"
#include "checkpoints/pickled/hyper.h"
#include "engine/layout/states.h"

namespace shardwright::checkpoints::megatron {
namespace {

using pickle::Node;

/// Options by which Megatron identifies optimizer groups.
constexpr const char* kGroupKeys[] = {"wd_mult", "lr_mult", "is_decoupled_lr", "max_lr", "min_lr"};

double NumberIn(const Node* options, std::string_view key, double otherwise) {
  const Node* node = FindIn(options, key);
  const Result<double> value = pickle::AsFloat(node);
  if (value) return *value;
  const Result<std::int64_t> flag = pickle::AsInt(node);
  return flag ? static_cast<double>(*flag) : otherwise;
}

/// Returns true for the group of embedding and output layer, if they have a learning rate of their
/// own. Releases before 0.16 mark it, later ones only give it that rate.
bool HasOwnRate(const Args& args, const Node* group) {
  if (NumberIn(group, "is_decoupled_lr", 0) != 0) return true;
  return args.vocabulary_rate && NumberIn(group, "wd_mult", 1) != 0 &&
         NumberIn(group, "max_lr", 0) == *args.vocabulary_rate &&
         NumberIn(group, "default_config", 0) == 0;
}

}  // namespace

Collector::Collector(const SourceSet& source, const Patterns& patterns)
    : patterns_(patterns), map(source, &out.map) {
  out.origin = "megatron";
  out.tag = source.tag;
  out.arena = std::make_shared<pickle::Arena>();
  out.warnings = source.warnings;
}

std::uint32_t Collector::Find(std::uint32_t param, std::string state, DType dtype, Shape shape) {
  const auto [at, fresh] = tensors_.try_emplace(std::pair(param, state),
                                                static_cast<std::uint32_t>(out.map.tensors.size()));
  if (fresh) {
    layout::LogicalTensor tensor;
    tensor.name = out.params[param].name;
    tensor.state = std::move(state);
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    out.map.tensors.push_back(std::move(tensor));
  }
  return at->second;
}

std::uint32_t Collector::TensorOf(std::uint32_t param, std::string_view state, DType dtype) {
  return Find(param, std::string(state), dtype, wholes[param].shape);
}

std::uint32_t Collector::PaddingOf(std::uint32_t param, std::string_view state, DType dtype) {
  Shape shape = wholes[param].shape;
  shape[0] = wholes[param].padding;
  return Find(param, layout::PaddingOf(state), dtype, std::move(shape));
}

Result<const std::vector<Part>*> Collector::PartsFor(std::uint32_t param, std::uint64_t ranks,
                                                     std::uint64_t rank) {
  std::vector<Part>& parts = parts_[{param, ranks, rank}];
  if (parts.empty()) {
    auto made = PartsOf(wholes[param], ranks, rank);
    if (!made) return Within("\"" + out.params[param].name + "\"", made.error());
    parts = *std::move(made);
  }
  return &parts;
}

Status Collector::AddFragment(std::uint32_t param, std::string_view state, DType dtype,
                              bool padding, layout::Fragment fragment) {
  const std::uint32_t index =
      padding ? PaddingOf(param, state, dtype) : TensorOf(param, state, dtype);
  layout::LogicalTensor& tensor = out.map.tensors[index];
  if (tensor.dtype != dtype) {
    return Fail(Errc::kBadInput, "\"", tensor.name, "\" (", tensor.state, "): ", Name(tensor.dtype),
                " and ", Name(dtype), " on different ranks");
  }
  tensor.fragments.push_back(std::move(fragment));
  return {};
}

Status Collector::AddShard(std::uint32_t param, std::string_view state, DType dtype,
                           layout::Placement at, std::uint64_t ranks, std::uint64_t rank,
                           layout::Role role) {
  SW_TRY_ASSIGN(const std::vector<Part>* parts, PartsFor(param, ranks, rank));
  for (const Part& part : *parts) {
    layout::Fragment fragment;
    fragment.cut = part.cut;
    fragment.at = at;
    fragment.at.vector_offset += part.first;
    fragment.role = role;
    SW_TRY(AddFragment(param, state, dtype, part.padding, std::move(fragment)));
  }
  return {};
}

namespace {

/// Returns the part of a cut inside a box of its shard.
Result<layout::Cut> Within(const layout::Cut& cut, const layout::Box& wanted) {
  std::vector<layout::Box> boxes;
  for (const layout::Box& box : cut.boxes()) {
    layout::Box both = box;
    bool any = true;
    for (std::size_t d = 0; d < box.sizes.size(); ++d) {
      const std::uint64_t first = std::max(box.at_shard[d], wanted.at_view[d]);
      const std::uint64_t last =
          std::min(box.at_shard[d] + box.sizes[d], wanted.at_view[d] + wanted.sizes[d]);
      any = any && first < last;
      if (!any) break;
      both.at_view[d] = box.at_view[d] + (first - box.at_shard[d]);
      both.at_shard[d] = first - wanted.at_view[d];
      both.sizes[d] = last - first;
    }
    if (any) boxes.push_back(std::move(both));
  }
  return layout::Cut::Make(cut.view(), wanted.sizes, std::move(boxes));
}

}  // namespace

Status Collector::AddRange(std::uint32_t param, std::string_view state, DType dtype,
                           layout::Placement at, std::uint64_t ranks, std::uint64_t rank,
                           std::uint64_t first, std::uint64_t last) {
  SW_TRY_ASSIGN(const std::vector<Part>* parts, PartsFor(param, ranks, rank));
  for (const Part& part : *parts) {
    const std::uint64_t end = part.first + part.cut->shard_elems();
    const std::uint64_t from = std::max(first, part.first);
    const std::uint64_t to = std::min(last, end);
    if (from >= to) continue;
    std::uint64_t done = from;
    for (const layout::Box& box :
         BoxesOfRange(part.cut->shard(), from - part.first, to - part.first)) {
      SW_TRY_ASSIGN(layout::Cut cut, Within(*part.cut, box));
      layout::Fragment fragment;
      fragment.cut = std::make_shared<const layout::Cut>(std::move(cut));
      fragment.at = at;
      fragment.at.vector_offset += done - first;
      done += fragment.cut->shard_elems();
      SW_TRY(AddFragment(param, state, dtype, part.padding, std::move(fragment)));
    }
  }
  return {};
}

Status Collector::AddBox(std::uint32_t param, std::string_view state, DType dtype,
                         layout::Placement at, const Shape& offsets, const Shape& sizes) {
  const Whole& whole = wholes[param];
  const auto add = [&](std::uint64_t extent, std::uint64_t skip, std::uint64_t count,
                       bool padding) -> Status {
    if (count == 0) return {};
    Shape view = whole.shape;
    layout::Box box{offsets, Shape(sizes.size(), 0), sizes};
    if (!view.empty()) {
      view[0] = extent;
      box.at_view[0] = offsets[0] + skip - (padding ? whole.shape[0] : 0);
      box.sizes[0] = count;
    }
    Shape shard = box.sizes;
    SW_TRY_ASSIGN(layout::Cut cut,
                  layout::Cut::Make(std::move(view), std::move(shard), {std::move(box)}));
    layout::Fragment fragment;
    fragment.cut = std::make_shared<const layout::Cut>(std::move(cut));
    fragment.at = at;
    Shape before = sizes;
    if (!before.empty()) before[0] = skip;
    fragment.at.vector_offset += before.empty() ? 0 : Elems(before);
    return AddFragment(param, state, dtype, padding, std::move(fragment));
  };
  if (sizes.empty()) return add(1, 0, 1, false);
  const std::uint64_t real = whole.shape[0];
  const std::uint64_t mine = offsets[0] >= real ? 0 : std::min(sizes[0], real - offsets[0]);
  SW_TRY(add(real, 0, mine, false));
  return add(whole.padding, mine, sizes[0] - mine, true);
}

Result<std::uint32_t> Collector::AddParam(const Rules& rules, const Args& args,
                                          const std::string& name, DType dtype,
                                          std::span<const Shape> shards) {
  SW_TRY_ASSIGN(Whole whole, WholeOf(rules, patterns_, name, shards, args));
  Param param;
  param.name = name;
  param.kind = IsBuffer(name) ? ParamKind::kBuffer : ParamKind::kTrainable;
  param.shape = whole.shape;
  param.dtype = dtype;
  param.rule = whole.rule;
  const ParamName parsed = ParseName(name);
  if (parsed.expert) {
    ExpertId id;
    // Layers of multi-token prediction follow those of the decoder.
    id.layer = static_cast<std::uint32_t>(parsed.depth ? args.layers + *parsed.depth
                                                       : parsed.layer.value_or(0));
    id.expert = static_cast<std::uint32_t>(*parsed.expert);
    id.module = name.substr(
        0, name.size() - parsed.rest.size() - std::to_string(*parsed.expert).size() - 1);
    param.expert = std::move(id);
  }
  const auto index = static_cast<std::uint32_t>(out.params.size());
  by_name.emplace(name, index);
  out.params.push_back(std::move(param));
  wholes.push_back(std::move(whole));
  return index;
}

Result<Checkpoint> Collector::Finish() {
  for (const layout::LogicalTensor& tensor : out.map.tensors) {
    if (layout::IsModelState(tensor.state) || layout::IsPadding(tensor.state)) continue;
    out.states.push_back(tensor.state);
  }
  std::sort(out.states.begin(), out.states.end());
  out.states.erase(std::unique(out.states.begin(), out.states.end()), out.states.end());
  for (std::uint32_t i = 0; i < out.params.size(); ++i) {
    const Param& param = out.params[i];
    const bool trained = param.kind == ParamKind::kTrainable && param.alias_of.empty();
    if (!trained || param.group < 0) continue;
    out.groups[static_cast<std::size_t>(param.group)].params.push_back(i);
  }
  SW_TRY(layout::Validate(out.map));
  out.proved = true;
  return std::move(out);
}

std::uint32_t Groups::Of(pickle::Arena& arena, const Node* options, bool experts,
                         std::vector<Group>* groups) {
  std::string key = experts ? "experts" : "dense";
  for (const char* name : kGroupKeys) {
    char text[40];
    std::snprintf(text, sizeof text, " %.17g", NumberIn(options, name, 1));
    key += text;
  }
  const auto [at, fresh] = known_.try_emplace(key, static_cast<std::uint32_t>(groups->size()));
  if (fresh) {
    Group group;
    Node* copy = CopyDict(arena, options);
    pickle::Remove(copy, "params");
    group.options = copy;
    group.hyper = HyperOf(copy);
    group.moe = experts;
    groups->push_back(std::move(group));
  }
  return at->second;
}

Result<std::vector<std::vector<std::size_t>>> ShareOut(const Args& args,
                                                       const Checkpoint& checkpoint,
                                                       const std::vector<Local>& locals,
                                                       const Node* groups,
                                                       const std::string& where) {
  const auto unknown = [&](const std::string& what) {
    return Fail(Errc::kUnsupported, where, ": ", what,
                ": cannot determine which parameters are in which optimizer group");
  };
  if (groups == nullptr || !groups->is_list()) {
    return Fail(Errc::kUnsupported, where, ": param_groups: list expected, found ",
                pickle::Describe(groups));
  }
  std::map<std::pair<bool, bool>, std::size_t> kinds;  // no weight decay, separate learning rate
  bool own_rate = false;
  for (std::size_t g = 0; g < groups->items.size(); ++g) {
    const Node* group = groups->items[g];
    if (!group->is_dict()) {
      return Fail(Errc::kBadInput, where, ": param_groups: dict expected, found ",
                  pickle::Describe(group));
    }
    const bool own = HasOwnRate(args, group);
    own_rate = own_rate || own;
    if (!kinds.emplace(std::pair(NumberIn(group, "wd_mult", 1) == 0, own), g).second) {
      return unknown("two parameter groups of the same kind");
    }
  }
  std::vector<std::vector<std::size_t>> shared(groups->items.size());
  for (std::size_t i = 0; i < locals.size(); ++i) {
    const Param& param = checkpoint.params[locals[i].param];
    const bool own = own_rate && IsOfVocabulary(param.name) && !param.name.ends_with(".bias");
    const auto kind = kinds.find({!HasDecay(args, param.name, locals[i].shape), own});
    if (kind == kinds.end()) return unknown("no group for \"" + param.name + "\"");
    shared[kind->second].push_back(i);
  }
  return shared;
}

Status CheckMasters(const Args& args, DType dtype, bool copied, const std::string& where) {
  if (dtype != DType::kI16 && !(copied && args.remainders)) return {};
  return Fail(Errc::kUnsupported, where,
              ": master weights as remainders of 16 bits are not supported "
              "(use_precision_aware_optimizer)");
}

}  // namespace shardwright::checkpoints::megatron
