// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/device/device.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

// The host backend. Shared memory is an unnamed file (memfd) with a sealed
// size; all other memory is ordinary. Streams run their work at once, so
// every event has ended when it is created. Collectives use lib/support/comm,
// which has no deadline and cannot interrupt a rank that does not respond.

namespace shardwright::device {

/// Name of this program's shared memory in /proc, after "/memfd:".
inline constexpr const char* kSharedName = "shardwright";

/// Opens the host's memory as a device. It is the only one, with ordinal 0.
/// \error kUsage  another ordinal
/// Collective.
Result<std::unique_ptr<Device>> OpenHostDevice(comm::Comm& comm, const DeviceOptions& options);

/// Returns the bytes of memory that the machine and this process's control group have left.
/// \error kIo
/// Local; reads files in /proc and /sys.
Result<std::uint64_t> FreeHostBytes();

/// Implements Device::Allocate. Local.
Result<std::unique_ptr<Buffer>> AllocateHost(Place place, std::uint64_t bytes);

/// Implements Device::Export. Local.
Result<Handle> ExportHost(const Buffer& buffer);

/// Implements Device::Import. The mapping is read-only if the exporting
/// process has sealed the buffer against writing (F_SEAL_FUTURE_WRITE).
/// Local.
Result<std::unique_ptr<Buffer>> ImportHost(const Handle& handle);

/// Implements Device::MakeCollective. Collective.
Result<std::unique_ptr<Collective>> MakeHostCollective(comm::Comm& comm,
                                                       std::span<const int> group);

}  // namespace shardwright::device
