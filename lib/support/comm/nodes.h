// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::comm {

/// The machine that a rank runs on. Two containers with one name are two nodes only if they were
/// booted apart.
struct Node {
  std::string host;
  std::string boot;  ///< the kernel's id of its last start
  bool operator==(const Node&) const = default;
};

/// By rank.
/// \error as Comm::AllGather
/// Collective.
Result<std::vector<Node>> NodesOfRanks(Comm& comm);

}  // namespace shardwright::comm
