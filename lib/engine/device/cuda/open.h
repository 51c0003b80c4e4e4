// SPDX-License-Identifier: Apache-2.0
// lib/engine/device/cuda: the CUDA and NCCL backend of device.h.
// The module is one plugin (plugin.cc). It links the CUDA runtime and opens NCCL when a group
// has more than one rank. Every wait polls until a deadline: waits for streams and events
// (wait_internal.h), and for communicators, which are non-blocking for this reason
// (communicator_internal.h). A communicator that fails or misses the deadline is aborted, which
// ends its kernels, so that their memory can be freed. This module has no kernels of its own.

#pragma once

#include <memory>

#include "engine/device/device.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::device::cuda {

/// Implements OpenDevice(Kind::kCuda, ...) inside the plugin. Collective.
Result<std::unique_ptr<Device>> Open(comm::Comm& comm, const DeviceOptions& options);

}  // namespace shardwright::device::cuda
