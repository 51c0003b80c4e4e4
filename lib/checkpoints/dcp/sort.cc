// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/dcp/sort_internal.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "checkpoints/pickled/weight_sets.h"
#include "checkpoints/pickled/wrappers.h"
#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dcp {
namespace {

namespace file_format = shardwright::dcp;
using file_format::Entry;

constexpr std::string_view kState = "state";
constexpr std::string_view kGroups = "param_groups";

std::optional<std::uint64_t> NumberOf(std::string_view text) {
  const auto number = NumberIn<std::uint64_t>(text);
  return number && *number <= 1'000'000 ? number : std::nullopt;
}

/// An entry that may belong to an optimizer; `root` is the length of the optimizer's prefix.
struct Optimizer {
  std::size_t root = 0;
  bool flat = false;
  bool option = false;
  Sorted sorted;
};

/// Splits a text at its last dot and returns the parts before and after it.
std::pair<std::string_view, std::string_view> SplitLast(std::string_view text) {
  const std::size_t dot = text.rfind('.');
  if (dot == std::string_view::npos) return {{}, text};
  return {text.substr(0, dot), text.substr(dot + 1)};
}

/// Parses "state.<name>.<key>" or "param_groups.<name>.<key>" at position `root` of a name.
std::optional<Optimizer> FlatAt(std::string_view text, std::size_t root) {
  Optimizer found;
  found.root = root;
  found.flat = true;
  std::string_view rest;
  if (text.starts_with(std::string(kState) + ".")) {
    rest = text.substr(kState.size() + 1);
  } else if (text.starts_with(std::string(kGroups) + ".")) {
    rest = text.substr(kGroups.size() + 1);
    found.option = true;
  } else {
    return std::nullopt;
  }
  std::tie(found.sorted.name, found.sorted.key) = SplitLast(rest);
  if (found.sorted.name.data() == nullptr) return std::nullopt;
  return found;
}

std::optional<Optimizer> WithPath(const Entry& entry) {
  const std::size_t count = entry.part_count();
  for (std::size_t i = 0; i + 2 < count; ++i) {
    const std::size_t root = i == 0 ? 0 : entry.path[i - 1].end + 1;
    Optimizer found;
    found.root = root;
    if (entry.part(i) == kState && i + 3 == count) {
      found.sorted.name = entry.part(i + 1);
      found.sorted.key = entry.part(i + 2);
      return found;
    }
    if (entry.part(i) == kGroups && entry.path[i + 1].is_index) {
      const auto group = NumberOf(entry.part(i + 1));
      if (!group) return std::nullopt;
      found.option = true;
      found.sorted.group = *group;
      found.sorted.key = std::string_view(entry.name).substr(entry.path[i + 1].end + 1);
      return found;
    }
  }
  // An option list with tensors is saved per item: "param_groups.w.betas", "0".
  std::size_t last = count - 1;
  while (last > 0 && entry.path[last].is_index) --last;
  const std::size_t root = last == 0 ? 0 : entry.path[last - 1].end + 1;
  auto found = FlatAt(entry.part(last), root);
  if (found && last + 1 < count) {
    const std::string_view name = entry.name;
    found->sorted.key =
        name.substr(static_cast<std::size_t>(found->sorted.key.data() - name.data()));
  }
  return found;
}

/// Parses an entry of an index without paths, where only dots separate components.
std::optional<Optimizer> WithoutPath(const Entry& entry) {
  const std::string_view name = entry.name;
  for (std::size_t at = 0; at != std::string_view::npos;) {
    const std::string_view rest = name.substr(at);
    if (auto found = FlatAt(rest, at)) {
      const std::string_view after = rest.substr(found->option ? kGroups.size() + 1 : 0);
      const auto group = found->option ? NumberOf(after.substr(0, after.find('.')))
                                       : std::optional<std::uint64_t>();
      if (group) {
        found->flat = false;
        found->sorted.group = *group;
        found->sorted.name = {};
        found->sorted.key = after.substr(after.find('.') + 1);
      }
      return found;
    }
    const std::size_t dot = name.find('.', at);
    at = dot == std::string_view::npos ? dot : dot + 1;
  }
  return std::nullopt;
}

/// Returns the path for a prefix of an entry's name. The prefix is empty or ends in a dot.
std::vector<std::string> PathOf(const Entry& entry, std::size_t bytes) {
  std::vector<std::string> path;
  if (bytes == 0) return path;
  if (entry.path.empty()) return {entry.name.substr(0, bytes - 1)};
  for (std::size_t i = 0; i < entry.path.size() && entry.path[i].end < bytes; ++i) {
    path.emplace_back(entry.part(i));
  }
  return path;
}

/// Tensors with the same name prefix: the model, or other weights.
struct Root {
  std::vector<const Entry*> entries;
  std::vector<std::string_view> names;  // for each entry, its name without the prefix
  std::uint64_t bytes = 0;
  bool weights = false;  // at least one tensor can be a parameter
};

class Sorter {
 public:
  Sorter(const std::vector<const file_format::Index*>& indexes, Optimizers optimizers,
         std::string_view weights_of, std::vector<std::vector<Sorted>>* sorted)
      : indexes_(indexes), optimizers_(optimizers), weights_of_(weights_of), sorted_(*sorted) {}

  Result<Sorting> Run() {
    sorted_.resize(indexes_.size());
    for (std::size_t i = 0; i < indexes_.size(); ++i) {
      sorted_[i].resize(indexes_[i]->entries.size());
    }
    out_.naming.pair = indexes_.size() > 1;
    SW_TRY(FindOptimizer());
    FindRoots();
    if (!roots_.empty()) SW_TRY(ChooseModel());
    return std::move(out_);
  }

 private:
  Status FindOptimizer();
  std::size_t ModelRootOf(const Entry& entry, bool has_paths) const;
  void FindRoots();
  std::vector<WeightCandidate> CandidatesOf(const std::vector<std::string_view>& roots,
                                            bool* by_optimizer) const;
  Status ChooseModel();
  void MarkModel(std::string_view root);
  void MarkSets();

  std::optional<Optimizer> Ask(const file_format::Index& index, const Entry& entry) const {
    return index.has_paths ? WithPath(entry) : WithoutPath(entry);
  }
  template <class Visit>
  void ForEntries(Visit&& visit) {
    for (std::size_t i = 0; i < indexes_.size(); ++i) {
      for (std::size_t e = 0; e < indexes_[i]->entries.size(); ++e) {
        visit(*indexes_[i], indexes_[i]->entries[e], sorted_[i][e]);
      }
    }
  }

  const std::vector<const file_format::Index*>& indexes_;
  const Optimizers optimizers_;
  std::string_view weights_of_;
  std::vector<std::vector<Sorted>>& sorted_;
  Sorting out_;
  std::unordered_set<std::string_view> names_;  // of parameters in the optimizer
  std::vector<std::string_view> ordered_names_;
  std::map<std::string_view, Root> roots_;
  std::map<std::string_view, std::uint32_t> numbers_;  // index into Sorting::sets, by prefix
};

/// Finds optimizers by their options, because a module of a model may also be named "state".
Status Sorter::FindOptimizer() {
  std::map<std::string_view, bool> roots;  // true: flat
  ForEntries([&](const file_format::Index& index, const Entry& entry, Sorted&) {
    const auto found = Ask(index, entry);
    if (!found || !found->option) return;
    const auto [at, fresh] =
        roots.emplace(std::string_view(entry.name).substr(0, found->root), found->flat);
    if (fresh) out_.naming.optimizer = PathOf(entry, found->root);
    at->second = at->second && found->flat;
  });
  if (roots.size() > 1 && optimizers_ == Optimizers::kOne) {
    std::vector<std::string> names;
    names.reserve(roots.size());
    for (const auto& [root, flat] : roots) names.push_back(Quoted(root));
    return Fail(Errc::kUnsupported, "one optimizer expected, found several: ", Joined(names, ", "));
  }
  if (roots.empty()) return {};
  out_.naming.flat = roots.begin()->second;
  ForEntries([&](const file_format::Index& index, const Entry& entry, Sorted& sorted) {
    const auto found = Ask(index, entry);
    if (!found || !roots.contains(std::string_view(entry.name).substr(0, found->root))) return;
    sorted = found->sorted;
    sorted.kind = found->option ? Sorted::Kind::kOption : Sorted::Kind::kSlot;
    const bool of_param = !sorted.name.empty() && (entry.is_tensor || found->option);
    if (of_param && names_.insert(sorted.name).second) ordered_names_.push_back(sorted.name);
  });
  return {};
}

/// Returns the length of the prefix before the parameter's name in a tensor's name.
std::size_t Sorter::ModelRootOf(const Entry& entry, bool has_paths) const {
  const std::size_t count = entry.part_count();
  const std::size_t above = count == 1 ? 0 : entry.path[count - 2].end + 1;
  if (has_paths) return above;
  const std::string_view name = entry.name;
  for (std::size_t at = 0; at != std::string_view::npos;) {
    if (names_.contains(name.substr(at))) return at;
    const std::size_t dot = name.find('.', at);
    at = dot == std::string_view::npos ? dot : dot + 1;
  }
  constexpr std::string_view kUsual = "model.";
  return names_.empty() && name.starts_with(kUsual) ? kUsual.size() : 0;
}

void Sorter::FindRoots() {
  ForEntries([&](const file_format::Index& index, const Entry& entry, Sorted& sorted) {
    if (!entry.is_tensor || sorted.kind != Sorted::Kind::kExtra) return;
    const std::size_t at = ModelRootOf(entry, index.has_paths);
    const std::string_view name = entry.name;
    Root& root = roots_[name.substr(0, at)];
    root.entries.push_back(&entry);
    root.names.push_back(name.substr(at));
    root.bytes += Elems(entry.shape) * ItemSize(entry.dtype);
    // A vector may also be a loss history or a random state.
    const bool matrix = IsFloating(entry.dtype) && entry.shape.size() > 1;
    root.weights = root.weights || matrix || names_.contains(name.substr(at));
  });
  const bool any =
      std::any_of(roots_.begin(), roots_.end(), [](const auto& one) { return one.second.weights; });
  if (any) std::erase_if(roots_, [](const auto& one) { return !one.second.weights; });
}

/// \param by_optimizer  set to true if the optimizer has parameters
///        and `matches` counts those found below a prefix
std::vector<WeightCandidate> Sorter::CandidatesOf(const std::vector<std::string_view>& roots,
                                                  bool* by_optimizer) const {
  std::vector<WeightCandidate> candidates;
  *by_optimizer = false;
  for (const std::string_view at : roots) {
    const Root& root = roots_.at(at);
    WeightCandidate one;
    one.name = at.empty() ? kTopLevel : at.substr(0, at.size() - 1);
    one.tensors = root.entries.size();
    one.bytes = root.bytes;
    one.matches = names_.empty() ? 0 : MatchNames(root.names, ordered_names_).size();
    *by_optimizer = *by_optimizer || one.matches > 0;
    candidates.push_back(std::move(one));
  }
  if (*by_optimizer) return candidates;
  // Compares with the candidate that has most tensors and is not a copy.
  std::size_t largest = 0;
  for (std::size_t i = 1; i < candidates.size(); ++i) {
    const auto rank = [](const WeightCandidate& one) {
      return std::pair(!NamesCopy(one.name), one.tensors);
    };
    if (rank(candidates[i]) > rank(candidates[largest])) largest = i;
  }
  std::unordered_map<std::string_view, const Shape*> shapes;
  const Root& most = roots_.at(roots[largest]);
  for (std::size_t i = 0; i < most.names.size(); ++i) {
    shapes.emplace(most.names[i], &most.entries[i]->shape);
  }
  for (std::size_t c = 0; c < roots.size(); ++c) {
    const Root& root = roots_.at(roots[c]);
    for (std::size_t i = 0; i < root.names.size(); ++i) {
      const auto found = shapes.find(root.names[i]);
      const bool same = found != shapes.end() && *found->second == root.entries[i]->shape;
      candidates[c].matches += same ? 1 : 0;
    }
  }
  return candidates;
}

/// Chooses the candidate with the optimizer's parameters, or without optimizer the largest one.
Status Sorter::ChooseModel() {
  std::vector<std::string_view> roots;
  roots.reserve(roots_.size());
  for (const auto& [at, root] : roots_) roots.push_back(at);
  bool by_optimizer = false;
  const std::vector<WeightCandidate> candidates = CandidatesOf(roots, &by_optimizer);
  const Result<std::size_t> model = ChooseWeights(candidates, by_optimizer);
  if (!model && weights_of_.empty()) return tl::unexpected<Error>(model.error());
  std::size_t taken = model.value_or(0);
  if (!weights_of_.empty()) {
    SW_TRY_ASSIGN(taken, FindWeights(candidates, weights_of_));
  }
  out_.chosen_by_name = !model || taken != *model;
  out_.sets = WeightSetsOf(candidates, taken);
  std::uint32_t number = 1;
  for (std::size_t i = 0; i < roots.size(); ++i) numbers_[roots[i]] = i == taken ? 0 : number++;
  // Selected weights replace the model under its prefix.
  const std::size_t place = model.value_or(taken);
  out_.naming.model = PathOf(*roots_.at(roots[place]).entries.front(), roots[place].size());
  MarkSets();
  MarkModel(roots[taken]);
  const Root& root = roots_.at(roots[taken]);
  for (const auto& [name, same] : MatchNames(root.names, ordered_names_)) {
    if (name != same) out_.model_names.emplace(name, same);
  }
  return {};
}

void Sorter::MarkSets() {
  ForEntries([&](const file_format::Index& index, const Entry& entry, Sorted& sorted) {
    if (!entry.is_tensor || sorted.kind != Sorted::Kind::kExtra) return;
    const std::string_view name = entry.name;
    const auto found = numbers_.find(name.substr(0, ModelRootOf(entry, index.has_paths)));
    if (found != numbers_.end()) sorted.set = found->second;
  });
}

void Sorter::MarkModel(std::string_view root) {
  ForEntries([&](const file_format::Index& index, const Entry& entry, Sorted& sorted) {
    if (!entry.is_tensor || sorted.kind != Sorted::Kind::kExtra) return;
    const std::string_view name = entry.name;
    const bool below = index.has_paths ? ModelRootOf(entry, true) == root.size() : true;
    if (!below || !name.starts_with(root)) return;
    sorted.kind = Sorted::Kind::kModel;
    sorted.name = name.substr(root.size());
  });
}

}  // namespace

Result<Sorting> Sort(const std::vector<const file_format::Index*>& indexes, Optimizers optimizers,
                     std::string_view weights_of, std::vector<std::vector<Sorted>>* sorted) {
  return Sorter(indexes, optimizers, weights_of, sorted).Run();
}

}  // namespace shardwright::checkpoints::dcp
