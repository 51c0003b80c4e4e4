// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/device/device.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

// The host twin. Shared memory is a file without a name (memfd) whose size is sealed; all other
// memory is ordinary. Streams do their work at once, so every event has come when it is made.
// Collectives are those of lib/support/comm, which has no deadline and no reach into a rank that
// does not come.

namespace shardwright::device {

/// What the system calls shared memory of ours, behind "/memfd:".
inline constexpr const char* kSharedName = "shardwright";

/// The device of this machine's memory; there is one, number 0.
/// \error kUsage  another ordinal
/// Collective.
Result<std::unique_ptr<Device>> OpenHostDevice(comm::Comm& comm, const DeviceOptions& options);

/// Bytes of memory that the machine, and the control group of this process, have left.
/// \error kIo
/// Local; reads files of the system.
Result<std::uint64_t> FreeHostBytes();

/// As Device::Allocate. Local.
Result<std::unique_ptr<Buffer>> AllocateHost(Place place, std::uint64_t bytes);

/// As Device::Export. Local.
Result<Handle> ExportHost(const Buffer& buffer);

/// As Device::Import. A buffer whose owner has sealed it against writing (F_SEAL_FUTURE_WRITE) may
/// be read only.
/// Local.
Result<std::unique_ptr<Buffer>> ImportHost(const Handle& handle);

/// As Device::MakeCollective. Every call begins with a word of all ranks of `comm`, so that a rank
/// that aborts meanwhile takes part in it, and all others fail. Sums of 16-bit types are made in
/// float32 and rounded once.
/// Collective.
Result<std::unique_ptr<Collective>> MakeHostCollective(comm::Comm& comm,
                                                       std::span<const int> group);

}  // namespace shardwright::device
