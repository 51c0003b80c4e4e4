// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/unit_order.h"

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <unordered_set>

#include "checkpoints/model/name_parts.h"
#include "support/base/checked.h"

namespace shardwright::checkpoints {
namespace {

/// Returns the name up to and including the number of its block. Empty outside of blocks.
std::string_view BlockOf(std::string_view name, BlockIndex index) {
  std::string_view block;
  ForEachModule(name, [&](std::string_view word, std::size_t end) {
    if (!IsListIndex(word)) return true;
    block = name.substr(0, end);
    return index == BlockIndex::kLast;
  });
  return block;
}

}  // namespace

std::vector<std::vector<std::uint32_t>> UnitParams(std::span<const std::string_view> names,
                                                   BlockIndex index) {
  std::vector<std::vector<std::uint32_t>> units(1);
  std::unordered_map<std::string_view, std::size_t> known = {{"", 0}};
  for (std::uint32_t i = 0; i < names.size(); ++i) {
    const auto [at, fresh] = known.emplace(BlockOf(names[i], index), units.size());
    if (fresh) units.emplace_back();
    units[at->second].push_back(i);
  }
  if (units.front().empty()) units.erase(units.begin());
  return units;
}

bool ListedByUnit(std::span<const std::string_view> names, std::span<const std::uint32_t> listed) {
  if (std::is_sorted(listed.begin(), listed.end())) return false;
  std::vector<bool> member(names.size(), false);
  for (const std::uint32_t one : listed) member[one] = true;
  for (const BlockIndex index : {BlockIndex::kFirst, BlockIndex::kLast}) {
    std::vector<std::uint32_t> by_unit;
    for (const std::vector<std::uint32_t>& unit : UnitParams(names, index)) {
      for (const std::uint32_t one : unit) {
        if (member[one]) by_unit.push_back(one);
      }
    }
    if (std::equal(by_unit.begin(), by_unit.end(), listed.begin(), listed.end())) return true;
  }
  return false;
}

bool ModulesAreConsecutive(std::span<const std::string_view> names) {
  std::unordered_set<std::string_view> seen;
  std::string_view before;
  for (const std::string_view name : names) {
    bool returns = false;
    bool same = true;  // the modules so far are those of the name before
    ForEachModule(name, [&](std::string_view, std::size_t end) {
      same = same && before.size() > end && before[end] == '.' &&
             before.substr(0, end) == name.substr(0, end);
      if (!same && !seen.insert(name.substr(0, end)).second) returns = true;
      return !returns;
    });
    if (returns) return false;
    before = name;
  }
  return true;
}

bool ListsAscend(std::span<const std::string_view> names) {
  std::unordered_map<std::string_view, std::uint64_t> last;  // by the name of the list
  for (const std::string_view name : names) {
    bool ascend = true;
    ForEachModule(name, [&](std::string_view word, std::size_t end) {
      if (!IsListIndex(word)) return true;
      const std::uint64_t number = NumberIn<std::uint64_t>(word).value_or(0);
      const auto [at, fresh] = last.emplace(name.substr(0, end - word.size()), number);
      ascend = ascend && (fresh || at->second <= number);
      at->second = number;
      return ascend;
    });
    if (!ascend) return false;
  }
  return true;
}

bool InOneList(std::string_view a, std::string_view b) {
  bool found = false;
  ForEachModule(a, [&](std::string_view word, std::size_t end) {
    const std::string_view list = a.substr(0, end - word.size());
    if (!b.starts_with(list)) return false;
    const std::size_t dot = b.find('.', list.size());
    if (dot == std::string_view::npos) return false;
    const std::string_view other = b.substr(list.size(), dot - list.size());
    found = IsListIndex(word) && IsListIndex(other);
    return !found && word == other;
  });
  return found;
}

}  // namespace shardwright::checkpoints
