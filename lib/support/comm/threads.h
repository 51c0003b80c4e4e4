// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <vector>

#include "support/comm/comm.h"

namespace shardwright::comm {

/// Runs `body` on `ranks` threads of this process, each with a Comm of that many ranks, so that
/// code between ranks is tested without MPI. Ranks in different collectives, or in one that
/// another rank has left for good, get kInternal instead of waiting for ever.
/// \returns what each rank returned; an exception out of a body is kInternal
/// Local.
std::vector<Status> RunThreads(int ranks, const std::function<Status(Comm&)>& body);

}  // namespace shardwright::comm
