// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"

namespace shardwright::placement {

/// A node that came or went.
struct NodeEvent {
  std::uint64_t time_ms = 0;
  bool add = false;
  std::string node;
};

/// Reads lines "milliseconds,add|remove,node" (docs/formats/loads.md, "Node events").
/// \error kBadInput  names the line: not such a line, time that runs backward, a node that comes
///        twice or goes without being there; kLimit  more than limits::kMoeEvents
/// Pure.
Result<std::vector<NodeEvent>> ParseNodeEvents(std::string_view text, const std::string& where);

/// Same, of a file.
/// \error kNotFound; as ParseNodeEvents
/// Local.
Result<std::vector<NodeEvent>> ReadNodeEvents(const std::string& path);

}  // namespace shardwright::placement
