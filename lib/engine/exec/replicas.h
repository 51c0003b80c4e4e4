// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "engine/exec/exchange.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::exec {

/// Checks that every replica in the source equals its owner bit for bit.
/// \param memory_bytes  limit for this rank's buffers of bytes
///        from other ranks, if not every rank sees all files
/// \error kBadInput  names the tensor, an element and both files
/// Collective; elements are distributed over ranks and threads.
Status CompareReplicas(comm::Comm& comm, Exchange& source, unsigned threads,
                       std::uint64_t memory_bytes, Sink& sink);

}  // namespace shardwright::exec
