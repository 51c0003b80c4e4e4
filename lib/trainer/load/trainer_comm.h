// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "support/comm/comm.h"

namespace shardwright::trainer {

/// Runs one collective of the trainer. It is a C function, so that it can be written in any
/// language. All ranks call it in the same order. Its results stay valid until the next call.
/// \param what      of Transport
/// \param root      kFromRoot: the rank that sends
/// \param sent      kEachToEach: the pieces for rank 0, 1, ..., concatenated; otherwise one piece
/// \param sent_bytes      of each piece
/// \param received        kEachToEach, kToAll: one piece of each rank; kFromRoot: one piece
/// \param received_bytes  of each piece
/// \returns 0, or another number on failure: then the ranks may be out of step
using SwapFunction = int (*)(std::int32_t what, std::int32_t root, const void* sent,
                             const std::uint64_t* sent_bytes, const void** received,
                             const std::uint64_t** received_bytes);

enum class Transport : std::int32_t { kEachToEach = 0, kToAll = 1, kFromRoot = 2 };

/// Makes a communicator for the ranks of a trainer, which exchange
/// data through `swap`. After `swap` fails once, every call fails.
/// \pre 0 <= rank < size
std::unique_ptr<comm::Comm> MakeTrainerComm(int rank, int size, SwapFunction swap);

}  // namespace shardwright::trainer
