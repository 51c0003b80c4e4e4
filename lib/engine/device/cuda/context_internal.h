// SPDX-License-Identifier: Apache-2.0
// Describes the device of this rank, and converts CUDA runtime errors into results.

#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <string>

#include "support/base/result.h"

namespace shardwright::device::cuda {

/// Returns success, or kIo "<what>: <error name>: <error text>". Clears the runtime's
/// last error, which it keeps in addition to returning it.
Status Check(cudaError_t code, const std::string& what);

/// State shared by all objects that a device creates.
struct Context {
  int ordinal = 0;
  std::string name;  ///< "cuda:3 NVIDIA H100 80GB HBM3"
  std::chrono::milliseconds deadline{};

  /// Work on the device did not end although it was aborted. Freeing memory would wait
  /// for it without a bound, so the memory stays allocated until the process ends.
  std::atomic<bool> stuck = false;

  /// Makes this device the current one of the calling thread.
  Status Enter() const;
};

}  // namespace shardwright::device::cuda
