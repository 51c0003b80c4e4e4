// SPDX-License-Identifier: Apache-2.0
// Runs cache::Load, the load of `ucp-load serve`, on the devices of a test's machine, and compares
// the bytes in their memory with those of a load on the host.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "convert/input.h"
#include "machine.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "trainer/cache/cache.h"

namespace shardwright::device::cuda {

/// A checkpoint and the result of its load on the host, by rank.
struct HostLoad {
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<std::unique_ptr<convert::Input>> inputs;
  std::vector<cache::Loaded> loaded;
};

/// Opens a checkpoint of the project on so many ranks and loads it on the host. Two processes hold
/// each model tensor, so that ranks gather bytes from each other. Fails the test on an error.
std::unique_ptr<HostLoad> LoadOnHost(int ranks);

/// Loads the same on the ranks' devices. kMismatch, with the first place, unless the bytes are the
/// same.
Status LoadOnDevice(Rank& rank, const HostLoad& host, Sink& sink);

}  // namespace shardwright::device::cuda
