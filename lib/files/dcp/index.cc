// SPDX-License-Identifier: Apache-2.0
#include "files/dcp/index.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "support/base/checked.h"

namespace shardwright::dcp {
namespace {

/// Returns true if the first `parts` parts of `longer` are the whole path of `shorter`.
bool IsPrefix(const Entry& shorter, const Entry& longer, std::size_t parts) {
  if (shorter.path.empty()) return parts == 1;
  return shorter.path.size() == parts &&
         std::equal(shorter.path.begin(), shorter.path.end(), longer.path.begin());
}

}  // namespace

bool Chunk::is_empty() const {
  return std::find(sizes.begin(), sizes.end(), std::uint64_t{0}) != sizes.end();
}

std::string_view Entry::part(std::size_t i) const {
  if (path.empty()) return name;
  const std::size_t first = i == 0 ? 0 : path[i - 1].end + 1;
  return std::string_view(name).substr(first, path[i].end - first);
}

std::optional<std::uint64_t> RankOfIndex(std::string_view name) {
  constexpr std::string_view kBefore = "__";
  if (!name.starts_with(kBefore) || !name.ends_with(kIndexName)) return std::nullopt;
  name.remove_prefix(kBefore.size());
  if (name.size() <= kIndexName.size()) return std::nullopt;
  name.remove_suffix(kIndexName.size());
  const bool plain = name.size() == 1 || name.front() != '0';
  return plain ? NumberIn<std::uint64_t>(name) : std::nullopt;
}

std::uint32_t Index::FileNumber(std::string_view name) {
  const auto at = std::find(files.begin(), files.end(), name);
  const auto number = static_cast<std::uint32_t>(at - files.begin());
  if (number == files.size()) files.emplace_back(name);
  return number;
}

Status CheckVolumes(const Index& index) {
  for (const Entry& entry : index.entries) {
    if (!entry.is_tensor) continue;
    std::uint64_t sum = 0;
    for (const Chunk& chunk : entry.chunks) {
      SW_TRY_ASSIGN(sum, CheckedAdd(sum, Elems(chunk.sizes)));
    }
    const std::uint64_t whole = Elems(entry.shape);
    if (sum == whole) continue;
    return Fail(Errc::kBadInput, "tensor \"", entry.name, "\" ", ToString(entry.shape), ": its ",
                entry.chunks.size(), " chunks have ", sum, " of ", whole, " elements",
                (sum > whole ? ": they overlap" : ": a part of it is missing"));
  }
  return {};
}

Status CheckPaths(const Index& index) {
  struct Container {
    bool is_list = false;
    std::unordered_set<std::string_view> numbers;
  };
  std::unordered_map<std::string_view, std::uint32_t> by_name;
  by_name.reserve(index.entries.size());
  for (std::uint32_t i = 0; i < index.entries.size(); ++i)
    by_name.emplace(index.entries[i].name, i);
  std::unordered_map<std::string_view, Container> containers;  // by the text before the dot
  containers.reserve(index.entries.size() / 2);
  const auto collide = [](std::string_view prefix) {
    return Fail(Errc::kBadInput, "planner_data: \"", prefix,
                "\" has different kinds in different paths");
  };
  for (const Entry& entry : index.entries) {
    if (entry.path.empty()) continue;  // path of one part
    if (entry.path.front().is_index) return collide(entry.part(0));
    for (std::size_t i = 1; i < entry.path.size(); ++i) {
      const std::string_view prefix = std::string_view(entry.name).substr(0, entry.path[i - 1].end);
      const auto [at, fresh] = containers.try_emplace(prefix);
      Container& container = at->second;
      if (fresh) {
        container.is_list = entry.path[i].is_index;
        const auto leaf = by_name.find(prefix);
        if (leaf != by_name.end() && IsPrefix(index.entries[leaf->second], entry, i)) {
          return collide(prefix);
        }
      }
      if (container.is_list != entry.path[i].is_index) return collide(prefix);
      if (container.is_list) container.numbers.insert(entry.part(i));
    }
  }
  // DCP does not save empty dicts and lists, so other lists may lack items.
  constexpr std::string_view kGroups = "param_groups";
  for (const auto& [prefix, container] : containers) {
    if (prefix.find(kGroups) == std::string_view::npos) continue;
    for (std::size_t i = 0; container.is_list && i < container.numbers.size(); ++i) {
      if (container.numbers.contains(std::to_string(i))) continue;
      return Fail(Errc::kBadInput, "planner_data: list \"", prefix, "\" has ",
                  container.numbers.size(), " items, and none with index ", i);
    }
  }
  return {};
}

}  // namespace shardwright::dcp
