// SPDX-License-Identifier: Apache-2.0
// lib/engine/device/cuda: the device of device.h on CUDA and NCCL.
// All of it is one plugin (plugin.cc). The CUDA runtime is linked in, NCCL is opened when a group
// has more than one rank. Whatever is waited for is asked again and again until the deadline:
// streams and events (wait_internal.h), and communicators, which are made non-blocking for that
// (communicator_internal.h). A communicator that fails or is late is aborted, which ends its
// kernels, so that memory can be given back. launch.cu is the only file for nvcc.

#pragma once

#include <memory>

#include "engine/device/device.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::device::cuda {

/// OpenDevice(Kind::kCuda, ...) where the plugin is open already. Collective.
Result<std::unique_ptr<Device>> Open(comm::Comm& comm, const DeviceOptions& options);

}  // namespace shardwright::device::cuda
