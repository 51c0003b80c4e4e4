// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "support/comm/comm.h"

namespace shardwright::trainer {

/// What a trainer's collectives have to do for us: one C function, so that it may be of any
/// language. All ranks call it alike. What it gives stays until it is called again.
/// \param what      of Transport
/// \param root      kFromRoot: whose bytes
/// \param sent      kEachToEach: the pieces for rank 0, 1, ..., one after the other; else one piece
/// \param sent_bytes      of each piece
/// \param received        kEachToEach, kToAll: one piece of each rank; kFromRoot: one piece
/// \param received_bytes  of each piece
/// \returns 0, or anything else where it failed: then the ranks may no longer be in step
using SwapFunction = int (*)(std::int32_t what, std::int32_t root, const void* sent,
                             const std::uint64_t* sent_bytes, const void** received,
                             const std::uint64_t** received_bytes);

enum class Transport : std::int32_t { kEachToEach = 0, kToAll = 1, kFromRoot = 2 };

/// The ranks of a trainer, which talk through a function of it. After a failure of that function
/// every call fails.
/// \pre 0 <= rank < size
std::unique_ptr<comm::Comm> MakeTrainerComm(int rank, int size, SwapFunction swap);

}  // namespace shardwright::trainer
