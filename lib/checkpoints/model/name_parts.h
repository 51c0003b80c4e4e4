// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace shardwright::checkpoints {

/// Returns true if a part of a name is an index in a list of modules: "3" of "layers.3.weight".
/// Pure.
inline bool IsListIndex(std::string_view part) {
  return !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
}

/// Calls visit(part, end) for each part of a name that is separated by dots. `end` is the length
/// of the name up to and including the part. Stops when visit returns false.
template <class Visit>
void ForEachPart(std::string_view name, Visit&& visit) {
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t end = std::min(name.find('.', at), name.size());
    if (!visit(name.substr(at, end - at), end)) return;
    at = end + 1;
  }
}

/// Calls visit(part, end) like ForEachPart, for the modules only: without the last part, which
/// names the parameter.
template <class Visit>
void ForEachModule(std::string_view name, Visit&& visit) {
  ForEachPart(name, [&](std::string_view part, std::size_t end) {
    return end < name.size() && visit(part, end);
  });
}

}  // namespace shardwright::checkpoints
