// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <map>
#include <utility>

#include "checkpoints/dcp/reader_internal.h"
#include "checkpoints/pickled/hyper.h"
#include "checkpoints/pickled/torch_optimizer.h"
#include "checkpoints/pickled/wrappers.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dcp {

using pickle::Node;

/// Returns an option's value. Adds a tensor to `tensors` and returns it as a number.
/// \returns null for values of unknown type
Result<const Node*> FolderReader::OptionValue(std::string_view key, EntryRef ref,
                                              std::vector<Scalar>* tensors) {
  const shardwright::dcp::Entry& entry = At(ref);
  if (!entry.is_tensor) return PlainOption(key, ref, tensors);
  Scalar scalar;
  scalar.state = key;
  scalar.is_tensor = true;
  scalar.dtype = entry.dtype;
  scalar.shape = entry.shape;
  if (Elems(entry.shape) != 1 || entry.chunks.size() != 1) {
    return Fail(Errc::kUnsupported, Where(ref),
                ": option with one element expected, found a larger tensor");
  }
  auto bytes = BytesOf(ItemOf(ref, 0));
  if (!bytes) return Within(Where(ref), bytes.error());
  scalar.bytes = *std::move(bytes);
  tensors->push_back(std::move(scalar));
  return NumberNode(tensors->back(), out_.arena.get());
}

/// Returns the value of an option that was pickled as a whole, including its tensors.
Result<const Node*> FolderReader::PlainOption(std::string_view key, EntryRef ref,
                                              std::vector<Scalar>* tensors) {
  const StoredItem held = ItemOf(ref, 0);
  if (held.node == nullptr) return nullptr;
  Node* dict = out_.arena->Dict();
  Set(*out_.arena, dict, key, held.node);
  std::vector<Scalar> found = TensorOptions(dict, [&](const Node* tensor) {
    StoredItem one = held;
    one.node = tensor;
    return BytesOf(one);
  });
  if (!UnreadTensor(dict, found).empty()) {
    return Fail(Errc::kUnsupported, Where(ref),
                ": option with one element expected, found a larger tensor");
  }
  const Node* plain = PlainOptions(dict, found, out_.arena.get())->Find(key);
  for (Scalar& one : found) tensors->push_back(std::move(one));
  return plain;
}

/// Sets a group's options. DCP saves lists that contain tensors per item: "betas.0", "betas.1".
Status FolderReader::SetOptions(const std::vector<std::pair<std::string_view, EntryRef>>& options,
                                Group* group) {
  Node* dict = out_.arena->Dict();
  std::map<std::string_view, std::map<std::uint64_t, const Node*>> lists;
  for (const auto& [key, ref] : options) {
    if (key == "params") continue;
    SW_TRY_ASSIGN(const Node* value, OptionValue(key, ref, &group->tensors));
    if (value == nullptr) continue;
    const std::size_t dot = key.rfind('.');
    std::uint64_t number = 0;
    const bool item =
        dot != std::string_view::npos && At(ref).part_count() > 1 && At(ref).path.back().is_index &&
        std::from_chars(key.data() + dot + 1, key.data() + key.size(), number).ec == std::errc();
    if (!item) {
      Set(*out_.arena, dict, key, value);
      continue;
    }
    const std::string_view list = key.substr(0, dot);
    if (lists[list].empty()) Set(*out_.arena, dict, list, out_.arena->None());
    lists[list].emplace(number, value);
  }
  for (const auto& [key, items] : lists) {
    std::vector<const Node*> all;
    all.reserve(items.size());
    for (const auto& [number, value] : items) all.push_back(value);
    Set(*out_.arena, dict, key, out_.arena->List(std::move(all)));
  }
  group->options = dict;
  return {};
}

/// Makes the groups of a nested optimizer, which lists their parameters by name.
Status FolderReader::MakeNestedGroups() {
  for (const auto& [number, options] : group_options_) {
    if (number != out_.groups.size()) {
      return Fail(Errc::kBadInput, "the optimizer's parameter group ", out_.groups.size(),
                  " is missing");
    }
    Group group;
    SW_TRY(SetOptions(options, &group));
    std::vector<std::string> names;
    for (const auto& [key, ref] : options) {
      if (key != "params") continue;
      const Node* list = ObjectOf(ref);
      if (list == nullptr || !list->is_list()) {
        return Fail(Errc::kUnsupported, Where(ref), ": list of names expected, found ",
                    Describe(list));
      }
      for (const Node* item : list->items) {
        auto name = pickle::AsString(item);
        if (!name) {
          return Fail(Errc::kUnsupported, Where(ref),
                      ": parameter names expected, found parameter numbers");
        }
        names.emplace_back(*name);
      }
    }
    own_->groups.push_back(std::move(names));
    out_.groups.push_back(std::move(group));
  }
  return {};
}

/// Makes one group for all parameters with the same options, in the order of the model.
Status FolderReader::MakeFlatGroups() {
  std::vector<std::string_view> names;
  for (const Param& param : out_.params) {
    const auto kept = kept_.find(param.name);
    if (kept != kept_.end()) names.push_back(kept->first);
  }
  for (const Param& param : out_.fused) names.push_back(kept_.find(param.name)->first);
  for (const std::string_view name : names) {
    const Kept& kept = kept_.at(name);
    // Equal values in different files are different nodes, so compare by value.
    std::size_t at = 0;
    Group group;
    SW_TRY(SetOptions(kept.options, &group));
    for (; at < out_.groups.size(); ++at) {
      if (SameOptions(out_.groups[at].options, group.options)) break;
    }
    if (at == out_.groups.size()) {
      out_.groups.push_back(std::move(group));
      own_->groups.emplace_back();
    }
    own_->groups[at].push_back(own_->OptimizerName(std::string(name)));
  }
  if (out_.groups.size() > 1) {
    out_.optimizer_warnings.push_back(StrCat(
        source_.tag, ": a flat optimizer does not record the order of its ", out_.groups.size(),
        " parameter groups, so they are in the order of the model; trainers that number "
        "their groups, such as DeepSpeed, must create them in this order"));
  }
  return {};
}

/// Matches the names of group members that have no state; states have matched all other names.
void FolderReader::MatchGroupNames() {
  std::vector<std::string_view> listed;
  bool all = true;
  for (const std::vector<std::string>& group : own_->groups) {
    for (const std::string& name : group) {
      listed.push_back(name);
      all = all && by_name_.contains(ModelName(name));
    }
  }
  if (all) return;
  std::vector<std::string_view> model;
  model.reserve(by_name_.size());
  for (const auto& [name, index] : by_name_) model.push_back(name);
  for (const auto& [name, same] : MatchNames(model, listed)) {
    if (by_name_.contains(ModelName(name))) continue;
    model_names_.emplace(name, same);
    own_->optimizer_names.emplace(same, name);
  }
}

Status FolderReader::MakeGroups() {
  if (own_->naming.flat) {
    SW_TRY(MakeFlatGroups());
  } else {
    SW_TRY(MakeNestedGroups());
  }
  MatchGroupNames();
  std::unordered_map<std::string_view, std::uint32_t> only;
  for (std::uint32_t i = 0; i < out_.fused.size(); ++i) {
    only.emplace(out_.fused[i].name, i);
  }
  for (std::size_t g = 0; g < out_.groups.size(); ++g) {
    out_.groups[g].hyper = HyperOf(out_.groups[g].options, out_.groups[g].tensors);
    for (const std::string& name : own_->groups[g]) {
      const auto found = by_name_.find(ModelName(name));
      if (found == by_name_.end()) {
        const auto alone = only.find(ModelName(name));
        if (alone != only.end()) {
          out_.fused[alone->second].group = static_cast<std::int32_t>(g);
        }
        continue;
      }
      Param& param = out_.params[found->second];
      if (param.group >= 0) {
        return Fail(Errc::kBadInput, Quoted(name), " is in two groups of the optimizer");
      }
      param.group = static_cast<std::int32_t>(g);
      param.kind = ParamKind::kTrainable;
    }
  }
  DecideStateless();
  return {};
}

/// Decides the kind of group members for which the optimizer has no state.
void FolderReader::DecideStateless() {
  std::vector<std::string> with;
  std::vector<std::string> without;
  for (const Param& param : out_.params) {
    if (param.group < 0 || !CanBeTrained(param.dtype)) continue;
    const auto kept = kept_.find(param.name);
    (kept != kept_.end() && !kept->second.slots.empty() ? with : without).push_back(param.name);
  }
  if (with.empty() || without.empty()) return;
  if (!AreFrozen(with, without)) {
    out_.warnings.push_back(StatelessWarning(without));
    return;
  }
  for (const std::string& name : without) {
    out_.params[by_name_.at(name)].kind = ParamKind::kFrozen;
  }
}

}  // namespace shardwright::checkpoints::dcp
