// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "engine/exec/exchange.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::exec {

/// Demands that every replica of the source repeats its owner bit for bit.
/// \param memory_bytes  that this rank may hold of what others send it, where files are not visible
///        on all
/// \error kBadInput  names the tensor, an element and both files
/// Collective; elements are spread over ranks and threads.
Status CompareReplicas(comm::Comm& comm, Exchange& source, unsigned threads,
                       std::uint64_t memory_bytes, Sink& sink);

}  // namespace shardwright::exec
