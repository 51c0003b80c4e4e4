// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>

#include "checkpoints/deepspeed/native/read/read_internal.h"

// DeepSpeed removes groups without parameters before it numbers them, so a pipeline stage can
// have fewer groups than another one. The files identify groups only by number.

namespace shardwright::checkpoints::reader {
namespace {

/// Matches the groups in [first, last) with groups in [from, to), each with the first possible one.
/// Returns the matched iterators: fewer than groups if one of them has no match.
template <class Iterator>
std::vector<Iterator> MatchInOrder(Iterator first, Iterator last, Iterator from, Iterator to) {
  std::vector<Iterator> out;
  for (; first != last; ++first) {
    from = std::find_if(from, to, [&](const Node* group) { return SameOptions(*first, group); });
    if (from == to) break;
    out.push_back(from++);
  }
  return out;
}

/// Finds every group of `own` in `all`: by its options, in the same order.
/// \returns by group of `all`: the group's number in `own`, or nothing
Result<std::vector<std::optional<std::size_t>>> Match(const Reading& reading, const GroupList& all,
                                                      const GroupList& own) {
  const std::vector<const Node*>& to = all.groups->items;
  const std::vector<const Node*>& from = own.groups->items;
  const auto first = MatchInOrder(from.begin(), from.end(), to.begin(), to.end());
  const auto last = MatchInOrder(from.rbegin(), from.rend(), to.rbegin(), to.rend());
  const std::string& name = reading.file_name(all.file);
  if (first.size() < from.size()) {
    return Fail(Errc::kUnsupported, reading.file_name(own.file), ": ", from.size(),
                " optimizer groups, ", name, " has ", to.size(), ": group ", first.size(),
                " has the options of none of these, so the reader cannot identify it: one stage "
                "must have all groups, with the same options and in the same order");
  }
  std::vector<std::optional<std::size_t>> out(to.size());
  for (std::size_t g = 0; g < from.size(); ++g) {
    const auto least = static_cast<std::size_t>(first[g] - to.begin());
    const auto most =
        static_cast<std::size_t>(std::prev(last[from.size() - 1 - g].base()) - to.begin());
    if (least != most) {
      return Fail(Errc::kUnsupported, reading.file_name(own.file), ": ", from.size(),
                  " optimizer groups, ", name, " has ", to.size(), ": group ", g,
                  " has the options of its groups ", least, " and ", most,
                  ", so the reader cannot identify it: load the checkpoint in DeepSpeed, give "
                  "every group another option, such as \"name\", and save it again");
    }
    out[least] = g;
  }
  return out;
}

}  // namespace

Status MatchGroups(Reading* reading, const std::vector<GroupList>& lists) {
  const auto all = std::max_element(lists.begin(), lists.end(),
                                    [](const auto& a, const auto& b) { return a.count < b.count; });
  reading->state.options_rank = static_cast<std::size_t>(all - lists.begin());
  for (const GroupList& own : lists) {
    if (own.count == all->count) {
      std::vector<std::optional<std::size_t>> same(own.count);
      for (std::size_t g = 0; g < own.count; ++g) same[g] = g;
      reading->own_groups.push_back(std::move(same));
      continue;
    }
    for (const GroupList* list : {&*all, &own}) {
      if (list->groups != nullptr && list->groups->is_list() &&
          list->groups->items.size() == list->count) {
        continue;
      }
      return Fail(
          Errc::kBadInput, reading->file_name(all->file), " and ", reading->file_name(own.file),
          ": the number of optimizer groups differs: ", all->count, " and ", own.count, ", and ",
          reading->file_name(list->file), " does not have the options of its groups");
    }
    SW_TRY_ASSIGN(auto numbers, Match(*reading, *all, own));
    reading->own_groups.push_back(std::move(numbers));
  }
  return {};
}

}  // namespace shardwright::checkpoints::reader
