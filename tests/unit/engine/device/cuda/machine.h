// SPDX-License-Identifier: Apache-2.0
// The machine that a test runs on: real devices, or the doubles (SW_CUDA_DOUBLE). The same tests
// run on both. Tests that need more devices than the machine has are skipped.

#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/device/device.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

#ifdef SW_CUDA_DOUBLE
#include "device/double/double.h"
#endif

namespace shardwright::device::cuda {

/// State of one rank.
struct Rank {
  comm::Comm& comm;
  Device& device;
  int number() const { return comm.rank(); }
  int ranks() const { return comm.size(); }
};

/// Opens a device for each rank, each a thread, and runs `body` on them. Every rank must succeed,
/// free its resources, and cause no violations that only a wrong program causes. Skips the
/// test where there are fewer devices.
void OnRanks(int ranks, const std::function<Status(Rank&)>& body,
             const DeviceOptions& options = {});

/// The same, but returns the result of each rank. Checks nothing and resets nothing.
std::vector<Status> RunRanks(int ranks, const std::function<Status(Rank&)>& body,
                             const DeviceOptions& options = {});

/// The devices that there are.
int Devices();

/// Bytes that differ with every seed and place.
std::vector<std::byte> Pattern(std::uint64_t bytes, std::uint64_t seed);

/// Copies device memory to the host through pinned memory, and waits for the copy.
Result<std::vector<std::byte>> Read(Device& device, Stream& stream, const std::byte* from,
                                    std::uint64_t bytes);
/// Puts bytes into device memory and waits.
Status Write(Device& device, Stream& stream, std::byte* to, std::span<const std::byte> bytes);

/// kMismatch, with the first place, unless the two are equal.
Status Same(std::span<const std::byte> expected, std::span<const std::byte> found,
            const std::string& what);

}  // namespace shardwright::device::cuda
