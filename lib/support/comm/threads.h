// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <vector>

#include "support/comm/comm.h"

namespace shardwright::comm {

/// Runs `body` on `ranks` threads of this process, each with a Comm of that many ranks, to test
/// collective code without MPI. If ranks are in different collectives, or wait for a rank that
/// has returned, their calls fail with kInternal instead of waiting forever.
/// \returns the status of each rank, by rank; an exception of a body becomes kInternal
/// Local.
std::vector<Status> RunThreads(int ranks, const std::function<Status(Comm&)>& body);

}  // namespace shardwright::comm
