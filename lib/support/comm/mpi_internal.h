// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "support/comm/comm.h"

namespace shardwright::comm::internal {

/// Starts MPI and makes a Comm of all its ranks. Collective. \error as MakeComm
Result<std::unique_ptr<Comm>> MakeMpiComm(const CommOptions& options);

}  // namespace shardwright::comm::internal
