#include "dialect/dcp/sort_internal.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "base/text.h"

namespace shardwright::dialect::dcp {
namespace {

namespace files = shardwright::dcp;
using files::Entry;

constexpr std::string_view kState = "state";
constexpr std::string_view kGroups = "param_groups";

std::optional<std::uint64_t> NumberOf(std::string_view text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number > 1'000'000) {
    return std::nullopt;
  }
  return number;
}

/// An entry that may be the optimizer's: above `root` bytes of its name is where that lies.
struct Optimizer {
  std::size_t root = 0;
  bool flat = false;
  bool option = false;
  Sorted sorted;
};

/// The last component of a text, and what is before its dot.
std::pair<std::string_view, std::string_view> SplitLast(std::string_view text) {
  const std::size_t dot = text.rfind('.');
  if (dot == std::string_view::npos) return {{}, text};
  return {text.substr(0, dot), text.substr(dot + 1)};
}

/// "state.<name>.<key>" and "param_groups.<name>.<key>", the text after `root` bytes.
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
  const std::size_t root = count == 1 ? 0 : entry.path[count - 2].end + 1;
  return FlatAt(entry.part(count - 1), root);
}

/// Without paths only the dots tell.
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

/// The path of a prefix of an entry's name that ends in a dot, or is empty.
std::vector<std::string> PathOf(const Entry& entry, std::size_t bytes) {
  std::vector<std::string> path;
  if (bytes == 0) return path;
  if (entry.path.empty()) return {entry.name.substr(0, bytes - 1)};
  for (std::size_t i = 0; i < entry.path.size() && entry.path[i].end < bytes; ++i) {
    path.emplace_back(entry.part(i));
  }
  return path;
}

class Sorter {
 public:
  Sorter(const std::vector<const files::Index*>& indexes, std::vector<std::vector<Sorted>>* sorted)
      : indexes_(indexes), sorted_(*sorted) {}

  Result<Naming> Go() {
    sorted_.resize(indexes_.size());
    for (std::size_t i = 0; i < indexes_.size(); ++i) {
      sorted_[i].resize(indexes_[i]->entries.size());
    }
    naming_.pair = indexes_.size() > 1;
    SW_TRY(FindOptimizer());
    FindModel();
    return std::move(naming_);
  }

 private:
  Status FindOptimizer();
  void FindModel();
  std::size_t ModelRootOf(const Entry& entry, bool has_paths) const;

  std::optional<Optimizer> Ask(const files::Index& index, const Entry& entry) const {
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

  const std::vector<const files::Index*>& indexes_;
  std::vector<std::vector<Sorted>>& sorted_;
  Naming naming_;
  std::unordered_set<std::string_view> names_;  // of parameters that the optimizer has
};

/// Only where options are is an optimizer: a module may be called "state".
Status Sorter::FindOptimizer() {
  std::map<std::string_view, bool> roots;  // whether flat
  ForEntries([&](const files::Index& index, const Entry& entry, Sorted&) {
    const auto found = Ask(index, entry);
    if (!found || !found->option) return;
    const auto [at, fresh] =
        roots.emplace(std::string_view(entry.name).substr(0, found->root), found->flat);
    if (fresh) naming_.optimizer = PathOf(entry, found->root);
    at->second = at->second && found->flat;
  });
  if (roots.size() > 1) {
    std::vector<std::string> names;
    names.reserve(roots.size());
    for (const auto& [root, flat] : roots) names.push_back(Quoted(root));
    return Fail(Errc::kUnsupported, "several optimizers: " + Joined(names, ", "));
  }
  if (roots.empty()) return {};
  const auto& root = roots.begin()->first;
  naming_.flat = roots.begin()->second;
  ForEntries([&](const files::Index& index, const Entry& entry, Sorted& sorted) {
    const auto found = Ask(index, entry);
    if (!found || std::string_view(entry.name).substr(0, found->root) != root) return;
    sorted = found->sorted;
    sorted.kind = found->option ? Sorted::Kind::kOption : Sorted::Kind::kSlot;
    if (!sorted.name.empty() && entry.is_tensor) names_.insert(sorted.name);
  });
  return {};
}

/// How many bytes of a tensor's name are above its parameter.
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

/// The model is where the optimizer's parameters are; without an optimizer, where most tensors are.
void Sorter::FindModel() {
  struct Count {
    std::size_t known = 0;
    std::size_t all = 0;
    const Entry* entry = nullptr;
  };
  std::map<std::string_view, Count> roots;
  ForEntries([&](const files::Index& index, const Entry& entry, Sorted& sorted) {
    if (!entry.is_tensor || sorted.kind != Sorted::Kind::kExtra) return;
    const std::size_t root = ModelRootOf(entry, index.has_paths);
    const std::string_view name = entry.name;
    Count& count = roots[name.substr(0, root)];
    count.known += names_.contains(name.substr(root)) ? 1 : 0;
    ++count.all;
    if (count.entry == nullptr) count.entry = &entry;
  });
  const auto most = std::max_element(roots.begin(), roots.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.known, a.second.all) < std::pair(b.second.known, b.second.all);
  });
  if (most == roots.end()) return;
  const std::string root(most->first);
  naming_.model = PathOf(*most->second.entry, root.size());
  ForEntries([&](const files::Index& index, const Entry& entry, Sorted& sorted) {
    if (!entry.is_tensor || sorted.kind != Sorted::Kind::kExtra) return;
    const std::string_view name = entry.name;
    const bool below = index.has_paths ? ModelRootOf(entry, true) == root.size() : true;
    if (!below || !name.starts_with(root)) return;
    sorted.kind = Sorted::Kind::kModel;
    sorted.name = name.substr(root.size());
  });
}

}  // namespace

Result<Naming> Sort(const std::vector<const files::Index*>& indexes,
                    std::vector<std::vector<Sorted>>* sorted) {
  return Sorter(indexes, sorted).Go();
}

}  // namespace shardwright::dialect::dcp
