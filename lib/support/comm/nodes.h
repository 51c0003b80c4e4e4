// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::comm {

/// The machine that a rank runs on. Two containers with the same host name are different
/// nodes only if their kernels were booted separately.
struct Node {
  std::string host;
  std::string boot;  ///< the kernel's id of its last boot
  bool operator==(const Node&) const = default;
};

/// Returns the node of each rank, by rank.
/// \error as Comm::AllGather
/// Collective.
Result<std::vector<Node>> NodesOfRanks(Comm& comm);

}  // namespace shardwright::comm
