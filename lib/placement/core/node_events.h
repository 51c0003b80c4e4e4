// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"

namespace shardwright::placement {

/// A node that joins or leaves the cluster.
struct NodeEvent {
  std::uint64_t time_ms = 0;
  bool add = false;
  std::string node;
};

/// Reads lines "milliseconds,add|remove,node" (docs/formats/loads.md, "Node events").
/// \error kBadInput  names the malformed line; also for times that run backward, a node that joins
///        twice or leaves while absent; kLimit  more than limits::kMoeEvents
/// Pure.
Result<std::vector<NodeEvent>> ParseNodeEvents(std::string_view text, const std::string& where);

/// Reads and parses a file of node events.
/// \error kNotFound; other errors as ParseNodeEvents
/// Local.
Result<std::vector<NodeEvent>> ReadNodeEvents(const std::string& path);

}  // namespace shardwright::placement
