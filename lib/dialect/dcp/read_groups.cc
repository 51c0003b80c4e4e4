#include <algorithm>
#include <utility>

#include "base/text.h"
#include "dialect/build/hyper.h"
#include "dialect/dcp/reader_internal.h"

namespace shardwright::dialect::dcp {

using pickle::Node;

const Node* FolderReader::NewOptions(
    const std::vector<std::pair<std::string_view, EntryRef>>& options) {
  Node* dict = out_.arena->Dict();
  for (const auto& [key, ref] : options) {
    if (key == "params" || At(ref).is_tensor) continue;
    const Node* value = ObjectOf(ref);
    if (value == nullptr) continue;
    dict->items.push_back(out_.arena->String(key));
    dict->items.push_back(value);
  }
  return dict;
}

/// Groups with their parameters by name.
Status FolderReader::MakeNestedGroups() {
  for (const auto& [number, options] : group_options_) {
    if (number != out_.groups.size()) {
      return Fail(Errc::kBadInput, "the optimizer's parameter group " +
                                       std::to_string(out_.groups.size()) + " is missing");
    }
    Group group;
    group.options = NewOptions(options);
    std::vector<std::string> names;
    for (const auto& [key, ref] : options) {
      if (key != "params") continue;
      const Node* list = ObjectOf(ref);
      if (list == nullptr || !list->is_list()) {
        return Fail(Errc::kUnsupported,
                    Where(ref) + ": list of names expected, found " + Describe(list));
      }
      for (const Node* item : list->items) {
        auto name = pickle::AsString(item);
        if (!name) {
          return Fail(Errc::kUnsupported,
                      Where(ref) + ": the optimizer's parameters have numbers and no names");
        }
        names.emplace_back(*name);
      }
    }
    own_->groups.push_back(std::move(names));
    out_.groups.push_back(std::move(group));
  }
  return {};
}

/// Parameters with the same options are a group; groups come in the order of the model.
void FolderReader::MakeFlatGroups() {
  std::vector<std::string_view> names;
  for (const Param& param : out_.params) {
    const auto kept = kept_.find(param.name);
    if (kept != kept_.end()) names.push_back(kept->first);
  }
  for (const Param& param : out_.fused) names.push_back(kept_.find(param.name)->first);
  for (const std::string_view name : names) {
    const Kept& kept = kept_.at(name);
    // Equal values of different files are different nodes.
    std::size_t at = 0;
    const Node* options = NewOptions(kept.options);
    for (; at < out_.groups.size(); ++at) {
      if (SameOptions(out_.groups[at].options, options)) break;
    }
    if (at == out_.groups.size()) {
      Group group;
      group.options = options;
      out_.groups.push_back(std::move(group));
      own_->groups.emplace_back();
    }
    own_->groups[at].emplace_back(name);
  }
}

Status FolderReader::MakeGroups() {
  if (own_->naming.flat) {
    MakeFlatGroups();
  } else {
    SW_TRY(MakeNestedGroups());
  }
  std::unordered_map<std::string_view, std::uint32_t> only;
  for (std::uint32_t i = 0; i < out_.fused.size(); ++i) {
    only.emplace(out_.fused[i].name, i);
  }
  for (std::size_t g = 0; g < out_.groups.size(); ++g) {
    out_.groups[g].hyper = HyperOf(out_.groups[g].options);
    for (const std::string& name : own_->groups[g]) {
      const auto found = by_name_.find(name);
      if (found == by_name_.end()) {
        const auto alone = only.find(name);
        if (alone != only.end()) {
          out_.fused[alone->second].group = static_cast<std::int32_t>(g);
        }
        continue;
      }
      Param& param = out_.params[found->second];
      if (param.group >= 0) {
        return Fail(Errc::kBadInput, Quoted(name) + " is in two groups of the optimizer");
      }
      param.group = static_cast<std::int32_t>(g);
      // In a group, and never stepped: it was frozen.
      const bool kept = kept_.contains(name);
      param.kind = kept || !CanBeTrained(param.dtype) ? ParamKind::kTrainable : ParamKind::kFrozen;
      if (!kept && kept_.empty()) param.kind = ParamKind::kTrainable;
    }
  }
  return {};
}

/// Trained parameters in the order of their groups' lists, where there are such; what the index
/// says of others.
void FolderReader::OrderParams() {
  std::vector<std::uint32_t> places;  // of trained parameters, ascending
  for (std::uint32_t i = 0; i < out_.params.size(); ++i) {
    if (out_.params[i].group >= 0) places.push_back(i);
  }
  // The order within a group is the model's; groups interleave as the index has them.
  std::vector<std::vector<std::uint32_t>> lists(out_.groups.size());
  for (std::size_t g = 0; g < out_.groups.size(); ++g) {
    for (const std::string& name : own_->groups[g]) {
      const auto found = by_name_.find(name);
      if (found != by_name_.end()) lists[g].push_back(found->second);
    }
  }
  std::vector<std::uint32_t> order(out_.params.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  if (!own_->naming.flat) {
    std::vector<std::size_t> next(lists.size());
    for (const std::uint32_t place : places) {
      const auto group = static_cast<std::size_t>(out_.params[place].group);
      order[place] = lists[group][next[group]++];
    }
  }
  std::vector<Param> params;
  std::vector<EntryRef> model;
  std::vector<std::uint32_t> now(order.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) {
    now[order[i]] = i;
    params.push_back(std::move(out_.params[order[i]]));
    model.push_back(model_[order[i]]);
  }
  out_.params = std::move(params);
  model_ = std::move(model);
  for (std::size_t g = 0; g < lists.size(); ++g) {
    for (const std::uint32_t i : lists[g]) {
      if (out_.params[now[i]].kind == ParamKind::kTrainable)
        out_.groups[g].params.push_back(now[i]);
    }
    if (own_->naming.flat) std::sort(out_.groups[g].params.begin(), out_.groups[g].params.end());
  }
  for (Param& param : out_.params) {
    if (param.kind != ParamKind::kTrainable) param.group = -1;
  }
  if (out_.groups.empty()) {
    out_.order_unknown =
        "a DCP folder without an optimizer does not tell in which order a model has its "
        "parameters, nor which of them are trained";
  }
}

}  // namespace shardwright::dialect::dcp
