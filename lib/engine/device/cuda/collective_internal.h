// SPDX-License-Identifier: Apache-2.0
// Implements the collectives of device.h with NCCL. A group of one rank needs no NCCL.

#pragma once

#include <array>
#include <memory>
#include <span>

#include "engine/device/cuda/context_internal.h"
#include "engine/device/device.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::device::cuda {

/// Implements Device::MakeCollective.
/// \param uuid  of this rank's device; NCCL requires a different device for each rank
/// Collective.
Result<std::unique_ptr<Collective>> MakeCudaCollective(const Context& context,
                                                       std::array<char, 16> uuid, comm::Comm& comm,
                                                       std::span<const int> group);

}  // namespace shardwright::device::cuda
