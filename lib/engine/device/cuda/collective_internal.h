// SPDX-License-Identifier: Apache-2.0
// Collectives of device.h over NCCL; a group of one rank needs none.

#pragma once

#include <array>
#include <memory>
#include <span>

#include "engine/device/cuda/context_internal.h"
#include "engine/device/device.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::device::cuda {

/// Device::MakeCollective.
/// \param uuid  of this rank's device: NCCL wants another one for each rank
/// Collective.
Result<std::unique_ptr<Collective>> MakeCudaCollective(const Context& context,
                                                       std::array<char, 16> uuid, comm::Comm& comm,
                                                       std::span<const int> group);

}  // namespace shardwright::device::cuda
