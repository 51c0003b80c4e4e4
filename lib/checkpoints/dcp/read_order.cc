// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/dcp/reader_internal.h"
#include "checkpoints/pickled/unit_order.h"

namespace shardwright::checkpoints::dcp {
namespace {

/// Returns true if the entries of an index, which lists the ranks' parts one after the other, are
/// in the order of the model: if the ranks are consecutive stages of a pipeline.
/// Interleaved stages and replicas, which share their items, yield another order.
/// \param planned  of each entry, its position in the planner data, which lists the last rank first
bool AreConsecutiveStages(std::span<const std::string_view> names,
                          std::span<const std::uint32_t> planned) {
  if (std::is_sorted(planned.begin(), planned.end())) return true;  // every rank has all of them
  if (!ListsAscend(names)) return false;
  std::vector<std::uint32_t> by_plan(planned.size());
  std::iota(by_plan.begin(), by_plan.end(), 0);
  std::sort(by_plan.begin(), by_plan.end(),
            [&](std::uint32_t a, std::uint32_t b) { return planned[a] < planned[b]; });
  // Reads the parts in the plan from its end. Each must continue the entries before it.
  std::size_t entry = 0;
  for (std::size_t end = by_plan.size(); end > 0;) {
    std::size_t first = end;
    do --first;
    while (by_plan[first] != entry && first > 0);
    for (std::size_t at = first; at < end; ++at) {
      if (by_plan[at] != entry + (at - first)) return false;
    }
    if (entry > 0 && !InOneList(names[entry - 1], names[entry])) return false;
    entry += end - first;
    end = first;
  }
  return true;
}

}  // namespace

/// Decides whether the trained parameters are in the order of the model. A state dict may have
/// buffers and frozen parameters in other places.
bool FolderReader::HasModelOrder() const {
  std::vector<std::string_view> names;
  std::vector<std::uint32_t> planned;
  bool differ = false;
  for (std::size_t i = 0; i < model_.size(); ++i) {
    if (out_.params[i].group < 0) continue;
    const EntryRef ref = model_[i];
    names.push_back(sorted_[ref.folder][ref.entry].name);
    planned.push_back(At(ref).planned);
    differ = differ || folders_[ref.folder].index.ranks_differ;
  }
  return ModulesAreConsecutive(names) && (!differ || AreConsecutiveStages(names, planned));
}

/// Orders the parameters. The order of the model is that of its state dict. If the folder does not
/// record it, the lists of the optimizer's groups have it: trained parameters take the places of
/// trained ones, so the index determines how groups interleave.
void FolderReader::OrderParams() {
  std::vector<std::vector<std::uint32_t>> lists(out_.groups.size());
  for (std::size_t g = 0; g < out_.groups.size(); ++g) {
    for (const std::string& name : own_->groups[g]) {
      const auto found = by_name_.find(ModelName(name));
      if (found != by_name_.end()) lists[g].push_back(found->second);
    }
  }
  const bool ordered = HasModelOrder();
  std::vector<std::uint32_t> order(out_.params.size());
  std::iota(order.begin(), order.end(), 0);
  if (!own_->naming.flat && !ordered) {
    std::vector<std::size_t> next(lists.size());
    for (std::uint32_t place = 0; place < order.size(); ++place) {
      if (out_.params[place].group < 0) continue;
      const auto group = static_cast<std::size_t>(out_.params[place].group);
      order[place] = lists[group][next[group]++];
    }
  }
  std::vector<Param> params;
  std::vector<EntryRef> model;
  std::vector<std::string_view> names;
  std::vector<std::uint32_t> now(order.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) {
    now[order[i]] = i;
    params.push_back(std::move(out_.params[order[i]]));
    model.push_back(model_[order[i]]);
    names.push_back(sorted_[model.back().folder][model.back().entry].name);
  }
  out_.params = std::move(params);
  model_ = std::move(model);
  for (std::size_t g = 0; g < lists.size(); ++g) {
    std::vector<std::uint32_t>& members = out_.groups[g].params;
    for (const std::uint32_t i : lists[g]) {
      if (out_.params[now[i]].kind == ParamKind::kTrainable) members.push_back(now[i]);
    }
    if (own_->naming.flat || (ordered && ListedByUnit(names, members))) {
      std::sort(members.begin(), members.end());
    }
  }
  for (Param& param : out_.params) {
    if (param.kind != ParamKind::kTrainable) param.group = -1;
  }
  if (out_.groups.empty()) {
    out_.order_unknown =
        "a DCP folder without an optimizer records neither the order of the parameters nor which "
        "of them are trained";
  } else if (!ordered && own_->naming.flat) {
    out_.order_unknown =
        "the ranks that saved the DCP folder had different parts of the model, such as pipeline "
        "stages, and it records only the order within each part";
  }
}

}  // namespace shardwright::checkpoints::dcp
